"""Represents responses, and sends the answers to one request by Triton's rules."""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rocserve.backends.python.pb_utils.errors import (
    TritonError,
    TritonModelException,
    from_serve_error,
    to_serve_error,
)
from rocserve.backends.python.pb_utils.tensor import Tensor, host_tensor, wrap_tensor
from rocserve.backends.request_model import RESCHEDULED, Answer, ModelResponse, RequestResponder, Result
from rocserve.core import tensors as core
from rocserve.core.errors import ServeError
from rocserve.core.parameters import NO_PARAMETERS, Parameters, ParameterValue


def checked_parameters(parameters: dict[str, Any]) -> dict[str, ParameterValue]:
    """Raises TritonModelException if the parameters are not a dict of bool, int or str values by str keys."""
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


def parameters_text(parameters: Parameters) -> str:
    """Return the parameters in Triton's JSON: without spaces, and text not escaped to ASCII."""
    return json.dumps(dict(parameters), separators=(",", ":"), ensure_ascii=False)


class InferenceResponse:
    """Tensors, or an error; with an error, the tensors are ignored."""

    __slots__ = ("__weakref__", "_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self._tensors = list(output_tensors)
        for tensor in self._tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors must be pb_utils.Tensor objects, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error must be a pb_utils.TritonError, got {type(error).__name__}")
        self._error = error
        self._parameters: Parameters = NO_PARAMETERS if parameters is None else checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the parameters in JSON."""
        return parameters_text(self._parameters)


def answer_of(
    response: InferenceResponse, wanted: Collection[str], sent: Callable[[Tensor], core.Tensor] = host_tensor
) -> Answer:
    """Return the answer for the client: the error, or the wanted tensors. `sent`: makes a tensor to send."""
    if response._error is not None:
        return to_serve_error(response._error)
    tensors = [sent(tensor) for tensor in response._tensors if tensor._tensor.name in wanted]
    return ModelResponse(tensors, response._parameters)


def response_of(answer: Answer, wrap: Callable[[core.Tensor], Tensor] = wrap_tensor) -> InferenceResponse:
    """Return another model's answer as a response. `wrap`: makes a tensor that the model sees."""
    if isinstance(answer, ServeError):
        return InferenceResponse(error=from_serve_error(answer))
    response = InferenceResponse([wrap(tensor) for tensor in answer.outputs])
    response._parameters = answer.parameters
    return response


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Abandoned(enum.Enum):
    """How a model has left a request that it dropped without a final response."""

    UNANSWERED = enum.auto()
    UNENDED = enum.auto()
    """The request may end without a further response."""
    RESCHEDULED = enum.auto()


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class InferenceResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    _responder: RequestResponder
    _decoupled: bool
    _to_answer: Callable[[InferenceResponse], Answer]
    _on_abandoned: Callable[[RequestResponder, Abandoned], None]
    """Called when nobody can answer any more, perhaps in a garbage collection."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _sent: int = field(default=0, init=False)
    _is_closed: bool = field(default=False, init=False)
    """Whether no further response may be sent."""
    _is_rescheduled: bool = field(default=False, init=False)
    """The model wants the request again in a later batch."""

    def __del__(self) -> None:
        # Without an answer, the client of a request that the model has dropped would wait.
        if self._is_closed:
            return
        state = Abandoned.UNANSWERED
        if self._is_rescheduled:
            state = Abandoned.RESCHEDULED
        elif self._decoupled or self._sent:
            state = Abandoned.UNENDED
        self._on_abandoned(self._responder, state)

    def is_cancelled(self) -> bool:
        return self._responder.is_cancelled

    def _answer_returned(self, response: InferenceResponse) -> Answer:
        """Return the answer for a response that `execute` has returned, which is the request's only one."""
        self._count_response(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return self._to_answer(response)

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; with TRITONSERVER_RESPONSE_COMPLETE_FINAL, end the request. Raises TritonModelException if
        the flags are invalid, there is a response too many or too few, or the response cannot be sent. Then nothing was
        sent, and the request must still be answered."""
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response must be a pb_utils.InferenceResponse, got {type(response).__name__}")
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._count_response(response, flags)
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            self._respond(None if response is None else self._to_answer(response), final)
        except BaseException as error:
            with self._lock:
                self._sent -= 1
                self._is_closed = self._is_closed and not final
            if isinstance(error, ServeError):
                raise TritonModelException(error.text) from None
            raise

    def _fail(self, error: ServeError) -> None:
        """End the request with an error, unless its final answer has been given."""
        if self._close():
            self._respond(error, True)

    def _set_rescheduled(self, wanted: bool) -> None:
        """Raises TritonModelException if the request can have no further response."""
        with self._lock:
            if wanted and (self._is_closed or (self._sent and not self._decoupled)):
                raise TritonModelException(
                    "Unable to reschedule the request: its last response has been sent. A non-decoupled model sends one"
                    " response, in the request's last run."
                )
            self._is_rescheduled = wanted

    def _reschedule(self) -> None:
        """Let the request run again, unless its final answer has been given."""
        if self._close():
            self._respond(RESCHEDULED, True)

    def _close(self) -> bool:
        """Allow no further responses. Returns whether they were allowed before."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
        return was_open

    def _count_response(self, response: InferenceResponse | None, flags: int) -> None:
        with self._lock:
            if not self._decoupled:
                if self._is_rescheduled:
                    raise TritonModelException(
                        "Unable to send response. The request is rescheduled, and a non-decoupled model sends one"
                        " response, in the request's last run."
                    )
                if response is not None and self._sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
                if response is None and not self._sent:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a"
                        " response."
                    )
            if self._is_closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._is_closed = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self._sent += 1

    def _respond(self, answer: Result | None, final: bool) -> None:
        try:
            self._responder.send(answer, final)
        except RuntimeError:
            raise TritonModelException("Unable to send response. Response sender has been closed.") from None
