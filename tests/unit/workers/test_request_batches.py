"""The requests of a batch taken apart in the worker, and what became of them put together again."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from support.outputs import tensors_of
from support.shared_memory import GUARD
from support.workers import LOG, mail_of, on_plane

from rocserve.backends.base import Batch
from rocserve.backends.request_model import Answer, ModelResponse
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.request_form import Member, RequestForm, RequestLayout, client_parameters
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.sequences import SequenceTag
from rocserve.core.tensors import Tensor, TensorHead, tensor_from_numpy
from rocserve.plane.heap import SharedHeap
from rocserve.plane.loop import PlaneLoop
from rocserve.workers.batch_inputs import request_inputs, separate
from rocserve.workers.entries import NO_DETAILS, read_details, write_details
from rocserve.workers.instance import Instance
from rocserve.workers.result_writer import answer_results
from rocserve.workers.results import BatchOutcome
from rocserve.workers.worker_end import WorkerEnd


def batch_of(inputs: dict[str, Tensor], sizes: tuple[int, ...]) -> Batch:
    return Batch(inputs, ("OUT",), sizes)


def test_each_request_of_a_sample_gets_its_rows() -> None:
    numbers = np.arange(12, dtype=np.int16).reshape(6, 2)
    words = np.array([[b"a"], [b""], [b"ccc"], [b"d"], [b"ee"], [b"f"]], dtype=object)
    inputs = {"N": tensor_from_numpy("N", numbers), "W": tensor_from_numpy("W", words)}
    requests = separate(batch_of(inputs, (1, 3, 2)))
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
    (request,) = separate(batch_of({"N": tensor_from_numpy("N", np.zeros((4, 5), np.float64))}, (1,)))
    assert request["N"].shape == (4, 5)


def test_details_travel() -> None:
    head = RequestHead("m", "", (InputHead("X", "INT8", (1,)),), parameters={"mine": "x", "priority": 1})
    written = [
        write_details(InferRequest(head, "id \N{SNOWMAN}", [])),
        write_details(InferRequest(head, "", [], sequence=SequenceTag(2**64 - 1, ends=True))),
        write_details(InferRequest(head, "r", [], sequence=SequenceTag("thread \N{SNOWMAN}", starts=True))),
    ]
    assert [read_details(data) for data in written] == [
        ("id \N{SNOWMAN}", 0, 0, ""),
        ("", 2**64 - 1, 2, ""),
        ("r", "thread \N{SNOWMAN}", 1, ""),
    ]
    assert write_details(InferRequest(head, "", [])) == b""
    assert read_details(b"") == NO_DETAILS
    assert client_parameters(head) == {"mine": "x"}


@pytest.mark.parametrize("end", [3, 15, 18, -1])
def test_damaged_details_are_refused(end: int) -> None:
    written = write_details(InferRequest(RequestHead("m", "", ()), "identity", []))
    with pytest.raises(ValueError, match=r"the (names in the )?details of a request"):
        read_details(written[:end])


def test_an_id_that_is_longer_than_its_details_is_refused() -> None:
    with pytest.raises(ValueError, match="end at byte 47 of 25"):
        read_details(struct.pack("<QBII", 0, 0, 30, 0) + b"identity")


class Both:
    """An instance, and the worker's end of it."""

    def __init__(self, plane: PlaneLoop) -> None:
        self.plane = plane
        self.instance = Instance(
            "m",
            mail_of(plane),
            SharedHeap("test", 1 << 24),
            lambda instance, reason: None,
            LOG,
            lambda call, opened: None,
        )
        self.end = WorkerEnd(self.instance.take_peer(), GUARD)
        self.instance.open()
        self.batches = self.end.batches()
        self.outcomes: list[BatchOutcome] = []
        self.arrived = threading.Semaphore(0)

    def send(self, members: Sequence[Member]) -> None:
        on_plane(self.plane, lambda: self.instance.execute(False, members, self._on_outcome))

    def _on_outcome(self, outcome: BatchOutcome) -> None:
        self.outcomes.append(outcome)
        self.arrived.release()

    def answered(self, answers: Sequence[Answer | None]) -> BatchOutcome:
        """What the server reads of these answers to a batch."""
        tensor = tensor_from_numpy("N", np.zeros(1, np.int32))
        form = RequestForm(RequestLayout((TensorHead("N", DataType.INT32, (1,)),), ("N",), 1))
        self.send([(form, [memoryview(tensor.data).cast("B")], 0, b"") for _ in answers])
        batch = next(self.batches)
        self.end.finish(batch, (batch.taken_ns, batch.taken_ns), answer_results(self.end.sender, answers))
        assert self.arrived.acquire(timeout=5)
        return self.outcomes[-1]


@pytest.fixture
def both(plane: PlaneLoop) -> Iterator[Both]:
    both = Both(plane)
    yield both
    on_plane(plane, lambda: both.instance.end(invalid_argument("over")))
    both.end.close()


def test_inputs_and_details_of_requests_side_by_side(both: Both) -> None:
    heads = (TensorHead("N", DataType.INT64, (2,)), TensorHead("M", DataType.INT8, (3,)))
    words = (*heads, TensorHead("W", DataType.BYTES, (2,)))
    head = RequestHead("m", "", ())
    members, expected = [], []
    for number, form in enumerate(RequestForm(RequestLayout(one, ("A",), 1)) for one in (heads, words)):
        text = tensor_from_numpy("W", np.array([b"x" * 1000, b""], dtype=object))
        data = [np.full(2, number, np.int64).tobytes(), b"abc", bytes(text.data)][: 2 + number]
        details = write_details(InferRequest(head, f"id{number}", []))
        members.append((form, [memoryview(one) for one in data], number, details))
        expected.append((data, f"id{number}"))
    both.send(members)
    batch = next(both.batches)
    heap = both.end.inputs
    for request, (data, name) in zip(batch.requests, expected, strict=True):
        assert [bytes(part) for part in request_inputs(request, heap)] == data
        assert read_details(bytes(heap.view(request.details_place, request.details_bytes))).request_id == name
    assert [request.number for request in batch.requests] == [0, 1]


def test_results_travel_through_shared_memory(both: Both) -> None:
    for length in (2, 50_000, 2):
        values = np.arange(length, dtype=np.float32)
        words = tensor_from_numpy("W", np.array([b"x" * length], dtype=object))
        outcome = both.answered(
            [
                ModelResponse([tensor_from_numpy("N", values), words], {"k": 1}),
                None,
                invalid_argument("no"),
                ModelResponse([]),
                ModelResponse([tensor_from_numpy("N", values * 2)]),
                ModelResponse([tensor_from_numpy("N", values * 3)]),
                ModelResponse([]),
                ModelResponse([]),
            ]
        )
        assert outcome.open == {1}
        assert {index: error.text for index, error in outcome.failures.items()} == {2: "no"}
        assert outcome.parameters == {0: {"k": 1}}
        outputs = [tensors_of(outcome.outputs_of(index)) for index in range(8)]
        assert [len(tensors) for tensors in outputs] == [2, 0, 0, 0, 1, 1, 0, 0]
        assert np.array_equal(outputs[4][0].numpy(), values * 2)
        assert np.array_equal(outputs[5][0].numpy(), values * 3)
        assert outputs[0][1].numpy().tolist() == [b"x" * length]
        del outcome
        on_plane(both.plane, both.outcomes.clear)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            ModelResponse([Tensor("N", DataType.INT32, (4,), bytes(12))]),
            "output 'N' of shape [4] needs 16 bytes, got 12",
        ),
        (
            ModelResponse([], {"k": "x" * (1 << 20)}),
            "what stands beside the tensors (names, shapes, parameters) takes 1048584 bytes, at most 1048576 can be"
            " sent",
        ),
    ],
)
def test_a_response_that_cannot_be_sent_fails_its_request(both: Both, bad: ModelResponse, text: str) -> None:
    outcome = both.answered([bad, ModelResponse([tensor_from_numpy("N", np.zeros(3, np.int32))])])
    assert (outcome.failures[0].code, outcome.failures[0].text) == (StatusCode.INTERNAL, text)
    assert len(tensors_of(outcome.outputs_of(1))) == 1


def test_damaged_strings_of_a_sample_are_refused() -> None:
    """What an engine is given here comes from a file."""
    words = tensor_from_numpy("W", np.array([[b"a"], [b"b"]], dtype=object))
    damaged = Tensor("W", words.datatype, (2, 1), bytes(words.data)[:-1])
    first, second = separate(batch_of({"W": damaged}, (1, 1)))
    assert first["W"].numpy().tolist() == [[b"a"]]
    with pytest.raises(ServeError, match="incomplete string data"):
        second["W"].numpy()
