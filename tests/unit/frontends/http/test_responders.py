"""Answers on their way from another thread to the loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.requests import InferResponse
from rocserve.core.tensors import Tensor
from rocserve.frontends.http import responders
from rocserve.frontends.http.responders import AnswerStream, Asked, SingleAnswer
from rocserve.services.observation import RequestOrigin


def origin() -> RequestOrigin:
    return RequestOrigin("HTTP", (0, 0), {}, "127.0.0.1")


def response(data: bytearray) -> InferResponse:
    return InferResponse("m", "1", "", [Tensor("X", DataType.UINT8, (len(data),), memoryview(data))])


async def elsewhere(call: Callable[[], None]) -> None:
    """Do it on another thread and wait until it is done."""
    thread = threading.Thread(target=call)
    thread.start()
    await asyncio.to_thread(thread.join)


async def test_one_answer_on_memory_of_its_own() -> None:
    answer = SingleAnswer(Asked(origin, RequestMemory(), Holding()))
    memory = bytearray(b"abc")
    await elsewhere(lambda: answer.send(response(memory)))
    memory[:] = b"xyz"
    outcome = await answer.outcome()
    assert isinstance(outcome, InferResponse)
    assert outcome.outputs[0].data == b"abc"


async def test_an_error_tells_whether_the_request_was_scheduled() -> None:
    refused = SingleAnswer(Asked(origin, RequestMemory(), Holding()))
    refused.fail(internal("no"))
    refused.handed_over()
    failed = SingleAnswer(Asked(origin, RequestMemory(), Holding()))
    failed.handed_over()
    failed.fail(internal("no"))
    quick = SingleAnswer(Asked(origin, RequestMemory(), Holding()))
    await elsewhere(lambda: quick.fail(internal("no")))
    quick.handed_over()
    assert [refused.is_refused, failed.is_refused, quick.is_refused] == [True, False, False]
    assert isinstance(await refused.outcome(), ServeError)


async def test_there_is_room_for_one_response_only() -> None:
    answer = SingleAnswer(Asked(origin, RequestMemory(), Holding()))
    with pytest.raises(ServeError, match="doesn't support models with decoupled transaction policy"):
        answer.expect_many()
    answer.end()
    outcome = await answer.outcome()
    assert isinstance(outcome, ServeError)
    assert outcome.text == "expected a single response, got 0"


async def test_a_client_that_has_gone() -> None:
    answer = SingleAnswer(Asked(origin, RequestMemory(), Holding()))
    told: list[str] = []
    answer.watch_cancellation(lambda: told.append("early"))
    waiting = asyncio.ensure_future(answer.outcome())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    answer.watch_cancellation(lambda: told.append("late"))
    answer.cancel()
    assert told == ["early", "late"]
    # What still comes is nobody's.
    answer.send(response(bytearray(b"a")))
    await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [SingleAnswer, AnswerStream])
@pytest.mark.parametrize("fails", [False, True])
async def test_what_waits_for_the_client_to_leave_is_let_go_with_the_answer(kind: type, fails: bool) -> None:
    answer = kind(Asked(origin, RequestMemory(), Holding()))

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
    stream = AnswerStream(Asked(origin, RequestMemory(), Holding()))
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
    stream = AnswerStream(Asked(origin, RequestMemory(), Holding()))
    cancelled: list[bool] = []
    stream.watch_cancellation(lambda: cancelled.append(True))
    for _ in range(5):
        stream.send(response(bytearray(4)), final=False)
    await asyncio.sleep(0)
    outcome = await stream.next()
    assert isinstance(outcome, ServeError)
    assert outcome.code is StatusCode.RESOURCE_EXHAUSTED
    assert await stream.next() is None
    assert cancelled == [True]
