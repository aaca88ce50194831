"""InferResponse -> the body of an infer response: JSON, and binary tensors behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from rocserve.core.requests import InferResponse
from rocserve.core.tensors import Buffer, Tensor
from rocserve.frontends.http.answer_form import AnswerForm
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.tensor_json import element_slices

MANY_ELEMENTS = 10_000
"""From here on it takes milliseconds to write them as JSON."""


@dataclass(frozen=True, slots=True)
class InferBody:
    json: bytes
    tensors: list[Buffer]
    """Those in binary form, in the order of the outputs."""

    @property
    def parts(self) -> list[Buffer]:
        return [self.json, *self.tensors]


def detached(response: InferResponse) -> InferResponse:
    """The response on memory of its own, for whoever answers later."""
    return replace(response, outputs=[tensor.copied() for tensor in response.outputs])


def infer_body(response: InferResponse, form: AnswerForm) -> InferBody:
    """The body; its binary tensors are the response's own memory.

    Raises:
        ServeError: INVALID_ARGUMENT for an output that has no JSON, INTERNAL for one that does not fit its shape.
    """
    outputs: list[bytes] = []
    tensors: list[Buffer] = []
    for tensor in response.outputs:
        told: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.shape}
        if tensor.name in form.shared:
            outputs.append(json_bytes(told))  # The client finds it where it asked for it.
        elif form.is_binary(tensor.name):
            told["parameters"] = {"binary_data_size": len(tensor.data)}
            outputs.append(json_bytes(told))
            if len(tensor.data):
                tensors.append(tensor.data)
        else:
            # The object ends with its elements.
            outputs.append(b'%b,"data":[%b]}' % (json_bytes(told)[:-1], _elements(tensor)))
    head: dict[str, Any] = {"id": response.id} if response.id else {}
    head |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        head["parameters"] = dict(response.parameters)
    return InferBody(b'%b,"outputs":[%b]}' % (json_bytes(head)[:-1], b",".join(outputs)), tensors)


def takes_long(response: InferResponse, form: AnswerForm) -> bool:
    """Whether so much has to be written as JSON that it is better done beside the event loop."""
    told = (tensor for tensor in response.outputs if not (tensor.name in form.shared or form.is_binary(tensor.name)))
    return sum(math.prod(tensor.shape) for tensor in told) > MANY_ELEMENTS


def _elements(tensor: Tensor) -> bytes:
    return b",".join(json_bytes(elements)[1:-1] for elements in element_slices(tensor))
