"""InferResponse -> the body of an infer response: JSON, and binary tensors behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rocserve.core.memo import Memo
from rocserve.core.requests import InferResponse, ResponseHead
from rocserve.core.steps import Steps
from rocserve.core.tensors import Buffer, Tensor
from rocserve.frontends.http.json_text import element_pieces, json_bytes


class AnswerForm(NamedTuple):
    """Which outputs are binary, behind the JSON, and which are in it. A tuple, for responses are remembered by it."""

    binary: tuple[tuple[str, bool], ...] = ()
    """By the outputs that the request names."""
    otherwise_binary: bool = False
    """Outputs that it does not name."""
    shared: frozenset[str] = frozenset()
    """Outputs that lie in the client's shared memory, so that the response has only their heads."""


BINARY_ONLY = AnswerForm(otherwise_binary=True)
JSON_ONLY = AnswerForm()

_MANY_ELEMENTS = 10_000
"""From here on it takes milliseconds to write them as JSON."""


def detached(response: InferResponse) -> InferResponse:
    """The response on memory of its own, for a client that may read slowly."""
    if response.slot is None:
        return response
    return replace(response, data=[bytes(data) for data in response.data], slot=None)


class AnswerBody(NamedTuple):
    """The body of a response."""

    json: list[bytes]
    """In pieces: of millions of elements it is never put together."""
    tensors: list[Buffer]
    """Behind it, in binary form; they are the response's own memory."""


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """The body of responses that are alike: all but their ids, parameters, elements in JSON and tensors behind it."""

    model: bytes
    texts: Sequence[bytes]
    """Behind each but the last, the elements of an output."""
    in_json: Sequence[int]
    """Of the outputs, those whose elements are there."""
    behind: Sequence[int]
    takes_long: bool
    """So much has to be written as JSON that others have their turn meanwhile."""

    @classmethod
    def of(cls, head: ResponseHead, sizes: Sequence[int], form: AnswerForm) -> AnswerLayout:
        """`sizes`: of the outputs, in bytes."""
        model = {"model_name": head.model_name, "model_version": head.model_version}
        binary = dict(form.binary)
        texts, text = [], b',"outputs":['
        in_json: list[int] = []
        behind: list[int] = []
        for index, (output, size) in enumerate(zip(head.outputs, sizes, strict=True)):
            fields: dict[str, Any] = {"name": output.name, "datatype": output.datatype.value, "shape": output.shape}
            text += b"," if index else b""
            if output.name in form.shared:
                text += json_bytes(fields)  # The client finds it where it asked for it.
            elif binary.get(output.name, form.otherwise_binary):
                text += json_bytes({**fields, "parameters": {"binary_data_size": size}})
                behind += [index] if size else []
            else:
                texts.append(text + json_bytes(fields)[:-1] + b',"data":[')
                text = b"]}"
                in_json.append(index)
        takes_long = sum(math.prod(head.outputs[index].shape) for index in in_json) > _MANY_ELEMENTS
        return cls(json_bytes(model)[1:-1], [*texts, text + b"]}"], in_json, behind, takes_long)

    def body(self, response: InferResponse) -> Steps[AnswerBody]:
        """Raises: ServeError: INVALID_ARGUMENT for an output that has no JSON, INTERNAL for one that does not fit its
        shape."""
        data = response.data
        parts = [b'{"id":%b,' % json_bytes(response.id) if response.id else b"{", self.model]
        if response.parameters:
            parts.append(b',"parameters":%b' % json_bytes(dict(response.parameters)))
        parts.append(self.texts[0])
        for behind, index in zip(self.texts[1:], self.in_json, strict=True):
            tensor = Tensor(*response.head.outputs[index], data[index])
            for piece in element_pieces(tensor):
                parts.append(piece)
                yield
            parts.append(behind)
        return AnswerBody(parts, [data[index] for index in self.behind])


class AnswerLayouts:
    """Remembers the layouts of responses: they are the same from answer to answer."""

    def __init__(self) -> None:
        self._known = Memo[tuple[ResponseHead, AnswerForm, tuple[int, ...]], AnswerLayout]()

    def of(self, response: InferResponse, form: AnswerForm) -> AnswerLayout:
        key = response.head, form, tuple(map(len, response.data))
        return self._known.get(key) or self._known.keep(key, AnswerLayout.of(key[0], key[2], form))
