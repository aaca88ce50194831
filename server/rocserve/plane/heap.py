"""Heap holds the tensors of one process: written by it alone, mapped read-only by those that it is given to.

A tensor is a place in a heap, (offset, bytes); it does not move, and lives until its owner frees it.

Slots have powers of two for sizes. Each size class has a part of the file to itself, as long as the whole heap may
become, so that an offset tells its size class and no mixture of sizes can use up the room of another. Parts that nobody
touches take no memory, and no more of a slot does than was written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from rocserve.core.errors import ServeError, StatusCode
from rocserve.plane import anonymous_file

SMALLEST_SLOT = 64
"""Bytes; tensors begin at multiples of it, for the engines' vector instructions."""

TRIMMED_AT_ONCE = 64 << 20
"""Bytes that one call of `trim` gives back: some 12 ms, in which its process does nothing else."""

_CHECKED_FROM = 64 << 10
"""Bytes from which on a reader asks whether a tensor was written: a page that was not is made at its own expense."""


class HeapFull(ServeError):
    """A tensor does not fit any more."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(
            StatusCode.RESOURCE_EXHAUSTED, f"no room for {nbytes} bytes of tensors in a heap of {limit} bytes"
        )


class _SizeClass:
    """Slots of one size: free ones with memory, the last freed on top, free ones without, and where new ones begin."""

    __slots__ = ("bare", "end", "fewest_free", "free", "next", "size")

    def __init__(self, size: int, start: int, end: int) -> None:
        self.size = size
        self.next = start
        self.end = end
        self.free: list[int] = []
        self.bare: list[int] = []
        self.fewest_free = 0
        """Since the last round of `trim`: so many at the bottom of `free` nobody has needed."""


class Heap:
    """The owner's side. Not thread-safe: a process of the data plane has one thread."""

    def __init__(self, name: str, limit: int) -> None:
        """`limit`: bytes of slots of one size that can be taken at once; rounded up to a power of two."""
        self._shift = max(limit - 1, mmap.PAGESIZE).bit_length()
        self.limit = 1 << self._shift
        """Bytes, also of the largest tensor."""
        count = self._shift - SMALLEST_SLOT.bit_length() + 2
        self._classes = [
            _SizeClass(SMALLEST_SLOT << index, index << self._shift, index + 1 << self._shift) for index in range(count)
        ]
        self._first_of_pages = (mmap.PAGESIZE // SMALLEST_SLOT).bit_length() - 1
        self._descriptor = anonymous_file.create(name, count << self._shift)
        self._trimming: Iterator[int] | None = None
        self._mapping = anonymous_file.map_to_write(self._descriptor)
        self.view = memoryview(self._mapping)
        """All of it, to write; index with offsets."""

    def allocate(self, nbytes: int) -> int:
        """The offset of memory that is the caller's until `free`; what is in it is not said. Raises: HeapFull."""
        index = (nbytes - 1 >> 6).bit_length() if nbytes > SMALLEST_SLOT else 0
        if index >= len(self._classes):
            raise HeapFull(nbytes, self.limit)
        slots = self._classes[index]
        free = slots.free
        if free:
            offset = free.pop()
            if len(free) < slots.fewest_free:
                slots.fewest_free = len(free)
            return offset
        if slots.bare:
            return slots.bare.pop()
        offset = slots.next
        if offset == slots.end:
            raise HeapFull(nbytes, self.limit)
        slots.next = offset + slots.size
        return offset

    def free(self, offset: int) -> None:
        """What `allocate` gave is no longer used, by nobody who was told of it."""
        self._classes[offset >> self._shift].free.append(offset)

    def trim(self) -> bool:
        """Give the memory of slots that nobody has needed since the round before back to the system, a part a call.

        Slots smaller than a page keep theirs. Returns: whether the round goes on; else the next call begins one.
        """
        if self._trimming is None:
            self._trimming = self._trim_round()
        if next(self._trimming, None) is None:
            self._trimming = None
        return self._trimming is not None

    def _trim_round(self) -> Iterator[int]:
        given = 0
        for slots in self._classes[self._first_of_pages :]:
            unneeded = slots.free[: slots.fewest_free]
            del slots.free[: slots.fewest_free]
            slots.fewest_free = len(slots.free)
            piece = min(slots.size, TRIMMED_AT_ONCE)
            for offset in unneeded:
                for start in range(offset, offset + slots.size, piece):
                    self._mapping.madvise(mmap.MADV_REMOVE, start, piece)
                    given += piece
                    if given >= TRIMMED_AT_ONCE:
                        yield given
                        given = 0
                slots.bare.append(offset)

    def open_for_reading(self) -> int:
        """A new descriptor for another process; it belongs to the caller. A writable mapping of it is refused."""
        return anonymous_file.open_for_reading(self._descriptor)

    def close(self) -> None:
        """Let go of the file. Its memory goes when the last reader, and the last view, has gone."""
        os.close(self._descriptor)
        del self._mapping, self.view


class HeapReader:
    """Another process's side of a heap; maps all of it at once."""

    def __init__(self, descriptor: int) -> None:
        """Takes over a descriptor that `Heap.open_for_reading` gave."""
        self._descriptor = descriptor
        self.view = memoryview(anonymous_file.map_to_read(descriptor))
        """All of it; index with offsets that a trusted owner gives."""

    def checked(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a tensor whose place an owner gave who may lie. Raises: ValueError: they are not there."""
        end = offset + nbytes
        if offset < 0 or nbytes < 0 or end > len(self.view):
            raise ValueError(f"a tensor from byte {offset} to {end} lies outside a heap of {len(self.view)} bytes")
        if nbytes > _CHECKED_FROM and os.lseek(self._descriptor, offset, os.SEEK_HOLE) < end:
            raise ValueError(f"a tensor from byte {offset} to {end} was not written to its end")
        return self.view[offset:end]

    def close(self) -> None:
        """Let go of the file; views that are still held stay valid."""
        os.close(self._descriptor)
        del self.view
