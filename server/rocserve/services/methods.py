"""Describes methods of inference.GRPCInferenceService and rocserve.Page that take one message and return one."""

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
    """Returns a Message, on any thread; if `is_slow`, a coroutine for a task of the event loop."""
    is_slow: bool = False
    answer_serialised: Callable[[bytes], Any] | None = None
    """Like `answer`, but takes the serialised request; None = the request must be parsed."""


def on_loop(method: Method, loop: asyncio.AbstractEventLoop) -> Method:
    """Return the method for tasks of another event loop: a task of `loop` answers it."""
    if not method.is_slow:
        return method

    def hand_over(message: Message) -> Any:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(method.answer(message), loop))

    return replace(method, answer=hand_over)


def without_paths(methods: Mapping[str, Method], paths: PrivatePaths) -> Mapping[str, Method]:
    """Return the same methods, but without the server's paths in their errors."""

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
