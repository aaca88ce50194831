"""Describes methods of inference.GRPCInferenceService and rocserve.Page that take one message and return one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from rocserve.core.errors import ServeError
from rocserve.core.private_paths import PrivatePaths


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the services, for each protocol."""

    request: type[Message]
    answer: Callable[[Any], Any]
    """Returns, on any thread, a Message or a coroutine for a task of the event loop that returns it."""
    is_slow: bool = False
    """The answer is always a coroutine, and the request is parsed in its task."""
    answer_serialised: Callable[[bytes], Any] | None = None
    """Like `answer`, but takes the serialised request; None = the request must be parsed."""


def on_loop(method: Method, loop: asyncio.AbstractEventLoop) -> Method:
    """Return the method for tasks of another event loop: a task of `loop` answers it."""

    def hand_over(message: Message) -> Any:
        answer = method.answer(message)
        if not isinstance(answer, Coroutine):
            return answer
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, loop))

    return replace(method, answer=hand_over)


def without_paths(methods: Mapping[str, Method], paths: PrivatePaths) -> Mapping[str, Method]:
    """Return the same methods, but without the server's paths in their errors."""

    @contextmanager
    def hiding() -> Iterator[None]:
        try:
            yield
        except ServeError as error:
            raise paths.without(error) from None

    async def hiding_later(answer: Coroutine[Any, Any, Any]) -> Any:
        with hiding():
            return await answer

    def hidden(method: Method) -> Method:
        def answer(request: Any) -> Any:
            with hiding():
                found = method.answer(request)
            return hiding_later(found) if isinstance(found, Coroutine) else found

        return replace(method, answer=answer)

    return {name: hidden(method) for name, method in methods.items()}
