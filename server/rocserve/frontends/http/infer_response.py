"""InferResponse -> the body of an infer response: JSON, and binary tensors behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from rocserve.core.memo import Memo
from rocserve.core.requests import InferResponse, ResponseHead
from rocserve.core.tensors import Buffer, Tensor
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.tensor_json import SLICE, element_slices, json_elements


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Which outputs are binary, behind the JSON, and which are in it."""

    binary: Mapping[str, bool] = field(default_factory=dict)
    """By the outputs that the request names."""
    otherwise_binary: bool = False
    """Outputs that it does not name."""
    shared: Set[str] = frozenset()
    """Outputs that lie in the client's shared memory, so that the response has only their heads."""

    is_all_binary: bool = field(init=False)
    """Whatever outputs there are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_all_binary", self.otherwise_binary and not self.binary)

    def is_binary(self, output_name: str) -> bool:
        return self.binary.get(output_name, self.otherwise_binary)


BINARY_ONLY = AnswerForm(otherwise_binary=True)
JSON_ONLY = AnswerForm()


MANY_ELEMENTS = 10_000
"""From here on it takes milliseconds to write them as JSON."""


def detached(response: InferResponse) -> InferResponse:
    """The response on memory of its own, for a client that may read slowly."""
    if response.slot is None:
        return response
    return replace(response, data=[bytes(data) for data in response.data], slot=None)


class InferBodyWriter:
    """Writes bodies, and remembers the JSON of those that are all binary: it is the same from answer to answer, but for
    the id. May be called from several threads."""

    def __init__(self) -> None:
        # Threads may both write what is new; the dict's own operations are atomic.
        self._texts = Memo[tuple[ResponseHead, tuple[int, ...]], bytes]()

    def write(self, response: InferResponse, form: AnswerForm) -> list[Buffer]:
        """See `infer_body`."""
        if response.parameters or form.shared:
            return infer_body(response, form)
        head, data = response.head, response.data
        if not (form.is_all_binary or all(form.is_binary(output.name) for output in head.outputs)):
            return infer_body(response, form)
        sizes = tuple(map(len, data))
        key = (head, sizes)
        text = self._texts.get(key)
        if text is None:
            text = self._texts.keep(key, bytes(infer_body(replace(response, id=""), form)[0]))
        if response.id:
            text = b'{"id":%b,%b' % (json_bytes(response.id), text[1:])
        return [text, *(data if all(sizes) else [each for each in data if len(each)])]


def infer_body(response: InferResponse, form: AnswerForm) -> list[Buffer]:
    """The body: its JSON, then the tensors in binary form, which are the response's own memory.

    Raises:
        ServeError: INVALID_ARGUMENT for an output that has no JSON, INTERNAL for one that does not fit its shape.
    """
    head: dict[str, Any] = {"id": response.id} if response.id else {}
    head |= {"model_name": response.head.model_name, "model_version": response.head.model_version}
    if response.parameters:
        head["parameters"] = dict(response.parameters)
    outputs: list[dict[str, Any]] = []
    large: dict[int, Tensor] = {}
    tensors: list[Buffer] = []
    for tensor in response.outputs:
        fields: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.shape}
        if tensor.name in form.shared:
            pass  # The client finds it where it asked for it.
        elif form.is_binary(tensor.name):
            fields["parameters"] = {"binary_data_size": len(tensor.data)}
            if len(tensor.data):
                tensors.append(tensor.data)
        elif tensor.element_count > SLICE:
            large[len(outputs)] = tensor
        else:
            fields["data"] = json_elements(tensor)
        outputs.append(fields)
    if not large:
        return [json_bytes(head | {"outputs": outputs}), *tensors]
    texts = [json_bytes(fields) for fields in outputs]
    for index, tensor in large.items():
        # The object ends with its elements.
        texts[index] = b'%b,"data":[%b]}' % (texts[index][:-1], _elements(tensor))
    return [b'%b,"outputs":[%b]}' % (json_bytes(head)[:-1], b",".join(texts)), *tensors]


def takes_long(response: InferResponse, form: AnswerForm) -> bool:
    """Whether so much has to be written as JSON that it is better done beside the event loop."""
    in_json = (head for head in response.head.outputs if not (head.name in form.shared or form.is_binary(head.name)))
    return sum(math.prod(head.shape) for head in in_json) > MANY_ELEMENTS


def _elements(tensor: Tensor) -> bytes:
    return b",".join(json_bytes(elements)[1:-1] for elements in element_slices(tensor))
