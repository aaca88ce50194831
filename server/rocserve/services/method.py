"""Method of inference.GRPCInferenceService, or of rocserve.Page, that takes one message and gives one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message


@dataclass(frozen=True, slots=True)
class QuickMethod:
    """Answered in place, on any thread."""

    request: type[Message]
    answer: Callable[[Any], Message]


@dataclass(frozen=True, slots=True)
class SlowMethod:
    """Answered by a task of the event loop."""

    request: type[Message]
    answer: Callable[[Any], Awaitable[Message]]


Method = QuickMethod | SlowMethod


def on_loop(method: Method, loop: asyncio.AbstractEventLoop) -> Method:
    """The method for tasks of another loop than `loop`, whose task answers it."""
    if not isinstance(method, SlowMethod):
        return method

    async def answer(message: Message) -> Message:
        return await method.answer(message)

    return SlowMethod(
        method.request, lambda message: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(message), loop))
    )
