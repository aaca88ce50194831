"""The responses that models give, and that they get from other models."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rocserve.backends.python.pb_utils.errors import (
    TritonError,
    TritonModelException,
    from_serve_error,
    to_serve_error,
)
from rocserve.backends.python.pb_utils.tensor import Tensor, host_tensor, wrap_tensor
from rocserve.backends.request_model import Answer, ModelResponse
from rocserve.core import tensors as core
from rocserve.core.errors import ServeError
from rocserve.core.requests import NO_PARAMETERS, Parameters, ParameterValue


def checked_parameters(parameters: dict[str, Any]) -> dict[str, ParameterValue]:
    """
    Raises:
        TritonModelException: a key is no str, or a value no bool, int or str.
    """
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


def parameters_text(parameters: Parameters) -> str:
    """As Triton writes them: without spaces, and text as it is."""
    return json.dumps(dict(parameters), separators=(",", ":"), ensure_ascii=False)


class InferenceResponse:
    """Tensors or an error; with an error the tensors are not looked at."""

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
        """JSON."""
        return parameters_text(self._parameters)


def answer_of(
    response: InferenceResponse, wanted: Collection[str], sent: Callable[[Tensor], core.Tensor] = host_tensor
) -> Answer:
    """What goes to the client: the error, or those of the tensors that it asked for. `sent`: how one travels."""
    if response._error is not None:
        return to_serve_error(response._error)
    tensors = [sent(tensor) for tensor in response._tensors if tensor._tensor.name in wanted]
    return ModelResponse(tensors, response._parameters)


def response_of(answer: Answer, wrap: Callable[[core.Tensor], Tensor] = wrap_tensor) -> InferenceResponse:
    """What came from another model. `wrap`: makes of a tensor what the model sees."""
    if isinstance(answer, ServeError):
        return InferenceResponse(error=from_serve_error(answer))
    response = InferenceResponse([wrap(tensor) for tensor in answer.outputs])
    response._parameters = answer.parameters
    return response
