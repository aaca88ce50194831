"""The server's side of a batch's inputs: gathering the requests' bytes into shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.tensors import Buffer
from rocserve.workers.memory import Arena, aligned
from rocserve.workers.messages import BatchLayout, TensorHead
from rocserve.workers.plain import to_json
from rocserve.workers.wire import MAXIMUM_DATAGRAM, REMEMBERED, pack_tail

_JOINED_AT_ONCE = 64 * 1024
"""Bytes up to which joining parts first costs less than copying each on its own."""


@dataclass(slots=True)
class BatchInput:
    """One input of a batch."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    """Of the whole batch."""
    parts: Sequence[Buffer]
    """One a request, in order; together they are the rows of the first dimension. Views of bytes."""


class InputLayout:
    """How batches of one layout are written to shared memory; worked out once for all of them."""

    __slots__ = ("_body", "_end", "_heads", "_offsets", "_sizes", "_tail")

    def __init__(self, layout: BatchLayout) -> None:
        self._heads = layout.inputs
        self._body = to_json(layout)
        if len(self._body) > MAXIMUM_DATAGRAM // 2:
            raise internal(
                f"the layout of a batch takes {len(self._body)} bytes, at most {MAXIMUM_DATAGRAM // 2} can be"
            )
        self._tail: bytes | None = None
        if all(head.datatype is not DataType.BYTES for head in layout.inputs):
            self._sizes = [math.prod(head.shape) * head.datatype.itemsize for head in layout.inputs]
            self._offsets, self._end = _offsets(self._sizes)
            self._tail = self._pack(self._offsets, self._sizes)

    def write(self, arena: Arena, inputs: Sequence[BatchInput]) -> bytes:
        """Copy the inputs to the arena; the tail of the message that tells of them.

        Raises:
            ServeError: INTERNAL when an input's bytes are not as many as its shape says.
        """
        tail = self._tail
        if tail is None:
            return self._write_variable(arena, inputs)
        if self._end > arena.peak:
            arena.reserve(self._end)
        mapping = arena.mapping
        for entry, offset, nbytes in zip(inputs, self._offsets, self._sizes, strict=True):
            parts = entry.parts
            if nbytes <= _JOINED_AT_ONCE:
                try:
                    mapping[offset : offset + nbytes] = parts[0] if len(parts) == 1 else b"".join(parts)
                except IndexError:
                    raise _wrong_size(entry, nbytes) from None
            else:
                _copy_parts(arena, offset, nbytes, entry)
        return tail

    def _write_variable(self, arena: Arena, inputs: Sequence[BatchInput]) -> bytes:
        sizes = [sum(map(len, entry.parts)) for entry in inputs]
        for entry, head, nbytes in zip(inputs, self._heads, sizes, strict=True):
            if head.datatype is not DataType.BYTES:
                expected = math.prod(head.shape) * head.datatype.itemsize
                if nbytes != expected:
                    raise _wrong_size(entry, expected)
        offsets, end = _offsets(sizes)
        arena.reserve(end)
        for entry, offset, nbytes in zip(inputs, offsets, sizes, strict=True):
            _copy_parts(arena, offset, nbytes, entry)
        return self._pack(offsets, sizes)

    def _pack(self, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
        return pack_tail([number for pair in zip(offsets, sizes, strict=True) for number in pair], self._body)


class InputLayouts:
    """The layouts that a channel has seen. Bounded: when full it starts anew."""

    def __init__(self) -> None:
        self._layouts: dict[object, InputLayout] = {}

    def of(
        self, inputs: Sequence[BatchInput], requested_outputs: tuple[str, ...], request_sizes: tuple[int, ...]
    ) -> InputLayout:
        key = (requested_outputs, request_sizes, *[(entry.name, entry.datatype, entry.shape) for entry in inputs])
        layout = self._layouts.get(key)
        if layout is None:
            heads = tuple(TensorHead(entry.name, entry.datatype, entry.shape) for entry in inputs)
            layout = InputLayout(BatchLayout(heads, requested_outputs, request_sizes))
            if len(self._layouts) >= REMEMBERED:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin, one after the other, and the end of the last."""
    offsets: list[int] = []
    end = 0
    for nbytes in sizes:
        offsets.append(aligned(end))
        end = offsets[-1] + nbytes
    return offsets, end


def _copy_parts(arena: Arena, offset: int, nbytes: int, entry: BatchInput) -> None:
    end = offset + nbytes
    octets = arena.octets
    for part in entry.parts:
        if not len(part):
            continue
        following = offset + len(part)
        if following > end:
            raise _wrong_size(entry, nbytes)
        # numpy lets go of the GIL while it copies.
        octets[offset:following] = np.frombuffer(part, dtype=np.uint8)
        offset = following
    if offset != end:
        raise _wrong_size(entry, nbytes)


def _wrong_size(entry: BatchInput, expected: int) -> ServeError:
    size = sum(map(len, entry.parts))
    return internal(f"input '{entry.name}' of shape {list(entry.shape)} needs {expected} bytes, got {size}")
