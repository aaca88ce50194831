"""Computes where tensors with known heads lie in a slot: one after the other, each at a multiple of 64 bytes."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.tensors import Buffer, TensorHead

ALIGNMENT = 64
"""Bytes. Tensors begin at multiples of it, for the engines' vector instructions."""

_GAPS = tuple(map(bytes, range(ALIGNMENT)))
"""Size of a gap -> zero bytes that fill it."""

Bounds = list[tuple[int, int]]
"""The start and the end of each tensor."""


def aligned(offset: int) -> int:
    """Return the first multiple of 64 from `offset` on, where the next tensor of a slot may begin."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def lay_out(sizes: Iterable[int], end: int) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes, the first at or after `end`, and the end of the last."""
    offsets: list[int] = []
    for size in sizes:
        begin = (end + ALIGNMENT - 1) & -ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


def padded(parts: Iterable[Buffer]) -> list[Buffer]:
    """Return buffers with padding after each, so that the next begins at a multiple of 64."""
    pieces: list[Buffer] = []
    for part in parts:
        pieces.append(part)
        gap = -len(part) & ALIGNMENT - 1
        if gap:
            pieces.append(_GAPS[gap])
    return pieces


class TensorPlaces:
    """The places of tensors. Data after them begin at a multiple of 64 too. If a size does not follow from its shape,
    as with BYTES, a table of all sizes (u64 each) precedes the tensors."""

    __slots__ = ("_is_dense", "_sizes_struct", "bounds", "end", "heads", "sizes")

    def __init__(self, heads: Sequence[TensorHead]) -> None:
        self.heads = tuple(heads)
        self._sizes_struct = struct.Struct(f"<{len(heads)}Q")
        self.sizes: list[int] | None = None
        """None: the sizes differ between requests, and so do bounds and end."""
        self.bounds: Bounds = []
        self.end = 0
        if all(head.datatype is not DataType.BYTES for head in heads):
            self.sizes = [math.prod(head.shape) * head.datatype.itemsize for head in heads]
            self.bounds, self.end = _bounds(self.sizes, 0)
            self._is_dense = sum(self.sizes) == self.end

    def packed(self, data: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Return the buffers that fill the first `end` bytes of a slot; None if their sizes do not fit the heads."""
        if type(data) is PackedTensors or type(data) is PlacedTensors:
            return (data.block,) if data.sizes == self.sizes else None
        if [*map(len, data)] != self.sizes:
            return None
        return data if self._is_dense else padded(data)

    def pieces(self, data: Sequence[Buffer], what: str = "input") -> tuple[Sequence[Buffer], int]:
        """Return a slot's buffers and their bytes. Raises ServeError (INTERNAL), naming a `what`, if bytes do not fit a
        shape."""
        packed = self.packed(data)
        if packed is not None:
            return packed, self.end
        sizes = [*map(len, data)]
        for head, size in zip(self.heads, sizes, strict=True):
            expected = math.prod(head.shape) * head.datatype.itemsize
            if head.datatype is not DataType.BYTES and size != expected:
                raise internal(f"{what} '{head.name}' of shape {list(head.shape)} needs {expected} bytes, got {size}")
        return self.sized(data)

    def sized(self, data: Sequence[Buffer]) -> tuple[Sequence[Buffer], int]:
        """Return a slot's buffers and their bytes, with a table of sizes, which need not be those of the heads."""
        pieces = padded([self._sizes_struct.pack(*map(len, data)), *data])
        return pieces, sum(map(len, pieces))

    def of(self, table: memoryview) -> tuple[Bounds, int]:
        """Return where the tensors lie, and where data after them may begin. `table`: the beginning of their slot."""
        if self.sizes is not None:
            return self.bounds, self.end
        return self.of_sized(table)

    def of_sized(self, table: memoryview) -> tuple[Bounds, int]:
        """Return the same for a slot that `sized` has described."""
        return _bounds_after(bytes(table[: self._sizes_struct.size]))

    def views(self, slot: memoryview) -> list[Buffer]:
        """Return the tensors of a slot that `sized` has described."""
        return [slot[begin:end] for begin, end in self.of_sized(slot)[0]]

    @property
    def table_bytes(self) -> int:
        return 0 if self.sizes is not None else self._sizes_struct.size


class PackedTensors(Sequence[Buffer]):
    """Tensors in a slot. A view of a single tensor is created on demand."""

    __slots__ = ("_bounds", "block", "sizes")

    def __init__(self, block: memoryview, places: TensorPlaces) -> None:
        """Raises ValueError if the block's length is wrong, or the tensors need a table of sizes."""
        if places.sizes is None or len(block) != places.end:
            raise _not_packed(len(block))
        self.block = block
        self.sizes = places.sizes
        self._bounds = places.bounds

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Buffer]:
        block = self.block
        return iter([block[begin:end] for begin, end in self._bounds])

    @overload
    def __getitem__(self, index: int) -> Buffer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Buffer]: ...

    def __getitem__(self, index: int | slice) -> Buffer | Sequence[Buffer]:
        return list(self)[index]


class PlacedTensors(PackedTensors):
    """Tensors of a request in a heap that other processes map too, at `offset`."""

    __slots__ = ("_block", "_kept", "_nbytes", "_view", "heap", "offset")

    def __init__(
        self,
        view: Callable[[int, int], memoryview],
        nbytes: int,
        places: TensorPlaces,
        heap: object,
        offset: int,
        kept: object,
    ) -> None:
        """`view` returns memory by offset and length. `heap` is compared by identity. While `kept` lives, the memory is
        not reused. Raises ValueError if `nbytes` is wrong, or the tensors need a table of sizes."""
        # Written out instead of calling super(), because one is created for every request of a front end process,
        # where only the workers look at the memory.
        if places.sizes is None or nbytes != places.end:
            raise _not_packed(nbytes)
        self._block: memoryview | None = None
        self._view = view
        self._nbytes = nbytes
        self.sizes = places.sizes
        self._bounds = places.bounds
        self.heap = heap
        self.offset = offset
        self._kept = kept

    @property
    def block(self) -> memoryview:  # type: ignore[override]
        if self._block is None:
            self._block = self._view(self.offset, self._nbytes)
        return self._block


class ScatteredTensors(list[Buffer]):
    """Tensors of a request, at least one of which lies in a heap that other processes map too."""

    __slots__ = ("elsewhere", "kept")

    def __init__(self, data: Iterable[Buffer], elsewhere: Mapping[int, tuple[object, int]], kept: object) -> None:
        """`elsewhere`: a tensor's index -> its heap, compared by identity, and its offset there. While `kept` lives,
        the memory is not reused."""
        super().__init__(data)
        self.elsewhere = elsewhere
        self.kept = kept


def _not_packed(nbytes: int) -> ValueError:
    return ValueError(f"tensors in {nbytes} bytes, which do not fit their heads")


def _bounds(sizes: Sequence[int], start: int) -> tuple[Bounds, int]:
    offsets, end = lay_out(sizes, start)
    return [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)], aligned(end)


# Clients often send the same sizes.
@functools.lru_cache(1024)
def _bounds_after(table: bytes) -> tuple[Bounds, int]:
    return _bounds(struct.unpack(f"<{len(table) // 8}Q", table), len(table))
