"""Represents requests that a model receives, and requests that it makes to other models."""

from __future__ import annotations

import asyncio
import enum
import operator
from collections.abc import Callable, Iterable
from typing import Any

from rocserve.backends.python.pb_utils.calls import Caller, ResponseIterator
from rocserve.backends.python.pb_utils.errors import TritonModelException, as_text
from rocserve.backends.python.pb_utils.response import (
    InferenceResponse,
    InferenceResponseSender,
    checked_parameters,
    parameters_text,
)
from rocserve.backends.python.pb_utils.tensor import Tensor
from rocserve.backends.request_model import ModelCall, ModelRequest
from rocserve.core import tensors as core


class MemoryType(enum.Enum):
    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 1


class PreferredMemory:
    """The memory in which a model prefers the outputs of a call."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(
                "preferred_memory_type must be TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU, got"
                f" {type(preferred_memory_type).__name__}"
            )
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request, for the requests to other models that it causes."""

    def __init__(self, number: int = 0, context: str = "") -> None:
        self.number = number
        """The request's number; 0 = the trace belongs to no received request."""
        self._context = context

    def get_context(self) -> str | None:
        """Return the W3C trace context in JSON, for other services; None if there is none."""
        return self._context or None


TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class InferenceRequest:
    """A request that was received or will be made. Each model's module has a subclass that knows the model."""

    _caller: Caller
    _model_name: str
    """The called model or, for a received request, the model that received it. The version is the same model's."""
    _model_version: int
    _may_reschedule = False
    """Requests that the model receives may be scheduled again."""
    _trace: InferenceTrace | None = None
    _sender: InferenceResponseSender | None = None

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Iterable[Tensor] | None = None,
        requested_output_names: Iterable[str | bytes] | None = None,
        model_name: str | bytes | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        """`timeout`: microseconds. `preferred_memory`: CPU = outputs come in the CPU's memory. Otherwise they stay on
        the model's GPU if its inputs may be there and the called model leaves them there."""
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest needs inputs, requested_output_names and model_name")
        if isinstance(requested_output_names, str | bytes):
            raise TypeError(f"requested_output_names must be a list of names, got {requested_output_names!r}")
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        request_id = as_text(request_id, "request_id")
        model_name = as_text(model_name, "model_name")
        names = tuple(dict.fromkeys(as_text(name, "a requested output name") for name in requested_output_names))
        whose = f"for request with id '{request_id}' and model name '{model_name}' should not be empty."
        self._inputs = list(inputs)
        for tensor in self._inputs:
            if tensor is None:
                raise TritonModelException(f"Input tensor {whose}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs must be pb_utils.Tensor objects, got {type(tensor).__name__}")
        if "" in names:
            raise TritonModelException(f"Requested output name {whose}")
        self._requested_names = names
        self._model_name = model_name
        self._model_version = _whole(model_version)
        self._message: ModelRequest | ModelCall = ModelCall(
            model_name=model_name,
            inputs=(),
            requested_outputs=names,
            id=request_id,
            correlation_id=_whole(correlation_id) if isinstance(correlation_id, int) else correlation_id,
            timeout_microseconds=_whole(timeout),
            parameters={} if parameters is None else checked_parameters(parameters),
            accepts_references=preferred_memory is None
            or preferred_memory.preferred_memory_type is MemoryType.TRITONSERVER_MEMORY_GPU,
        )
        """The received request or the call, for all fields except inputs, output names and flags."""
        self._flags = _whole(flags)
        self._trace = trace

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> set[str]:
        return set(self._requested_names)

    def request_id(self) -> str:
        return self._message.id

    def correlation_id(self) -> int | str:
        return self._message.correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = _whole(flags)

    def timeout(self) -> int:
        """Return microseconds; 0 = none."""
        return self._message.timeout_microseconds

    def priority(self) -> int:
        return self._message.priority

    def model_name(self) -> str:
        return self._model_name

    def parameters(self) -> str:
        """Return the parameters in JSON."""
        return parameters_text(self._message.parameters)

    def trace(self) -> InferenceTrace:
        if self._trace is None:
            message = self._message
            of = (message.number, message.trace_context) if isinstance(message, ModelRequest) else ()
            self._trace = InferenceTrace(*of)
        return self._trace

    def is_cancelled(self) -> bool:
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        """Raises TritonModelException if the model did not receive this request."""
        if self._sender is None:
            raise TritonModelException(
                "Unable to send response. Response sender has no reference to the decoupled state of the model."
            )
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """Raises TritonModelException if the flags are unknown, or ask to run a request again that cannot, or that has
        had its last response."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(
                "Unable to set the release flags: expected TRITONSERVER_REQUEST_RELEASE_ALL or"
                f" TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, got {flags!r}."
            )
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and not (self._may_reschedule and self._sender):
            raise TritonModelException(
                "Unable to reschedule the request: rescheduling needs sequence_batching with iterative_sequence in the"
                " model's configuration, and a request that the model received."
            )
        if self._sender is not None:
            self._sender._set_rescheduled(flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run the request on the model that it names, and return the response or, if `decoupled`, an iterator of
        responses. Errors are responses. Raises TritonModelException if this model is not served, as in `initialize`."""
        if not decoupled:
            return self._caller.run(self._call(), self._inputs).result()
        responses = ResponseIterator()
        self._caller.start(self._call(), self._inputs, responses.take)
        responses.wait_for_more()
        return responses

    def async_exec(self, decoupled: bool = False) -> asyncio.Future[InferenceResponse | ResponseIterator]:
        """Start the request; the future has the result of `exec`. Raises RuntimeError if no event loop is running."""
        return asyncio.ensure_future(self._run(self._call(), decoupled), loop=asyncio.get_running_loop())

    async def _run(self, call: ModelCall, decoupled: bool) -> InferenceResponse | ResponseIterator:
        if not decoupled:
            return await asyncio.wrap_future(self._caller.run(call, self._inputs))
        responses = ResponseIterator()
        self._caller.start(call, self._inputs, responses.take)
        await responses.await_more()
        return responses

    def _call(self) -> ModelCall:
        message = self._message
        return ModelCall(
            self._model_name,
            (),
            self._requested_names,
            self._model_version,
            message.id,
            message.correlation_id,
            self._flags,
            message.priority,
            message.timeout_microseconds,
            message.parameters,
            self.trace().number,
            accepts_references=message.accepts_references if isinstance(message, ModelCall) else True,
        )


def _whole(number: int) -> int:
    """Return a plain int, because the server does not accept True as a number. Raises TypeError."""
    return int(operator.index(number))


def received_request(
    kind: type[InferenceRequest],
    request: ModelRequest,
    outputs: tuple[str, ...],
    sender: InferenceResponseSender,
    wrap: Callable[[core.Tensor], Tensor],
) -> InferenceRequest:
    """Return a request as an object of its module's `kind`. `wrap`: makes an input that the model sees."""
    received = kind.__new__(kind)
    received._inputs = [wrap(tensor) for tensor in request.inputs.values()]
    received._requested_names = outputs
    received._message = request
    received._flags = request.flags
    received._sender = sender
    return received


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    for tensor in inference_request._inputs:
        if tensor._tensor.name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    for tensor in inference_response._tensors:
        if tensor._tensor.name == name:
            return tensor
    return None
