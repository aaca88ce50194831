"""The requests of a batch taken apart in the worker, and what became of them put together again."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from rocserve.backends.request_model import ModelResponse
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.plain import to_json
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.sequences import SequenceTag
from rocserve.core.tensors import Tensor, encode_bytes_elements, tensor_from_numpy
from rocserve.core.validation import RequestPlan
from rocserve.workers.memory import Arena, ArenaFile
from rocserve.workers.messages import RequestDetails, RequestResult, RequestResults, TensorHead
from rocserve.workers.request_details import DetailsReader, DetailsWriter
from rocserve.workers.request_inputs import separate
from rocserve.workers.request_outputs import RequestOutputLayouts
from rocserve.workers.request_results import RequestResultWriter
from rocserve.workers.wire import pack_tail


def test_each_request_gets_its_rows() -> None:
    numbers = np.arange(12, dtype=np.int16).reshape(6, 2)
    words = np.array([[b"a"], [b""], [b"ccc"], [b"d"], [b"ee"], [b"f"]], dtype=object)
    inputs = {"N": tensor_from_numpy("N", numbers), "W": tensor_from_numpy("W", words)}
    requests = separate(inputs, (1, 3, 2))
    assert [request["N"].numpy().tolist() for request in requests] == [
        numbers[:1].tolist(),
        numbers[1:4].tolist(),
        numbers[4:].tolist(),
    ]
    assert [request["W"].numpy().ravel().tolist() for request in requests] == [
        [b"a"],
        [b"", b"ccc", b"d"],
        [b"ee", b"f"],
    ]
    requests[0]["N"].numpy()[:] = 99
    assert numbers[0].tolist() == [0, 1]


def test_a_request_alone_keeps_its_shape() -> None:
    (request,) = separate({"N": tensor_from_numpy("N", np.zeros((4, 5), np.float64))}, (1,))
    assert request["N"].shape == (4, 5)


def test_damaged_strings_are_refused() -> None:
    words = tensor_from_numpy("W", np.array([[b"a"], [b"b"]], dtype=object))
    damaged = Tensor("W", words.datatype, (2, 1), bytes(words.data)[:-1])
    with pytest.raises(ServeError, match="incomplete string data"):
        separate({"W": damaged}, (1, 1))


def test_details_travel() -> None:
    head = RequestHead("m", "", (InputHead("X", "INT8", (1,)),), parameters={"mine": "x"})
    plan = RequestPlan(1, (), (), ("A",), {}, 3, 4)
    writer = DetailsWriter()
    written = [
        writer.write(2**40, InferRequest(head, "id \N{SNOWMAN}", []), plan),
        writer.write(8, InferRequest(head, "", [], sequence=SequenceTag(2**64 - 1, ends=True)), plan),
        writer.write(9, InferRequest(head, "r", [], sequence=SequenceTag("thread \N{SNOWMAN}", starts=True)), plan),
    ]
    details = RequestDetails(("A",), 3, 4, {"mine": "x"})
    assert list(DetailsReader().read(b"".join(written))) == [
        (2**40, "id \N{SNOWMAN}", 0, 0, details),
        (8, "", 2**64 - 1, 2, details),
        (9, "r", "thread \N{SNOWMAN}", 1, details),
    ]


@pytest.mark.parametrize("end", [3, 15, 18, -1])
def test_damaged_details_are_refused(end: int) -> None:
    head, plan = RequestHead("m", "", ()), RequestPlan(1, (), (), ("A",), {}, 0, 0)
    written = DetailsWriter().write(1, InferRequest(head, "identity", []), plan)
    with pytest.raises(ValueError, match="the details of a request"):
        list(DetailsReader().read(written[:end]))


def test_an_id_that_is_longer_than_its_element_is_refused() -> None:
    element = struct.pack("<QQBII", 1, 0, 0, 30, 0) + b"identity"
    with pytest.raises(ValueError, match="its names at 59"):
        list(DetailsReader().read(encode_bytes_elements([element])))


def test_results_travel_through_shared_memory() -> None:
    worker = Arena(ArenaFile.create("test", 1), 0)
    writer, layouts = RequestResultWriter(worker), RequestOutputLayouts()
    for length in (2, 50_000, 2):
        values = np.arange(length, dtype=np.float32)
        words = tensor_from_numpy("W", np.array([b"x" * length], dtype=object))
        tail = writer.write(
            [
                ModelResponse([tensor_from_numpy("N", values), words], {"k": 1}),
                None,
                invalid_argument("no"),
                ModelResponse([]),
                ModelResponse([tensor_from_numpy("N", values * 2)]),
            ]
        )
        layout = layouts.of(tail, (1,) * 5)
        assert layout.open_requests == {1}
        assert {index: error.text for index, error in layout.failures.items()} == {2: "no"}
        assert layout.parameters == {0: {"k": 1}}
        assert [len(slices) for slices in layout.slices] == [2, 0, 0, 0, 1]
        name, datatype, shape, begin, end = layout.slices[4][0]
        assert np.array_equal(Tensor(name, datatype, shape, worker.view[begin:end]).numpy(), values * 2)
        name, datatype, shape, begin, end = layout.slices[0][1]
        assert Tensor(name, datatype, shape, worker.view[begin:end]).numpy().tolist() == [b"x" * length]
    worker.close()


def test_an_output_that_is_not_what_its_shape_says_fails_its_request() -> None:
    arena = Arena(ArenaFile.create("test", 1), 0)
    tensor = tensor_from_numpy("N", np.zeros(3, np.int32))
    bad = ModelResponse([Tensor("N", tensor.datatype, (4,), tensor.data)])
    layout = RequestOutputLayouts().of(RequestResultWriter(arena).write([bad, ModelResponse([tensor])]), (1, 1))
    assert layout.failures[0].code is StatusCode.INTERNAL
    assert layout.failures[0].text == "output 'N' of shape [4] needs 16 bytes, got 12"
    assert len(layout.slices[1]) == 1
    arena.close()


@pytest.mark.parametrize(
    ("numbers", "shape", "count"),
    [((), (1,), 1), ((0,), (1,), 1), ((0, 5), (1,), 1), ((0, 4), (-1,), 1), ((0, 4), (1,), 2)],
)
def test_nonsense_from_a_worker_is_refused(numbers: tuple[int, ...], shape: tuple[int, ...], count: int) -> None:
    tensor = tensor_from_numpy("N", np.zeros(1, np.int32))
    results = RequestResults((RequestResult((TensorHead("N", tensor.datatype, shape),)),))
    with pytest.raises(ValueError):
        RequestOutputLayouts().of(pack_tail(numbers, to_json(results)), (1,) * count)
