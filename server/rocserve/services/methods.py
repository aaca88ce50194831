"""Methods of inference.GRPCInferenceService and rocserve.Page that take one message and give one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from rocserve.core.errors import ServeError
from rocserve.core.private_paths import PrivatePaths


@dataclass(frozen=True, slots=True)
class Method:
    request: type[Message]
    answer: Callable[[Any], Any]
    """Gives a Message, in place and on any thread; a slow one has a task of the event loop await it."""
    is_slow: bool = False
    answer_serialised: Callable[[bytes], Any] | None = None
    """As `answer`, to a request that has been serialised; None: it has to be read for that."""


def on_loop(method: Method, loop: asyncio.AbstractEventLoop) -> Method:
    """The method for tasks of another loop than `loop`, whose task answers it."""
    if not method.is_slow:
        return method

    async def answer(message: Message) -> Any:
        return await method.answer(message)

    def hand_over(message: Message) -> Any:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(message), loop))

    return replace(method, answer=hand_over)


def without_paths(methods: Mapping[str, Method], paths: PrivatePaths) -> Mapping[str, Method]:
    """The same methods, whose errors have no paths of the server."""

    @contextmanager
    def hiding() -> Iterator[None]:
        try:
            yield
        except ServeError as error:
            raise paths.without(error) from None

    def hidden(method: Method) -> Method:
        async def answer_slowly(request: Any) -> Any:
            with hiding():
                return await method.answer(request)

        return replace(method, answer=answer_slowly if method.is_slow else hiding()(method.answer))

    return {name: hidden(method) for name, method in methods.items()}
