"""Requests as AMD Inference Server's clients send them: one item, without a batch dimension.

That server batches items itself and answers each without the dimension. It compares neither the name of a model's only
input nor, of BYTES, the shape, which its clients fill with the length of the one element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InputConfig, ModelConfig
from rocserve.core.requests import InferRequest, InferResponse, InputHead, RequestHead
from rocserve.core.serving import Responder
from rocserve.core.tensors import Buffer, Tensor

_REMEMBERED_HEADS = 1024
_LENGTH_BYTES = 4
"""Before each element of BYTES."""


@dataclass(frozen=True, slots=True, eq=False)
class _BatchedHead:
    head: RequestHead
    is_item: bool
    """Whether the answer is to be without the batch dimension."""


class SingleItems:
    """Makes batches of one from the items that requests to one model hold. Callable from several threads."""

    def __init__(self, config: ModelConfig) -> None:
        self._inputs = {entry.name: entry for entry in config.inputs}
        self._batching = config.max_batch_size > 0
        self._has_bytes = any(entry.datatype is DataType.BYTES for entry in config.inputs)
        self._only = config.inputs[0].name if len(config.inputs) == 1 else ""
        # Clients repeat their heads, and plans are remembered by the head's identity.
        self._heads: dict[RequestHead, _BatchedHead] = {}

    def take(self, request: InferRequest, responder: Responder) -> Responder:
        """Give the request the form that the model expects; who answers it then."""
        known = self._heads.get(request.head)
        if known is None:
            known = self._batched(request)
            if not request.head.is_typed and not self._has_bytes:
                if len(self._heads) >= _REMEMBERED_HEADS:
                    self._heads.clear()
                self._heads[request.head] = known
        is_typed = request.head.is_typed
        request.head = known.head
        if not known.is_item and not is_typed:
            return responder
        return _ItemResponder(responder, known.is_item, is_typed)

    def _batched(self, request: InferRequest) -> _BatchedHead:
        head = request.head
        entries = tuple(self._named(entry, data) for entry, data in zip(head.inputs, request.data, strict=True))
        is_item = bool(entries) and all(self._is_item(entry) for entry in entries)
        if is_item:
            entries = tuple(replace(entry, shape=(1, *entry.shape)) for entry in entries)
        elif entries == head.inputs:
            return _BatchedHead(head, False)
        return _BatchedHead(replace(head, inputs=entries), is_item)

    def _named(self, entry: InputHead, data: Buffer) -> InputHead:
        if self._only and entry.name not in self._inputs:
            entry = replace(entry, name=self._only)
        expected = self._inputs.get(entry.name)
        if expected is not None and expected.datatype is DataType.BYTES and _is_one_element(entry, data):
            entry = replace(entry, shape=(1,) * len(expected.dims))
        return entry

    def _is_item(self, entry: InputHead) -> bool:
        expected = self._inputs.get(entry.name)
        return expected is not None and _lacks_the_batch(entry, expected, self._batching)


def _lacks_the_batch(entry: InputHead, expected: InputConfig, batching: bool) -> bool:
    if batching:
        return len(entry.shape) == len(expected.dims)
    # A model with a batch of one of its own.
    return len(entry.shape) == len(expected.dims) - 1 and expected.dims[0] in (1, -1)


def _is_one_element(entry: InputHead, data: Buffer) -> bool:
    """Whether the shape is the length of the one element that the data holds."""
    length = len(data) - _LENGTH_BYTES
    return entry.shape == (length,) != (1,) and int.from_bytes(data[:_LENGTH_BYTES], "little") == length


class _ItemResponder:
    """Takes the batch dimension off an item's answer."""

    __slots__ = ("_is_item", "_is_typed", "_responder")

    def __init__(self, responder: Responder, is_item: bool, is_typed: bool) -> None:
        self._responder = responder
        self._is_item = is_item
        self._is_typed = is_typed

    def expect_many(self) -> None:
        self._responder.expect_many()

    def send(self, response: InferResponse, final: bool = True) -> None:
        if self._is_item:
            response.outputs = [_without_batch(tensor) for tensor in response.outputs]
        response.is_typed = self._is_typed
        self._responder.send(response, final)

    def end(self) -> None:
        self._responder.end()

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._responder.fail(error, final)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._responder.watch_cancellation(callback)


def _without_batch(tensor: Tensor) -> Tensor:
    if tensor.shape[:1] != (1,):
        return tensor
    return Tensor(tensor.name, tensor.datatype, tensor.shape[1:], tensor.data)
