"""The server's side of a batch's inputs: gathering the requests' bytes into shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.plain import to_json
from rocserve.core.tensors import Buffer
from rocserve.workers.memory import Arena, aligned
from rocserve.workers.messages import BatchLayout, TensorHead
from rocserve.workers.wire import MAXIMUM_DATAGRAM, pack_tail

_JOINED_AT_ONCE = 64 * 1024
"""Bytes up to which joining parts first costs less than copying each on its own."""


class InputLayout:
    """How batches of one layout are written to shared memory; worked out once for all of them, on any channel."""

    __slots__ = ("_body", "_end", "_offsets", "_sizes", "_tail", "cuts", "heads", "one_by_one", "request_sizes")

    def __init__(self, layout: BatchLayout) -> None:
        """Raises: ServeError: INTERNAL, the layout takes more than a message can hold."""
        self.request_sizes = layout.request_sizes
        self.one_by_one = layout.one_by_one
        self.cuts = layout.ragged.outputs if layout.ragged is not None and layout.ragged.outputs else None
        """The shape of each request's part of the outputs that are not cut by rows; None where all are."""
        self.heads = layout.inputs
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

    def write(self, arena: Arena, requests: Sequence[Sequence[Buffer]]) -> bytes:
        """Copy the inputs to the arena; the tail of the message that tells of them.

        Args:
            requests: for each request its part of each input, in the layout's order. Views of bytes.

        Raises:
            ServeError: INTERNAL when an input's bytes are not as many as its shape says.
        """
        tail = self._tail
        if tail is None:
            return self._write_variable(arena, requests)
        if self._end > arena.peak:
            arena.reserve(self._end)
        mapping = arena.mapping
        alone = requests[0] if len(requests) == 1 else None
        for index, nbytes in enumerate(self._sizes):
            offset = self._offsets[index]
            if nbytes > _JOINED_AT_ONCE:
                _copy_parts(arena, offset, nbytes, self.heads[index], _column(requests, index))
                continue
            data = alone[index] if alone is not None else b"".join(_column(requests, index))
            try:
                mapping[offset : offset + nbytes] = data
            except IndexError:
                raise _wrong_size(self.heads[index], nbytes, len(data)) from None
        return tail

    def _write_variable(self, arena: Arena, requests: Sequence[Sequence[Buffer]]) -> bytes:
        columns = [_column(requests, index) for index in range(len(self.heads))]
        sizes = [sum(map(len, column)) for column in columns]
        for head, nbytes in zip(self.heads, sizes, strict=True):
            if head.datatype is not DataType.BYTES:
                expected = math.prod(head.shape) * head.datatype.itemsize
                if nbytes != expected:
                    raise _wrong_size(head, expected, nbytes)
        offsets, end = _offsets(sizes)
        arena.reserve(end)
        for head, column, offset, nbytes in zip(self.heads, columns, offsets, sizes, strict=True):
            if nbytes > _JOINED_AT_ONCE:
                _copy_parts(arena, offset, nbytes, head, column)
            else:
                arena.mapping[offset : offset + nbytes] = b"".join(column)
        return self._pack(offsets, sizes)

    def _pack(self, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
        return pack_tail([number for pair in zip(offsets, sizes, strict=True) for number in pair], self._body)


def _column(requests: Sequence[Sequence[Buffer]], index: int) -> list[Buffer]:
    return [request[index] for request in requests]


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin, one after the other, and the end of the last."""
    offsets: list[int] = []
    end = 0
    for nbytes in sizes:
        offsets.append(aligned(end))
        end = offsets[-1] + nbytes
    return offsets, end


def _copy_parts(arena: Arena, offset: int, nbytes: int, head: TensorHead, parts: Sequence[Buffer]) -> None:
    end = offset + nbytes
    for part in parts:
        if offset + len(part) > end:
            raise _wrong_size(head, nbytes, sum(map(len, parts)))
        arena.write(offset, part)
        offset += len(part)
    if offset != end:
        raise _wrong_size(head, nbytes, sum(map(len, parts)))


def _wrong_size(head: TensorHead, expected: int, size: int) -> ServeError:
    return internal(f"input '{head.name}' of shape {list(head.shape)} needs {expected} bytes, got {size}")
