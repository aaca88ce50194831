"""Requests on their way to the scheduler, and answers on theirs to the client."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import replace
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
from rocserve.frontends.http.responders import AnswerStream, Asked, HttpResponder, Outcome, SingleAnswer
from rocserve.services.observation import RequestOrigin


def origin() -> RequestOrigin:
    return RequestOrigin("HTTP", (0, 0), {}, "127.0.0.1")


def asked() -> Asked:
    return Asked(origin, RequestMemory(), Holding())


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
    loop: HandLoop = service.plane
    return loop


async def test_a_request_that_cannot_be_scheduled_has_no_other_answer() -> None:
    def fail(responder: HttpResponder) -> None:
        raise KeyError("what")

    request = asked()
    request.memory.admit(request.holding, 10)
    answer = Waiting(request)
    with pytest.raises(KeyError):
        hand_over(answer, fail)
    answer.send(response(bytearray(b"a")))
    assert not answer.came.done()
    assert request.memory.used_bytes == 0


class Waiting(SingleAnswer):
    """Keeps its outcome."""

    def __init__(self, asked: Asked) -> None:
        self.came: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        super().__init__(asked, lambda responder, outcome: self.came.set_result(outcome))


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
    assert not told, "whoever says so may be in the middle of an answer"
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

    memory = bytearray(b"a")
    stream.send(replace(response(memory), slot=memory), final=False)
    memory[:] = b"x"
    stream.fail(internal("no"), final=False)
    stream.end()
    stream.end()
    outcomes = [await stream.next() for _ in range(3)]
    assert isinstance(outcomes[0], InferResponse)
    assert outcomes[0].outputs[0].data == b"a", "it is on memory of its own"
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
