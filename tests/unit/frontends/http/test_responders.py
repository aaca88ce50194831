"""Requests on their way to the data plane's thread, and answers on theirs to the event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.hand_loop import HandLoop

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.requests import InferRequest, InferResponse, RequestHead
from rocserve.core.tensors import Tensor
from rocserve.frontends.http import responders
from rocserve.frontends.http.responders import AnswerStream, Asked, HttpResponder, LoopCalls, Outcome, SingleAnswer
from rocserve.services.observation import RequestOrigin


def origin() -> RequestOrigin:
    return RequestOrigin("HTTP", (0, 0), {}, "127.0.0.1")


def asked() -> Asked:
    return Asked(origin, RequestMemory(), Holding(), LoopCalls(asyncio.get_running_loop()))


def response(data: bytearray) -> InferResponse:
    return InferResponse.of("m", "1", "", [Tensor("X", DataType.UINT8, (len(data),), memoryview(data))])


class Service:
    """A stand-in for the inference service."""

    def __init__(self, answer: Callable[[HttpResponder], None]) -> None:
        self.plane = HandLoop()
        self.paths = PrivatePaths()
        self._answer = answer

    def infer(self, request: InferRequest, responder: HttpResponder) -> None:
        self._answer(responder)


def hand_over(responder: HttpResponder, answer: Callable[[HttpResponder], None] = lambda responder: None) -> HandLoop:
    """Have a request scheduled that `answer` is called for; the loop of the data plane."""
    service: Any = Service(answer)
    responder.hand_over(service, InferRequest(RequestHead("m", "", ()), "", []))
    service.plane.turn()
    loop: HandLoop = service.plane
    return loop


async def test_a_request_that_cannot_be_scheduled_is_answered() -> None:
    def fail(responder: HttpResponder) -> None:
        raise KeyError("what")

    answer = Waiting(asked())
    with pytest.raises(KeyError):
        hand_over(answer, fail)
    outcome = await answer.came
    assert isinstance(outcome, ServeError)
    assert outcome.text == "KeyError: 'what'"


async def elsewhere(call: Callable[[], None]) -> None:
    """Do it on another thread and wait until it is done."""
    thread = threading.Thread(target=call)
    thread.start()
    await asyncio.to_thread(thread.join)


class Waiting(SingleAnswer):
    """Keeps its outcome."""

    def __init__(self, asked: Asked) -> None:
        self.came: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        super().__init__(asked, lambda responder, outcome: self.came.set_result(outcome))


async def test_one_answer_on_memory_of_its_own() -> None:
    answer = Waiting(asked())
    memory = bytearray(b"abc")
    await elsewhere(lambda: answer.send(response(memory)))
    memory[:] = b"xyz"
    outcome = await answer.came
    assert isinstance(outcome, InferResponse)
    assert outcome.outputs[0].data == b"abc"


async def test_an_error_tells_whether_the_request_was_scheduled() -> None:
    refused = Waiting(asked())
    hand_over(refused, lambda responder: responder.fail(internal("no")))
    failed = Waiting(asked())
    hand_over(failed)
    failed.fail(internal("no"))
    assert [refused.is_refused, failed.is_refused] == [True, False]
    assert isinstance(await refused.came, ServeError)


async def test_there_is_room_for_one_response_only() -> None:
    answer = Waiting(asked())
    with pytest.raises(ServeError, match="doesn't support models with decoupled transaction policy"):
        answer.expect_many()
    answer.end()
    outcome = await answer.came
    assert isinstance(outcome, ServeError)
    assert outcome.text == "expected a single response, got 0"


async def test_a_client_that_has_gone() -> None:
    answer = Waiting(asked())
    plane = hand_over(answer)
    told: list[str] = []
    answer.watch_cancellation(lambda: told.append("early"))
    answer.leave()
    assert not told, "it is told on the data plane's thread"
    plane.turn()
    answer.watch_cancellation(lambda: told.append("late"))
    answer.cancel()
    plane.turn()
    assert told == ["early", "late"]
    # What still comes is nobody's.
    answer.send(response(bytearray(b"a")))
    await asyncio.sleep(0)
    assert not answer.came.done()


@pytest.mark.parametrize("kind", [Waiting, AnswerStream])
@pytest.mark.parametrize("fails", [False, True])
async def test_what_waits_for_the_client_to_leave_is_let_go_with_the_answer(kind: type, fails: bool) -> None:
    answer = kind(asked())

    def leave() -> None: ...

    answer.watch_cancellation(leave)
    gone = weakref.ref(leave)
    del leave
    if fails:
        answer.fail(internal("no"))
    else:
        answer.send(response(bytearray(b"a")))
    assert gone() is None
    answer.cancel()


async def test_a_stream_of_answers() -> None:
    stream = AnswerStream(asked())
    stream.expect_many()

    def answer() -> None:
        stream.send(response(bytearray(b"a")), final=False)
        stream.fail(internal("no"), final=False)
        stream.end()
        stream.end()

    await elsewhere(answer)
    outcomes = [await stream.next() for _ in range(3)]
    assert isinstance(outcomes[0], InferResponse)
    assert isinstance(outcomes[1], ServeError)
    assert outcomes[2] is None


async def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responders, "BACKLOG_LIMIT_BYTES", 10)
    stream = AnswerStream(asked())
    plane = hand_over(stream)
    cancelled: list[bool] = []
    stream.watch_cancellation(lambda: cancelled.append(True))
    for _ in range(5):
        stream.send(response(bytearray(4)), final=False)
    await asyncio.sleep(0)
    outcome = await stream.next()
    assert isinstance(outcome, ServeError)
    assert outcome.code is StatusCode.RESOURCE_EXHAUSTED
    assert await stream.next() is None
    plane.turn()
    assert cancelled == [True]


async def test_many_calls_of_other_threads_come_in_order_and_a_fault_stops_none() -> None:
    loop = asyncio.get_running_loop()
    faults: list[str] = []
    loop.set_exception_handler(lambda _, context: faults.append(str(context["exception"])))
    calls, came = LoopCalls(loop), []

    def fail() -> None:
        raise ValueError("a fault")

    def call() -> None:
        for number in range(10_000):
            calls.call_soon(fail if number == 5_000 else partial(came.append, number))

    await elsewhere(call)
    ended = asyncio.Event()
    calls.call_soon(ended.set)
    await asyncio.wait_for(ended.wait(), 10)
    assert came == [*range(5_000), *range(5_001, 10_000)]
    assert faults == ["a fault"]
