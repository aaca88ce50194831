from __future__ import annotations

import numpy
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.cases import add_sub_cases, identity_cases, infer_request
from benchmarks.probe import run_problem

GOOD = {"succeeded": 100, "failed": 0, "body_bytes": 19_300, "done": 100, "in_flight": 8, "answer_bytes": 193}


def test_a_run_without_errors_has_no_problem() -> None:
    assert run_problem(**GOOD) == ""


def test_requests_cut_off_at_the_end_are_no_problem() -> None:
    assert run_problem(**{**GOOD, "succeeded": 104, "failed": 4, "body_bytes": 19_300 + 4 * 193}) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"succeeded": 99}, "counts 99 successes"),
        ({"failed": 9}, "counts 9 failures"),
        ({"body_bytes": 19_300 - 193}, "19107 bytes"),
        ({"body_bytes": 19_300 + 9 * 193}, "21037 bytes"),
    ],
)
def test_errors_behind_http_status_200_are_seen(change: dict[str, int], words: str) -> None:
    assert words in run_problem(**{**GOOD, **change})


def test_a_request_carries_names_types_shapes_and_bytes() -> None:
    array = numpy.arange(6, dtype=numpy.int32).reshape(2, 3)
    request = service_pb2.ModelInferRequest.FromString(infer_request("m", {"A": array, "B": array.astype("float32")}))
    assert request.model_name == "m"
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs] == [
        ("A", "INT32", [2, 3]),
        ("B", "FP32", [2, 3]),
    ]
    assert request.raw_input_contents[0] == array.tobytes()


def test_bytes_elements_have_their_length_in_front() -> None:
    array = numpy.array([[b"jpeg"]], dtype=numpy.object_)
    request = service_pb2.ModelInferRequest.FromString(infer_request("m", {"A": array}))
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("BYTES", [1, 1])
    assert request.raw_input_contents[0] == b"\x04\x00\x00\x00jpeg"


def test_checks_refuse_wrong_answers() -> None:
    wrong = {"OUTPUT0": numpy.zeros((1, 16), numpy.int32), "OUTPUT1": numpy.zeros((1, 16), numpy.int32)}
    with pytest.raises(AssertionError):
        add_sub_cases("add_sub")[0].check(wrong)
    with pytest.raises(KeyError):
        identity_cases()[0].check({})
