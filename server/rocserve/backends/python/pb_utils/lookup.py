"""Finding a tensor by its name."""

from __future__ import annotations

from rocserve.backends.python.pb_utils.request import InferenceRequest
from rocserve.backends.python.pb_utils.response import InferenceResponse
from rocserve.backends.python.pb_utils.tensor import Tensor


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of that name; None when there is none, as for an optional input that is left out."""
    for tensor in inference_request._inputs:
        if tensor._tensor.name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name; None when there is none."""
    for tensor in inference_response._tensors:
        if tensor._tensor.name == name:
            return tensor
    return None
