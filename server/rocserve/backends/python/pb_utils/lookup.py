"""Finding a tensor by its name."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.backends.python.pb_utils.request import InferenceRequest
from rocserve.backends.python.pb_utils.response import InferenceResponse
from rocserve.backends.python.pb_utils.tensor import Tensor


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of that name; None when there is none, as for an optional input that is left out."""
    return _find(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name; None when there is none."""
    return _find(inference_response.output_tensors(), name)


def _find(tensors: Iterable[Tensor], name: str) -> Tensor | None:
    for tensor in tensors:
        if tensor.name() == name:
            return tensor
    return None
