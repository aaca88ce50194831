"""Both ends of a conversation in one process: what is said arrives, in its order, whatever the other end does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rocserve.backends.request_model import Answer, ModelCall, ModelResponse
from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.tensors import tensor_from_numpy
from rocserve.workers import conversation as conversation_module
from rocserve.workers.completion import CompletionThread
from rocserve.workers.conversation import Conversation, ConversationEnded, OpenCall
from rocserve.workers.conversation_wire import HEADER
from rocserve.workers.model_conversation import ModelConversation

LOG = logging.getLogger("rocserve.test.conversation")


class Both:
    """The server's end, and the worker's."""

    def __init__(self, completion: CompletionThread) -> None:
        self.calls: list[tuple[ModelCall, OpenCall]] = []
        self.called = threading.Semaphore(0)
        self.broken: list[str] = []
        self.server = Conversation(completion, self._call, LOG)
        self.peer = self.server.peer.dup()
        self.server.peer.close()
        self.server.listen(self.broken.append)
        self.worker = ModelConversation(self.peer, LOG)
        self._completion = completion

    def _call(self, call: ModelCall, opened: OpenCall) -> None:
        self.calls.append((call, opened))
        self.called.release()

    def end(self, error: ServeError) -> None:
        ended = threading.Event()
        self._completion.call_soon(lambda: (self.server.drain(), self.server.end(error), ended.set()))
        assert ended.wait(10)


@pytest.fixture
def both(completion: CompletionThread) -> Iterator[Both]:
    both = Both(completion)
    yield both
    both.end(unavailable("the test is over"))
    both.peer.close()


class Heard:
    """What came to a callback."""

    def __init__(self) -> None:
        self.answers: list[tuple[Answer | None, bool]] = []
        self._ended = threading.Event()

    def __call__(self, answer: Answer | None, final: bool) -> None:
        self.answers.append((answer, final))
        if final:
            self._ended.set()

    def wait(self) -> list[tuple[Answer | None, bool]]:
        assert self._ended.wait(10)
        return self.answers


def response(value: int, size: int = 1) -> ModelResponse:
    return ModelResponse([tensor_from_numpy("X", np.full(size, value, np.int32))])


def value_of(answer: Answer | None) -> int:
    assert isinstance(answer, ModelResponse)
    return int(answer.outputs[0].numpy()[0])


def wait_until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_responses_come_in_their_order(both: Both) -> None:
    heard = Heard()
    responder = both.worker.open_request(both.server.open_request(heard))
    for value in range(200):
        responder.send(response(value, 20_000 if value % 50 == 0 else 1), False)
    responder.send(None, True)
    answers = heard.wait()
    assert [value_of(answer) for answer, _ in answers[:-1]] == list(range(200))
    assert answers[-1] == (None, True)
    with pytest.raises(RuntimeError, match="the final response to this request has been sent before"):
        responder.send(response(1), False)


def test_an_answer_is_due_while_a_request_is_open(both: Both, completion: CompletionThread) -> None:
    heard = Heard()
    first, second = both.server.open_request(heard), both.server.open_request(Heard())
    assert completion.awaited == {both.server}
    both.server.close_request(second)
    assert completion.awaited == {both.server}
    both.worker.open_request(first).send(response(1), True)
    heard.wait()
    assert completion.awaited == set()
    both.server.open_request(Heard())
    both.end(unavailable("it died"))
    assert completion.awaited == set()


def test_a_response_that_cannot_be_sent_leaves_the_request_open(both: Both) -> None:
    heard = Heard()
    responder = both.worker.open_request(both.server.open_request(heard))
    with pytest.raises(ServeError, match="the response cannot be sent: what stands beside the tensors"):
        responder.send(ModelResponse([], {"k": "x" * 1_000_000}), True)
    responder.send(response(1), True)
    assert [value_of(answer) for answer, _ in heard.wait()] == [1]


def test_what_goes_with_the_batch_takes_the_request_out(both: Both) -> None:
    heard = Heard()
    responder = both.worker.open_request(both.server.open_request(heard))
    assert responder.claim()
    assert not responder.claim()
    with pytest.raises(RuntimeError):
        responder.send(response(1), True)
    spoken = both.worker.open_request(both.server.open_request(heard))
    spoken.send(response(1), False)
    assert not spoken.claim()
    assert spoken.end_with(response(2))
    assert not spoken.end_with(response(3))
    assert [value_of(answer) for answer, _ in heard.wait()] == [1, 2]


def test_cancellations_reach_requests_that_come_later(both: Both) -> None:
    both.worker.start()
    first, second, third = (both.server.open_request(Heard()) for _ in range(3))
    responder = both.worker.open_request(first)
    both.server.cancel(second)
    both.server.cancel(first)
    wait_until(lambda: responder.is_cancelled)
    assert both.worker.open_request(second).is_cancelled
    assert not both.worker.open_request(third).is_cancelled


def test_calls_and_their_answers(both: Both) -> None:
    both.worker.start()
    heard = Heard()
    both.worker.call(ModelCall("m", response(5).outputs, ("X",)), heard)
    assert both.called.acquire(timeout=10)
    ((call, opened),) = both.calls
    assert call.model_name == "m"
    opened.answer(response(1), False)
    opened.answer(ServeError(StatusCode.NOT_FOUND, "no"), False)
    opened.answer(None, True)
    opened.answer(response(2), True)  # One too many is dropped.
    answers = heard.wait()
    assert value_of(answers[0][0]) == 1
    assert isinstance(answers[1][0], ServeError)
    assert answers[2] == (None, True)
    with pytest.raises(ServeError, match="the call of model 'm' cannot be sent"):
        both.worker.call(ModelCall("m", (), (), parameters={"k": "x" * 1_000_000}), heard)


def test_answers_wait_for_a_worker_that_reads_late(both: Both) -> None:
    heard = Heard()
    both.worker.call(ModelCall("m", (), ()), heard)
    assert both.called.acquire(timeout=10)
    opened = both.calls[0][1]
    for value in range(500):
        opened.answer(response(value, 20_000 if value % 10 == 0 else 4000), False)
    opened.answer(None, True)
    both.worker.start()
    answers = heard.wait()
    assert [value_of(answer) for answer, _ in answers[:-1]] == list(range(500))


def test_a_worker_that_never_reads_is_broken(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_module, "MOST_WAITING", 10)
    both.worker.call(ModelCall("m", (), ()), Heard())
    assert both.called.acquire(timeout=10)
    for value in range(200):
        both.calls[0][1].answer(response(value, 4000), False)
    wait_until(lambda: both.broken)
    assert "it has not read its conversation" in both.broken[0]


def test_nonsense_breaks_the_conversation(both: Both) -> None:
    both.peer.send(b"\x00\x01nonsense")
    wait_until(lambda: both.broken)
    assert both.broken == ["it said what cannot be read: a message of 10 bytes"]


def test_what_only_the_server_says_breaks_the_conversation(both: Both) -> None:
    both.peer.send(HEADER.pack(3, True, 1))
    wait_until(lambda: both.broken)
    assert both.broken == ["it said what only the server says: a message of kind 3"]


def test_the_end_tells_all(both: Both) -> None:
    both.worker.start()
    said, silent = Heard(), Heard()
    both.worker.open_request(both.server.open_request(said)).send(response(1), True)
    both.server.open_request(silent)
    waiting = Heard()
    both.worker.call(ModelCall("m", (), ()), waiting)
    assert both.called.acquire(timeout=10)
    left = threading.Event()
    opened = both.calls[0][1]
    opened.watch_cancellation(left.set)
    both.end(unavailable("it died"))
    assert [value_of(answer) for answer, _ in said.wait()] == [1]
    ((answer, final),) = silent.wait()
    assert isinstance(answer, ConversationEnded)
    assert (answer.text, final) == ("it died", True)
    assert left.is_set()
    opened.answer(response(1), True)
    late = threading.Event()
    opened.watch_cancellation(late.set)
    assert late.is_set()
    # The worker's side of it: whoever waits is told.
    ((answer, final),) = waiting.wait()
    assert isinstance(answer, ServeError)
    assert answer.code is StatusCode.UNAVAILABLE
