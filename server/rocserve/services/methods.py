"""Methods of inference.GRPCInferenceService and rocserve.Page that take one message and give one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rocserve.core.errors import ServeError
from rocserve.core.private_paths import PrivatePaths


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


def without_paths(methods: Mapping[str, Method], paths: PrivatePaths) -> Mapping[str, Method]:
    """The same methods, whose errors have no paths of the server."""

    def hiding(method: Method) -> Method:
        if isinstance(method, SlowMethod):
            ask = method.answer

            async def answer_slowly(request: Any) -> Message:
                try:
                    return await ask(request)
                except ServeError as error:
                    raise paths.without(error) from None

            return SlowMethod(method.request, answer_slowly)
        query = method.answer

        def answer(request: Any) -> Message:
            try:
                return query(request)
            except ServeError as error:
                raise paths.without(error) from None

        return QuickMethod(method.request, answer)

    return {name: hiding(method) for name, method in methods.items()}
