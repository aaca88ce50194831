"""Shared heap is a heap of which other processes own shares: ranges of its file that they write, each its own.

A reader of the file finds what all of them have put there, under one descriptor. A share is its owner's until
nobody holds it any more, here, where it was lent: neither for its owner nor for a tensor in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rocserve.plane import anonymous_file
from rocserve.plane.heap import Heap, HeapReader, call_all, heap_bytes

SHARES = 64
"""Of a file: its owner's, those of 32 front ends at most, and those of dead ones whose tensors are still read."""


class SharedHeap(Heap):
    """The lender's side; the first share is its own. One thread."""

    def __init__(self, name: str, limit: int) -> None:
        """`limit`: see Heap, of each share."""
        super().__init__(name, limit, SHARES)
        self.reader: HeapReader
        """As long as any share is lent."""
        self._free_shares = [*range(SHARES - 1, 0, -1)]
        self._lent = 0
        self.on_closed: dict[object, Callable[[], None]] = {}
        """Called when nothing is to be put there any more, under the keys of those who want to know."""

    def lend(self) -> HeapShare | None:
        """None: there is no share left, or the heap is closed."""
        if not self._free_shares or self._descriptor < 0:
            return None
        if not self._lent:
            self.reader = HeapReader(self.open_for_reading(), SHARES)
        self._lent += 1
        return HeapShare(self, self._free_shares.pop())

    def open_for_writing(self) -> int:
        """A new descriptor for the owner of a share; it belongs to the caller."""
        return os.dup(self._descriptor)

    def take_back(self, share: int) -> None:
        self._lent -= 1
        if self._descriptor >= 0:
            nbytes = heap_bytes(self.limit)
            anonymous_file.give_back(self._descriptor, share * nbytes, nbytes)
            self._free_shares.append(share)
        if not self._lent:
            self.reader.close()

    def close(self) -> None:
        """See Heap. What lies in shares can be read until these are back."""
        super().close()
        call_all(self.on_closed)


class HeapShare:
    """A share that has been lent; it is taken back when nobody holds this any more."""

    def __init__(self, heap: SharedHeap, number: int) -> None:
        self.heap = heap
        self.number = number

    def __del__(self) -> None:
        self.heap.take_back(self.number)
