"""Responses, calls and cancellations, with both ends in one process: each arrives once, in order, whatever the other
end does."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.instance_peer import Peer
from support.waiting import PATIENCE_SECONDS, wait_until
from support.workers import on_plane

from rocserve.backends.request_model import RESCHEDULED, ModelCall, ModelResponse, Result
from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.links.entries import CALL, END, ENTRY, FAILURE, RESPONSE, TEXT
from rocserve.links.opening import BACK, SERVER_RINGS
from rocserve.plane.loop import PlaneLoop
from rocserve.workers import instance_requests
from rocserve.workers.back_channel import BackChannel
from rocserve.workers.instance_requests import MOST_CALLS, OpenCall, RequestInstance, RequestLost

LOG = logging.getLogger("rocserve.test.back_channel")


class Both(Peer):
    """The server's end, and the worker's. The instance does not take batches: a model may call before it serves."""

    def __init__(self, plane: PlaneLoop) -> None:
        self.calls: list[tuple[ModelCall, OpenCall]] = []
        self.called = threading.Semaphore(0)
        self.refuses = False
        super().__init__(plane, 1 << 28, self._call)
        assert isinstance(self.instance, RequestInstance)
        self.requests = self.instance
        self.worker = BackChannel(self.end_of_worker, LOG)

    def _call(self, call: ModelCall, opened: OpenCall) -> None:
        if self.refuses:
            raise RuntimeError("no such thing")
        inputs = tuple(Tensor(one.name, one.datatype, one.shape, bytes(one.data)) for one in call.inputs)
        self.calls.append((ModelCall(call.model_name, inputs, call.requested_outputs), opened))
        self.called.release()

    def open_request(self, on_answer: Heard) -> int:
        return on_plane(self.plane, lambda: self.requests.open_request(on_answer))

    def opened(self, index: int = 0) -> OpenCall:
        """The call, once it has arrived."""
        assert self.called.acquire(timeout=PATIENCE_SECONDS)
        return self.calls[index][1]

    def answer(self, opened: OpenCall, *answers: tuple[ModelResponse | ServeError | None, bool]) -> None:
        on_plane(self.plane, lambda: [opened.send(served(answer), final) for answer, final in answers])

    def close(self) -> None:
        """Close both ends, as both processes would."""
        self.end()
        if self.worker._reader.is_alive():
            self.worker._reader.join(PATIENCE_SECONDS)
        self.end_of_worker.close()


@pytest.fixture
def both(plane: PlaneLoop) -> Iterator[Both]:
    both = Both(plane)
    yield both
    both.close()


class Heard:
    """Copies of what a callback received."""

    def __init__(self) -> None:
        self.answers: list[tuple[Result | None, bool]] = []
        self._ended = threading.Event()

    def __call__(self, answer: Result | None, final: bool) -> None:
        if isinstance(answer, ModelResponse):
            answer = ModelResponse([tensor.copied() for tensor in answer.outputs], answer.parameters)
        self.answers.append((answer, final))
        if final:
            self._ended.set()

    def wait(self) -> list[tuple[Result | None, bool]]:
        assert self._ended.wait(PATIENCE_SECONDS)
        return self.answers


def test_a_call_that_comes_just_behind_the_end_of_the_server_is_answered(both: Both) -> None:
    """Another thread of the model makes the call while the worker notices the end."""
    both.worker.start()
    both.end(unavailable("killed"))
    both.worker._reader.join(PATIENCE_SECONDS)
    heard = Heard()
    both.worker.call(ModelCall("m", (), ("OUT",)), heard)
    ((answer, final),) = heard.wait()
    assert isinstance(answer, ServeError)
    assert (answer.text, final) == ("the server is gone", True)


def test_what_is_under_way_goes_on_when_no_new_batches_are_taken(both: Both) -> None:
    both.worker.start()
    heard = Heard()
    both.worker.call(ModelCall("m", response(5).outputs, ("X",)), heard)
    opened = both.opened()
    both.instance.stop_taking()
    both.answer(opened, (response(7), True))
    assert value_of(heard.wait()[0][0]) == 7
    second = Heard()
    both.worker.call(ModelCall("m", response(6, size=2048).outputs, ("X",)), second)
    both.answer(both.opened(1), (response(8), True))
    assert value_of(second.wait()[0][0]) == 8
    # More than a page is released together.
    wait_until(lambda: not both.instance._places_to_return)


def served(answer: ModelResponse | ServeError | None) -> Answer:
    """Answer as another model's scheduler does."""
    if isinstance(answer, ModelResponse):
        return InferResponse.of("other", "1", "", answer.outputs, answer.parameters)
    return answer


def response(value: int, size: int = 1) -> ModelResponse:
    return ModelResponse([tensor_from_numpy("X", np.full(size, value, np.int32))])


def value_of(answer: Result | None) -> int:
    assert isinstance(answer, ModelResponse)
    values = answer.outputs[0].numpy()
    assert (values == values[0]).all()
    return int(values[0])


def test_responses_come_in_their_order(both: Both) -> None:
    heard = Heard()
    responder = both.worker.open_request(both.open_request(heard))
    # More than the ring holds, and some of many pages.
    for value in range(3000):
        responder.send(response(value, 20_000 if value % 500 == 0 else 1), False)
    responder.send(None, True)
    answers = heard.wait()
    assert [value_of(answer) for answer, _ in answers[:-1]] == list(range(3000))
    assert answers[-1] == (None, True)
    with pytest.raises(RuntimeError, match="the final response to this request has already been sent"):
        responder.send(response(1), False)


def test_a_response_keeps_its_parameters_and_shapes(both: Both) -> None:
    for number in range(3):
        heard = Heard()
        given = ModelResponse(
            [
                tensor_from_numpy("X", np.zeros((2, number), np.float32)),
                tensor_from_numpy("W", np.array([b"x" * number, b""], dtype=object)),
            ],
            {"number": number} if number else {},
        )
        both.worker.open_request(both.open_request(heard)).send(given, True)
        ((answer, final),) = heard.wait()
        assert isinstance(answer, ModelResponse) and final
        assert dict(answer.parameters) == dict(given.parameters)
        assert answer.outputs[0].shape == (2, number)
        assert answer.outputs[1].numpy().tolist() == [b"x" * number, b""]


def test_errors_and_requests_that_are_to_come_again(both: Both) -> None:
    heard = Heard()
    responder = both.worker.open_request(both.open_request(heard))
    responder.send(ServeError(StatusCode.NOT_FOUND, "\N{SNOWMAN}" * 10_000), False)
    responder.send(RESCHEDULED, True)
    (error, final), again = heard.wait()
    assert isinstance(error, ServeError) and not final
    assert (error.code, error.text) == (StatusCode.NOT_FOUND, "\N{SNOWMAN}" * 8192)
    assert again == (RESCHEDULED, True)


@pytest.mark.parametrize(
    "wrong",
    [
        ModelResponse([], {"k": "x" * (1 << 20)}),
        ModelResponse([Tensor("X", response(1).outputs[0].datatype, (2,), bytes(4))]),
    ],
    ids=["parameters", "size"],
)
def test_a_response_that_cannot_be_sent_leaves_the_request_open(both: Both, wrong: ModelResponse) -> None:
    heard = Heard()
    responder = both.worker.open_request(both.open_request(heard))
    with pytest.raises(ServeError):
        responder.send(wrong, True)
    responder.send(response(1), True)
    assert [value_of(answer) for answer, _ in heard.wait()] == [1]
    assert not both.broken


def test_what_goes_with_the_batch_takes_the_request_out(both: Both) -> None:
    heard = Heard()
    responder = both.worker.open_request(both.open_request(heard))
    assert responder.claim()
    assert not responder.claim()
    with pytest.raises(RuntimeError):
        responder.send(response(1), True)
    spoken = both.worker.open_request(both.open_request(heard))
    spoken.send(response(1), False)
    assert not spoken.claim()
    assert spoken.batch_answer(response(2)) is None
    assert spoken.batch_answer(response(3)) is None
    assert [value_of(answer) for answer, _ in heard.wait()] == [1, 2]


def test_cancellations_reach_requests_that_come_later(both: Both) -> None:
    both.worker.start()
    first, second, third = (both.open_request(Heard()) for _ in range(3))
    responder = both.worker.open_request(first)
    on_plane(both.plane, lambda: (both.requests.cancel(second), both.requests.cancel(first)))
    wait_until(lambda: responder.is_cancelled)
    assert both.worker.open_request(second).is_cancelled
    assert not both.worker.open_request(third).is_cancelled


def test_clients_of_any_number_of_requests_may_leave_at_once(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection must not cost all other clients their worker."""
    monkeypatch.setattr(instance_requests, "MOST_WAITING", 10)
    numbers = [both.open_request(Heard()) for _ in range(SERVER_RINGS[BACK] + 100)]
    responders = [both.worker.open_request(number) for number in numbers]
    on_plane(both.plane, lambda: [both.requests.cancel(number) for number in numbers])
    # Cancellations that found no room are tried again meanwhile.
    time.sleep(0.05)
    both.worker.start()
    wait_until(lambda: all(responder.is_cancelled for responder in responders))
    assert not both.broken


def test_calls_and_their_answers(both: Both) -> None:
    both.worker.start()
    heard = Heard()
    both.worker.call(ModelCall("m", response(5).outputs, ("X",)), heard)
    opened = both.opened()
    call = both.calls[0][0]
    assert (call.model_name, call.inputs[0].numpy().tolist()) == ("m", [5])
    # One too many is dropped.
    no = ServeError(StatusCode.NOT_FOUND, "no")
    both.answer(opened, (response(1), False), (no, False), (None, True), (response(2), True))
    answers = heard.wait()
    assert value_of(answers[0][0]) == 1
    assert isinstance(answers[1][0], ServeError)
    assert answers[2] == (None, True)
    with pytest.raises(ServeError, match="the call of model 'm' cannot be sent"):
        both.worker.call(ModelCall("m", (), (), parameters={"k": "x" * (1 << 20)}), heard)
    # All memory is released, except for less than a page.
    wait_until(lambda: not both.requests._unread)
    wait_until(lambda: _unread(both) < mmap.PAGESIZE)


def _unread(both: Both) -> int:
    end = both.end_of_worker
    with end._lock:
        end._take_returns()
        return end._unread_bytes


def test_a_call_that_cannot_be_run_is_answered(both: Both) -> None:
    both.worker.start()
    both.refuses = True
    heard = Heard()
    both.worker.call(ModelCall("m", (), ()), heard)
    ((answer, _),) = heard.wait()
    assert isinstance(answer, ServeError)
    assert (answer.code, answer.text) == (StatusCode.INVALID_ARGUMENT, "the call cannot be run: no such thing")


@pytest.mark.parametrize("size", [20_000, 8 << 20], ids=["small", "large"])
def test_answers_wait_for_a_worker_that_reads_late(both: Both, size: int) -> None:
    """More answers than the ring holds."""
    heard = Heard()
    both.worker.call(ModelCall("m", (), ()), heard)
    opened = both.opened()
    count = SERVER_RINGS[BACK] + 500
    for value in range(count):
        both.answer(opened, (response(value, size if value % 500 == 0 else 10), False))
    both.answer(opened, (None, True))
    both.worker.start()
    answers = heard.wait()
    assert [value_of(answer) for answer, _ in answers[:-1]] == list(range(count))
    wait_until(lambda: not both.requests._unread)


def test_an_answer_for_which_there_is_no_room_is_an_error(both: Both) -> None:
    both.worker.start()
    heard = Heard()
    both.worker.call(ModelCall("m", (), ()), heard)
    both.answer(both.opened(), (response(1, both.inputs.limit // 4 + 1), True))
    ((answer, _),) = heard.wait()
    assert isinstance(answer, ServeError)
    assert answer.code is StatusCode.INTERNAL
    assert answer.text.startswith("the answer to a call cannot be sent to the model: no room for")


def test_a_worker_that_never_reads_is_broken(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_requests, "MOST_WAITING", 10)
    both.worker.call(ModelCall("m", (), ()), Heard())
    opened = both.opened()
    for value in range(SERVER_RINGS[BACK] + 20):
        both.answer(opened, (response(value), False))
    wait_until(lambda: both.broken)
    assert "it does not read its answers" in both.broken[0]


def test_a_worker_that_reads_nothing_for_long_is_broken(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_requests, "STALL_SECONDS", 0.2)
    both.worker.call(ModelCall("m", (), ()), Heard())
    opened = both.opened()
    # The layout of the answers has been sent as well.
    for value in range(SERVER_RINGS[BACK]):
        both.answer(opened, (response(value), False))
    wait_until(lambda: both.broken)
    assert both.broken == ["it does not read its answers: 1 messages wait"]


def test_more_calls_than_may_be(both: Both) -> None:
    both.worker.start()
    heard = [Heard() for _ in range(MOST_CALLS + 1)]
    for one in heard:
        both.worker.call(ModelCall("m", (), ()), one)
    ((answer, _),) = heard[-1].wait()
    assert isinstance(answer, ServeError)
    assert answer.code is StatusCode.UNAVAILABLE
    assert answer.text == f"the model has {MOST_CALLS} calls in flight; wait for answers before more calls"
    assert len(both.calls) == MOST_CALLS
    both.answer(both.calls[0][1], (None, True))
    assert heard[0].wait() == [(None, True)]
    both.worker.call(ModelCall("m", (), ()), Heard())
    wait_until(lambda: len(both.calls) == MOST_CALLS + 1)


def test_a_call_of_a_number_that_is_open_breaks_the_channel(both: Both) -> None:
    both.worker.call(ModelCall("m", (), ()), Heard())
    both.opened()
    both.end_of_worker.post(ENTRY.pack(CALL, 0, 0, 1, 1, 0, 0))
    wait_until(lambda: both.broken)
    assert both.broken == ["it sent an invalid message: call 1 is already open"]


FAR = 1 << 62


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (ENTRY.pack(CALL, 0, 0, 9, 1, 0, 0), "tensors of the undefined layout 9"),
        (ENTRY.pack(RESPONSE, 1, 0, 9, 1, 0, 2), "tensors of the undefined layout 9"),
        (ENTRY.pack(TEXT, 0, 0, 9, 0, FAR, 10), "lies outside of its heap"),
        (ENTRY.pack(TEXT, 0, 0, 9, 0, 0, 1 << 40), "a text of 1099511627776 bytes"),
        (ENTRY.pack(FAILURE, 1, 3, 0, 1, FAR, 10), "lies outside of its heap"),
        (ENTRY.pack(FAILURE, 1, 3, 0, 1, 0, 1 << 40), "a text of 1099511627776 bytes"),
        (ENTRY.pack(77, 0, 0, 0, 0, 0, 0), "unexpected message of kind 77"),
    ],
)
def test_nonsense_breaks_the_instance_and_fails_what_is_open(both: Both, entry: bytes, reason: str) -> None:
    heard = Heard()
    both.open_request(heard)
    both.end_of_worker.post(entry)
    wait_until(lambda: both.broken)
    assert len(both.broken) == 1 and reason in both.broken[0]
    assert not heard.answers
    both.end(unavailable("it was ended"))
    ((answer, _),) = heard.wait()
    assert isinstance(answer, RequestLost) and answer.text == "it was ended"


def test_what_is_said_of_requests_that_are_not_open_is_dropped(both: Both) -> None:
    heard = Heard()
    number = both.open_request(heard)
    for stranger in (0, number + 1, (1 << 64) - 1):
        both.end_of_worker.post(ENTRY.pack(END, 0, 0, 0, stranger, 0, 0))
    both.worker.open_request(number).send(response(1), True)
    assert [value_of(answer) for answer, _ in heard.wait()] == [1]
    assert not both.broken


def test_the_end_reaches_all(both: Both) -> None:
    both.worker.start()
    answered, silent = Heard(), Heard()
    both.worker.open_request(both.open_request(answered)).send(response(1), True)
    both.open_request(silent)
    waiting = Heard()
    both.worker.call(ModelCall("m", (), ()), waiting)
    opened = both.opened()
    left = threading.Event()
    opened.watch_cancellation(left.set)
    both.end(unavailable("it died"))
    assert [value_of(answer) for answer, _ in answered.wait()] == [1]
    ((answer, final),) = silent.wait()
    assert isinstance(answer, RequestLost)
    assert (answer.text, final) == ("it died", True)
    assert left.is_set()
    both.answer(opened, (response(1), True))
    late = threading.Event()
    opened.watch_cancellation(late.set)
    assert late.is_set()
    # The worker's end: all waiting calls get an error.
    ((answer, final),) = waiting.wait()
    assert isinstance(answer, ServeError)
    assert answer.code is StatusCode.UNAVAILABLE


def test_what_was_said_before_the_end_counts(both: Both) -> None:
    heard = Heard()
    responder = both.worker.open_request(both.open_request(heard))
    both.plane.unregister(both.instance._socket.fileno())  # As if it were late.
    responder.send(response(1), False)
    responder.send(response(2), True)
    both.end(unavailable("it died"))
    assert [value_of(answer) for answer, _ in heard.wait()] == [1, 2]
