"""Requests against a model's configuration: what fits, and Triton's words for what does not."""

from __future__ import annotations

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput, RequestHead
from rocserve.core.tensors import encode_bytes_elements
from rocserve.core.validation import RequestValidator, reshape_dims

ADD_SUB = ModelConfig(
    name="m",
    backend="onnx",
    max_batch_size=8,
    inputs=(
        InputConfig("INPUT0", DataType.INT32, (16,)),
        InputConfig("INPUT1", DataType.INT32, (16,)),
    ),
    outputs=(OutputConfig("OUTPUT0", DataType.INT32, (16,)), OutputConfig("OUTPUT1", DataType.INT32, (16,))),
)
TEXTS = ModelConfig(
    name="m",
    backend="onnx",
    inputs=(InputConfig("TEXT", DataType.BYTES, (-1,)),),
    outputs=(OutputConfig("OUT", DataType.BYTES, (-1,)),),
)


def request(
    *inputs: tuple[str, str, tuple[int, ...], bytes], outputs: tuple[RequestedOutput, ...] = (), **parameters: int
) -> InferRequest:
    head = RequestHead(
        "m", "", tuple(InputHead(name, datatype, shape) for name, datatype, shape, _ in inputs), outputs, parameters
    )
    return InferRequest(head, "", [data for *_, data in inputs])


def ints(name: str, shape: tuple[int, ...] = (1, 16), datatype: str = "INT32", size: int | None = None):
    count = 1
    for side in shape:
        count *= side
    return name, datatype, shape, bytes(count * 4 if size is None else size)


def error_of(config: ModelConfig, bad: InferRequest) -> str:
    with pytest.raises(ServeError) as caught:
        RequestValidator(config).validate(bad)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    return caught.value.text


def test_plan_of_a_good_request():
    plan = RequestValidator(ADD_SUB).validate(
        request(ints("INPUT1", (3, 16)), ints("INPUT0", (3, 16)), priority=2, timeout=7000)
    )
    assert plan.batch_size == 3
    assert [entry.name for entry in plan.inputs] == ["INPUT1", "INPUT0"]
    assert plan.batch_key == (("INPUT0", DataType.INT32, (16,)), ("INPUT1", DataType.INT32, (16,)))
    assert plan.outputs == ("OUTPUT0", "OUTPUT1")
    assert (plan.priority, plan.timeout_microseconds) == (2, 7000)


def test_order_of_inputs_does_not_keep_requests_apart():
    validator = RequestValidator(ADD_SUB)
    one = validator.validate(request(ints("INPUT0"), ints("INPUT1")))
    other = validator.validate(request(ints("INPUT1"), ints("INPUT0")))
    assert one.batch_key == other.batch_key


def test_a_head_is_checked_once_but_data_every_time():
    validator = RequestValidator(ADD_SUB)
    good = request(ints("INPUT0"), ints("INPUT1"))
    assert validator.validate(good) is validator.validate(good)
    with pytest.raises(ServeError, match="Expected 64, got 60"):
        validator.validate(InferRequest(good.head, "", [bytes(64), bytes(60)]))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            request(ints("INPUT0")),
            "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['INPUT0'], but"
            " missing required input(s) ['INPUT1']. Please provide all required input(s).",
        ),
        (
            request(ints("INPUT0"), ints("X")),
            "unexpected inference input 'X' for model 'm'; its inputs are: INPUT0, INPUT1",
        ),
        (
            request(ints("INPUT0"), ints("INPUT0")),
            "[request id: <id_unknown>] input 'INPUT0' already exists in request",
        ),
        (
            request(ints("INPUT0"), ints("INPUT1", (1, 8))),
            "[request id: <id_unknown>] unexpected shape for input 'INPUT1' for model 'm'. Expected [-1,16], got [1,8]."
            " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to"
            " each input shape. If you want to specify the full shape including the batch dim in your input dims"
            " config, try setting max_batch_size to zero. See the model configuration docs for more info on"
            " max_batch_size.",
        ),
        (
            request(ints("INPUT0", (9, 16)), ints("INPUT1", (9, 16))),
            "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'm'",
        ),
        (
            request(ints("INPUT0", (0, 16)), ints("INPUT1", (0, 16))),
            "[request id: <id_unknown>] inference request batch-size must be >= 1 for 'm'",
        ),
        (
            request(ints("INPUT0", (2, 16)), ints("INPUT1", (1, 16))),
            "[request id: <id_unknown>] input 'INPUT0' batch size does not match other inputs for 'm'",
        ),
        (
            request(ints("INPUT0"), ints("INPUT1"), ints("INPUT2")),
            "[request id: <id_unknown>] expected 2 inputs but got 3 inputs for model 'm'. Got input(s) ['INPUT2',"
            "'INPUT1','INPUT0'], but missing required input(s) []. Please provide all required input(s).",
        ),
        (
            request(ints("INPUT0"), ints("INPUT1", (1, -1), size=64)),
            "[request id: <id_unknown>] All input dimensions should be specified for input 'INPUT1' for model 'm', got"
            " [1,-1]",
        ),
        (
            request(ints("INPUT0"), ints("INPUT1", datatype="FP32")),
            "[request id: <id_unknown>] inference input 'INPUT1' data-type is 'FP32', but model 'm' expects 'INT32'",
        ),
        (
            request(ints("INPUT0", size=60), ints("INPUT1")),
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'm'. Expected 64, got 60",
        ),
        (
            request(ints("INPUT0"), ints("INPUT1"), outputs=(RequestedOutput("NOPE"),)),
            "unexpected inference output 'NOPE' for model 'm'; its outputs are: OUTPUT0, OUTPUT1",
        ),
        (
            request(ints("INPUT0"), ints("INPUT1"), outputs=(RequestedOutput("OUTPUT0", {"classification": -2}),)),
            "invalid value for 'classification' parameter, expected >= 0",
        ),
    ],
)
def test_what_is_wrong_is_said_in_tritons_words(bad: InferRequest, text: str):
    assert error_of(ADD_SUB, bad) == text


def test_the_request_id_stands_before_the_error():
    bad = request(ints("INPUT0"))
    bad.id = "seven"
    assert error_of(ADD_SUB, bad).startswith("[request id: seven] expected 2 inputs")


@pytest.mark.parametrize(
    ("elements", "count", "text"),
    [
        ([b"a"], 2, "expected 2 string elements for inference input 'TEXT' for model 'm', got 1"),
        (
            [b"a", b"b"],
            1,
            "unexpected number of string elements 2 for inference input 'TEXT' for model 'm', expecting 1",
        ),
    ],
)
def test_bytes_elements_are_counted(elements: list[bytes], count: int, text: str):
    bad = request(("TEXT", "BYTES", (count,), encode_bytes_elements(elements)))
    assert error_of(TEXTS, bad) == f"[request id: <id_unknown>] {text}"


def test_bytes_that_end_within_an_element():
    assert "incomplete string data" in error_of(TEXTS, request(("TEXT", "BYTES", (1,), b"\x05\0\0\0abc")))
    assert "incomplete string length indicator" in error_of(TEXTS, request(("TEXT", "BYTES", (1,), b"\x05\0")))


def test_optional_inputs_and_reshape():
    config = ModelConfig(
        name="m",
        max_batch_size=4,
        inputs=(
            InputConfig("A", DataType.FP32, (1,), reshape=()),
            InputConfig("B", DataType.FP32, (2,), optional=True),
        ),
        outputs=(OutputConfig("O", DataType.FP32, (1,)),),
    )
    plan = RequestValidator(config).validate(request(ints("A", (2, 1), "FP32")))
    assert plan.inputs[0].shape == (2,)
    assert "between 1 and 2" in error_of(config, request())


def test_variable_dimensions_keep_their_order_in_a_reshape():
    assert reshape_dims((3, 5, 7), (-1, 5, -1), (1, -1, -1, 5)) == (1, 3, 7, 5)
