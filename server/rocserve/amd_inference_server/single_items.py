"""Adapts requests of AMD Inference Server's clients: each is one item without a batch dimension. That server batches
items, answers each without the dimension, and checks neither the name of a model's only input nor the shape of BYTES,
which its clients fill with the length of the only element. Clients also send files as UINT8."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rocserve.core.datatypes import DataType
from rocserve.core.exchange import Exchange, HookOrder, ResponseHook
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import InferResponse
from rocserve.core.tensors import ELEMENT_LENGTH, Buffer, encode_bytes_elements


class SingleItems:
    """Makes batches of one from items for one model. Safe on several threads."""

    def __init__(self, config: ModelConfig) -> None:
        self._inputs = {entry.name: entry for entry in config.inputs}
        self._batching = config.max_batch_size > 0
        self._has_bytes = any(entry.datatype is DataType.BYTES for entry in config.inputs)
        self._only = config.inputs[0].name if len(config.inputs) == 1 else ""
        # Clients repeat their heads, and plans are remembered by the head's identity.
        self._heads = Memo[RequestHead, tuple[RequestHead, bool]]()
        """Client's head -> (the model's head, whether the answer must lack the batch dimension)."""

    def take(self, request: InferRequest, exchange: Exchange) -> InferRequest:
        """Return the request in the model's form; the answer gets the client's form. The original stays for another
        version."""
        head, data = request.head, request.data
        known = self._heads.get(head)
        if known is None:
            adapted = [self._adapted(entry, part) for entry, part in zip(head.inputs, data, strict=True)]
            data = [part for _, part in adapted]
            entries = tuple(entry for entry, _ in adapted)
            is_item = bool(entries) and all(self._is_item(entry) for entry in entries)
            if is_item:
                entries = tuple(replace(entry, shape=(1, *entry.shape)) for entry in entries)
            same = not is_item and entries == head.inputs
            known = head if same else replace(head, inputs=entries), is_item
            # The shape of BYTES depends on the data.
            if not head.is_typed and not self._has_bytes:
                self._heads.keep(head, known)
        model_head, is_item = known
        if model_head is not head:
            request = replace(request, head=model_head, data=data)
        if is_item or head.is_typed:
            exchange.add(ResponseHook(HookOrder.ITEM, partial(_as_item, is_item, head.is_typed)))
        return request

    def _adapted(self, entry: InputHead, data: Buffer) -> tuple[InputHead, Buffer]:
        """Return an input under the model's name; one BYTES element, or a file as one, gets the model's shape."""
        if self._only and entry.name not in self._inputs:
            entry = replace(entry, name=self._only)
        expected = self._inputs.get(entry.name)
        if expected is None or expected.datatype is not DataType.BYTES:
            return entry, data
        is_file = entry.datatype == DataType.UINT8.value and len(entry.shape) == 1
        if is_file:
            entry, data = replace(entry, datatype=DataType.BYTES.value), encode_bytes_elements([bytes(data)])
        length = len(data) - ELEMENT_LENGTH.size
        # The shape may be the length of the only element.
        is_one = entry.shape == (length,) != (1,) and ELEMENT_LENGTH.unpack_from(data) == (length,)
        if is_file or is_one:
            entry = replace(entry, shape=(1,) * len(expected.dims))
        return entry, data

    def _is_item(self, entry: InputHead) -> bool:
        expected = self._inputs.get(entry.name)
        if expected is None:
            return False
        if self._batching:
            return len(entry.shape) == len(expected.dims)
        # The model itself declares a batch of one.
        return len(entry.shape) == len(expected.dims) - 1 and expected.dims[0] in (1, -1)


def _as_item(is_item: bool, is_typed: bool, response: InferResponse) -> InferResponse:
    """Remove the batch dimension from an item's answer."""
    if is_item:
        outputs = tuple(
            [head._replace(shape=head.shape[1:]) if head.shape[:1] == (1,) else head for head in response.head.outputs]
        )
        response.head = response.head._replace(outputs=outputs)
    response.is_typed = is_typed
    return response
