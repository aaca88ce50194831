"""Encodes responses as the bodies of infer responses: JSON, followed by binary tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rocserve.core.memo import Memo
from rocserve.core.responses import InferResponse, ResponseHead
from rocserve.core.steps import Steps
from rocserve.core.tensors import Buffer, Tensor
from rocserve.frontends.http.json_text import element_pieces, json_bytes


class AnswerForm(NamedTuple):
    """Says which outputs are binary tensors after the JSON, and which are in the JSON. A tuple, because it is a key."""

    binary: tuple[tuple[str, bool], ...] = ()
    """(Name, whether binary) of each output that the request names."""
    otherwise_binary: bool = False
    """Whether the outputs that the request does not name are binary."""
    shared: frozenset[str] = frozenset()
    """Outputs in the client's shared memory, of which the response has only the heads."""


BINARY_ONLY = AnswerForm(otherwise_binary=True)
JSON_ONLY = AnswerForm()


def detached(response: InferResponse) -> InferResponse:
    """Return the response with a copy of its data outside the heap, because a client may read slowly."""
    if response.slot is None:
        return response
    return replace(response, data=[bytes(data) for data in response.data], slot=None)


class AnswerBody(NamedTuple):
    json: list[bytes]
    """Pieces, because the JSON of millions of elements must not be joined."""
    tensors: list[Buffer]
    """The binary tensors after the JSON. They lie in the response's memory."""


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """The common part of the bodies of many responses: all but ids, parameters, elements in JSON and binary tensors."""

    model: bytes
    texts: Sequence[bytes]
    """Each text but the last is followed by the elements of an output."""
    in_json: Sequence[int]
    """Indices of the outputs whose elements are in the JSON."""
    behind: Sequence[int]
    is_slow: bool
    """The JSON is so long that it must be written step by step."""

    @classmethod
    def of(cls, head: ResponseHead, sizes: Sequence[int], form: AnswerForm) -> AnswerLayout:
        """`sizes` are the bytes of the outputs."""
        model = {"model_name": head.model_name, "model_version": head.model_version}
        binary = dict(form.binary)
        texts, text = [], b',"outputs":['
        in_json: list[int] = []
        behind: list[int] = []
        for index, (output, size) in enumerate(zip(head.outputs, sizes, strict=True)):
            fields: dict[str, Any] = {"name": output.name, "datatype": output.datatype.value, "shape": output.shape}
            text += b"," if index else b""
            if output.name in form.shared:
                # The output lies in the client's shared memory, at the place that the request names.
                text += json_bytes(fields)
            elif binary.get(output.name, form.otherwise_binary):
                text += json_bytes({**fields, "parameters": {"binary_data_size": size}})
                behind += [index] if size else []
            else:
                texts.append(text + json_bytes(fields)[:-1] + b',"data":[')
                text = b"]}"
                in_json.append(index)
        # With more elements, writing JSON takes milliseconds.
        is_slow = sum(math.prod(head.outputs[index].shape) for index in in_json) > 10_000
        return cls(json_bytes(model)[1:-1], [*texts, text + b"]}"], in_json, behind, is_slow)

    def body(self, response: InferResponse) -> Steps[AnswerBody]:
        """Return the body, written step by step. Raises ServeError: INVALID_ARGUMENT if an output has no form in JSON,
        INTERNAL if one does not fit its shape."""
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


AnswerLayouts = Memo[tuple[ResponseHead, AnswerForm, tuple[int, ...]], AnswerLayout]
"""Most responses of a model have the same layout."""


def layout_of(response: InferResponse, form: AnswerForm, known: AnswerLayouts) -> AnswerLayout:
    key = response.head, form, tuple(map(len, response.data))
    return known.get(key) or known.keep(key, AnswerLayout.of(key[0], key[2], form))
