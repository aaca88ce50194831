"""Calls other models of the server: starts calls, and waits for their responses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rocserve.backends.python.pb_utils.errors import TritonError, TritonModelException, from_serve_error
from rocserve.backends.python.pb_utils.response import InferenceResponse, response_of
from rocserve.backends.python.pb_utils.tensor import Tensor, host_tensor, wrapper_of
from rocserve.backends.request_model import ModelCall, ModelCalls, Rescheduled, Result
from rocserve.core import tensors as core
from rocserve.core.errors import ServeError, internal

if TYPE_CHECKING:
    from rocserve.backends.device_tensors import DeviceTensors, SharedTensor

OnResponse = Callable[[InferenceResponse | None, bool], None]
"""Takes each response of a call, and whether it is the last; None = the call ends without another response."""


@dataclass(eq=False)
class Caller:
    """Starts calls while the model may make them: between its `initialize` and its `finalize`."""

    calls: ModelCalls | None = None
    """None while no calls are allowed."""
    tensors: DeviceTensors | None = None
    """Access to the model's GPU, if the model's tensors may be there; else None."""

    def start(self, call: ModelCall, inputs: Sequence[Tensor], on_response: OnResponse) -> None:
        """Start a call. If the call cannot be sent, the error is its answer. Raises TritonModelException if the model
        is not served."""
        if self.calls is None:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        started = _Call(self.calls, self.tensors, call, inputs, on_response)
        try:
            started.send(self.tensors)
        except ServeError as error:
            on_response(InferenceResponse(error=from_serve_error(error)), True)

    def run(self, call: ModelCall, inputs: Sequence[Tensor]) -> Future[InferenceResponse]:
        """Start a call that must have exactly one response; any other number becomes an error."""
        future, responses = _running_future(), list[InferenceResponse]()

        def take(response: InferenceResponse | None, final: bool) -> None:
            if response is not None:
                responses.append(response)
            if future.done() or not (final or len(responses) > 1):
                return
            only = responses[0] if len(responses) == 1 else None
            text = (
                f"Model {call.model_name} is using the decoupled. The current BLS request call doesn't support models"
                " using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or"
                " 'async_exec' calls for decoupled models."
            )
            future.set_result(only or InferenceResponse(error=TritonError(text)))

        self.start(call, inputs, take)
        return future


@dataclass(eq=False, slots=True)
class _Call:
    """A call in flight. Tensors on the model's GPU stay there if the called model is on the same GPU, which only the
    server knows. Otherwise the tensors are sent again through the CPU's memory."""

    _calls: ModelCalls
    _tensors: DeviceTensors | None
    _call: ModelCall
    _inputs: Sequence[Tensor]
    _on_response: OnResponse
    _shared_tensors: list[SharedTensor] = field(default_factory=list, init=False)
    """Shared tensors that references lead to, kept until the last answer."""

    def send(self, tensors: DeviceTensors | None) -> None:
        """`tensors`: None = all tensors go through the CPU's memory. Raises ServeError if the call cannot be sent."""
        sent: list[core.Tensor] = []
        references: list[str] = []
        for tensor in self._inputs:
            if tensors is None or tensor.is_cpu():
                sent.append(host_tensor(tensor))
            else:
                self._shared_tensors.append(tensors.share(tensor._on_device))
                sent.append(self._shared_tensors[-1].pack_references(tensor.name(), batching=False))
                references.append(tensor.name())
        if tensors is None:
            call = replace(self._call, inputs=tuple(sent), accepts_references=False)
        else:
            call = replace(self._call, inputs=tuple(sent), device=tensors.name, references=tuple(references))
            if references:
                tensors.wait()
        self._calls.call(call, self._take)

    def _take(self, answer: Result | None, final: bool) -> None:
        if final:
            self._shared_tensors.clear()
        try:
            if isinstance(answer, Rescheduled):
                self.send(None)
                return
            # Raises if the memory of another worker cannot be opened.
            response = None if answer is None else response_of(answer, wrapper_of(self._tensors))
            if response and self._tensors and not all(tensor.is_cpu() for tensor in response.output_tensors()):
                self._tensors.wait()
        except Exception as error:
            # Any exception becomes an answer, because the model waits for one.
            text = f"the call of model '{self._call.model_name}' failed: {type(error).__name__}: {error}"
            fault = error if isinstance(error, ServeError) else internal(text)
            response, final = InferenceResponse(error=from_serve_error(fault)), True
        self._on_response(response, final)


class ResponseIterator:
    """The responses of a call, in order; a second iteration begins with the first response again. As in Triton, if a
    model ends without a further response, the last response has no tensors."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._responses: list[InferenceResponse] = []
        self._finished = False
        self._position = 0
        self._waiting: list[Future[None]] = []

    def take(self, response: InferenceResponse | None, final: bool) -> None:
        """Add a response. Called on a separate thread of the worker."""
        with self._changed:
            if self._finished:
                return
            self._responses.append(response or InferenceResponse())
            self._finished = final
            self._wake()

    def cancel(self) -> None:
        """End the iteration and drop later responses. The called model goes on."""
        with self._changed:
            self._finished = True
            self._wake()

    def wait_for_more(self) -> None:
        """Wait for a response that has not been taken, or for the end."""
        with self._changed:
            self._changed.wait_for(self._has_more)

    def _has_more(self) -> bool:
        return self._position < len(self._responses) or self._finished

    async def await_more(self) -> None:
        """Do as `wait_for_more`, without blocking the loop."""
        with self._changed:
            if self._has_more():
                return
            self._waiting.append(_running_future())
            future = asyncio.wrap_future(self._waiting[-1])
        await future

    def __iter__(self) -> ResponseIterator:
        with self._changed:
            if self._finished and self._position >= len(self._responses):
                self._position = 0
        return self

    __aiter__ = __iter__

    def __next__(self) -> InferenceResponse:
        with self._changed:
            self._changed.wait_for(self._has_more)
            return self._next(StopIteration)

    async def __anext__(self) -> InferenceResponse:
        await self.await_more()
        with self._changed:
            return self._next(StopAsyncIteration)

    def _next(self, end: type[Exception]) -> InferenceResponse:
        if self._position >= len(self._responses):
            raise end
        self._position += 1
        return self._responses[self._position - 1]

    def _wake(self) -> None:
        self._changed.notify_all()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)


def _running_future() -> Future[Any]:
    """Return a future whose result can be set even if nobody waits for it any more."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


_ADVICE = "models cannot control the server's models in this version; use the server's repository API instead"


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Raises TritonModelException always."""
    raise TritonModelException(f"Failed to load model: {model_name}: {_ADVICE}")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Raises TritonModelException always."""
    raise TritonModelException(f"Failed to unload model: {model_name}: {_ADVICE}")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Raises TritonModelException always."""
    raise TritonModelException(f"Failed to check model readiness: {model_name}: {_ADVICE}")
