"""Calls to other models of the server: how they are started, and how their responses are waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TypeVar

from rocserve.backends.python.pb_utils.errors import TritonError, TritonModelException
from rocserve.backends.python.pb_utils.response import InferenceResponse, response_of
from rocserve.backends.request_model import Answer, ModelCall, ModelCalls
from rocserve.core.errors import ServeError

OnAnswer = Callable[[Answer | None, bool], None]
T = TypeVar("T")


class Caller:
    """Starts calls while the model may make them: between its `initialize` and its `finalize`."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self.is_open = False

    def start(self, call: ModelCall, on_answer: OnAnswer) -> None:
        """
        Raises:
            TritonModelException: the model is not being served.
        """
        if not self.is_open:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        try:
            self._calls.call(call, on_answer)
        except ServeError as error:
            on_answer(error, True)

    def run(self, call: ModelCall) -> InferenceResponse:
        """Wait for the only response of a call."""
        done: SimpleQueue[InferenceResponse] = SimpleQueue()
        self.start(call, OnlyResponse(call.model_name, done.put).take)
        return done.get()

    async def run_async(self, call: ModelCall) -> InferenceResponse:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[InferenceResponse] = loop.create_future()
        self.start(call, OnlyResponse(call.model_name, lambda response: _set_soon(loop, future, response)).take)
        return await future


class OnlyResponse:
    """Hands on the response of a call that must have exactly one."""

    def __init__(self, model_name: str, deliver: Callable[[InferenceResponse], None]) -> None:
        self._model_name = model_name
        self._deliver = deliver
        self._answer: Answer | None = None
        self._done = False

    def take(self, answer: Answer | None, final: bool) -> None:
        if self._done:
            return
        several = answer is not None and self._answer is not None
        self._answer = self._answer or answer
        if several or (final and self._answer is None):
            self._done = True
            self._deliver(InferenceResponse(error=self._decoupled_fault()))
        elif final:
            self._done = True
            self._deliver(response_of(self._answer))

    def _decoupled_fault(self) -> TritonError:
        return TritonError(
            f"Model {self._model_name} is using the decoupled. The current BLS request call doesn't support models"
            " using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or"
            " 'async_exec' calls for decoupled models."
        )


class ResponseIterator:
    """The responses of a call, as they come; iterated again, it gives them from the first.

    As in Triton, when a model ends without a further response the last one is without tensors.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._responses: list[InferenceResponse] = []
        self._finished = False
        self._position = 0
        self._waiting: list[Callable[[], None]] = []

    def take(self, answer: Answer | None, final: bool) -> None:
        """One more answer; called on a thread of the worker's own."""
        with self._changed:
            if self._finished:
                return
            self._responses.append(response_of(answer))
            self._finished = final
            self._wake()

    def cancel(self) -> None:
        """End the iteration: what has not come yet is dropped. The called model goes on."""
        with self._changed:
            self._finished = True
            self._wake()

    def wait_for_first(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._responses or self._finished)

    async def wait_for_more(self) -> None:
        """Until there is a response that has not been taken, or there will be none."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if self._position < len(self._responses) or self._finished:
                return
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append(lambda: _set_soon(loop, future, None))
        await future

    def __iter__(self) -> ResponseIterator:
        with self._changed:
            if self._finished and self._position >= len(self._responses):
                self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        with self._changed:
            self._changed.wait_for(lambda: self._position < len(self._responses) or self._finished)
            response = self._next()
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> ResponseIterator:
        return self.__iter__()

    async def __anext__(self) -> InferenceResponse:
        await self.wait_for_more()
        with self._changed:
            response = self._next()
        if response is None:
            raise StopAsyncIteration
        return response

    def _next(self) -> InferenceResponse | None:
        if self._position >= len(self._responses):
            return None
        self._position += 1
        return self._responses[self._position - 1]

    def _wake(self) -> None:
        self._changed.notify_all()
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


def _set_soon(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], result: T) -> None:
    """Set a future's result from another thread; nobody may be waiting for it any more."""

    def set_result() -> None:
        if not future.done():
            future.set_result(result)

    try:
        loop.call_soon_threadsafe(set_result)
    except RuntimeError:
        pass  # The model has closed the loop.


_ADVICE = "models cannot control the server's models in this version; use the server's repository API instead"


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Raises: TritonModelException, always."""
    raise TritonModelException(f"Failed to load model: {model_name}: {_ADVICE}")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Raises: TritonModelException, always."""
    raise TritonModelException(f"Failed to unload model: {model_name}: {_ADVICE}")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Raises: TritonModelException, always."""
    raise TritonModelException(f"Failed to check model readiness: {model_name}: {_ADVICE}")
