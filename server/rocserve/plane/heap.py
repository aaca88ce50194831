"""A heap holds the tensors of one process: that process writes it, and others map it to read.

A tensor has a place in a heap (offset, bytes), which does not move, and which the heap's owner frees.

The sizes of slots are powers of two. Each size class has its own part of the file, as long as the heap's limit. The
offset therefore determines the size class, and slots of one size never use up the room of another. Parts are mapped at
their first use; untouched pages use no memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.steps import Steps
from rocserve.core.tensor_places import ALIGNMENT
from rocserve.core.tensors import Buffer
from rocserve.plane import anonymous_file
from rocserve.plane.anonymous_file import GIVEN_BACK_AT_ONCE, NOTHING_LEFT, Later, Remains

SMALLEST_SLOT = ALIGNMENT
"""Bytes."""

_FIRST_OF_PAGES = (mmap.PAGESIZE // SMALLEST_SLOT).bit_length() - 1
"""Index of the size class with slots of one page."""

COPIED_IN_PLACE = 64 << 10
"""Bytes up to which a copy takes less time than releasing the GIL for it."""

COPIED_AT_ONCE = 1 << 20
"""Bytes that the data plane copies in one step: up to 4 ms in fresh memory."""

MOST_KEPT_BYTES = 64 << 20
"""Bytes of slots that a reader may keep: far less than workers leave to be read (workers.worker_end)."""

_UNMAPPED = memoryview(b"")


def copy_bytes(view: memoryview, start: int, data: Buffer) -> None:
    """Copy a flat view of bytes to `view` at byte `start`."""
    nbytes = len(data)
    if nbytes <= COPIED_IN_PLACE:
        view[start : start + nbytes] = data
    else:
        # numpy releases the GIL while it copies.
        np.frombuffer(view, np.uint8, nbytes, start)[:] = np.frombuffer(data, np.uint8)


def copy_in_steps(view: memoryview, start: int, data: Buffer) -> Steps[None]:
    """Copy as `copy_bytes` does, in steps."""
    source = memoryview(data)
    for begin in range(0, len(source), COPIED_AT_ONCE):
        copy_bytes(view, start + begin, source[begin : begin + COPIED_AT_ONCE])
        yield


def fill(view: memoryview, pieces: Iterable[Buffer], at_once: int = sys.maxsize) -> list[tuple[int, Buffer]]:
    """Fill memory with consecutive buffers, except those that end after `at_once` bytes: returns these with offsets."""
    left_out: list[tuple[int, Buffer]] = []
    if len(view) <= COPIED_IN_PLACE:
        view[:] = b"".join(pieces)
        return left_out
    start = 0
    for piece in pieces:
        end = start + len(piece)
        if end <= at_once:
            copy_bytes(view, start, piece)
        else:
            left_out.append((start, piece))
        start = end
    return left_out


def copied(data: Sequence[Buffer]) -> Steps[list[Buffer]]:
    """Copy tensors to private memory, in steps. Raises ServeError (RESOURCE_EXHAUSTED) without memory for them."""
    copies: list[Buffer] = []
    for source in data:
        own = new_memory(len(source))
        yield from copy_in_steps(own, 0, source)
        copies.append(own)
    return copies


def new_memory(nbytes: int, what: str = "an answer") -> memoryview:
    """Return writable memory, not zeroed. Raises ServeError (RESOURCE_EXHAUSTED) if there is none for `what`."""
    try:
        view: memoryview = np.empty(nbytes, np.uint8).data
    except MemoryError:
        raise no_memory(nbytes, what) from None
    return view


def no_memory(nbytes: int, what: str = "an answer") -> ServeError:
    return ServeError(StatusCode.RESOURCE_EXHAUSTED, f"no memory for {what} of {nbytes} bytes")


class HeapFull(ServeError):
    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(
            StatusCode.RESOURCE_EXHAUSTED, f"no room for {nbytes} bytes of tensors in a heap of {limit} bytes"
        )


class _SizeClass:
    """The slots of one size: free ones with memory (last freed on top), free ones without, never used ones."""

    __slots__ = ("bare", "end", "fewest_free", "free", "next", "size")

    def __init__(self, size: int, start: int, end: int) -> None:
        self.size = size
        self.next = start
        self.end = end
        self.free: list[int] = []
        self.bare: list[int] = []
        self.fewest_free = 0
        """Minimum of len(free) since the last `trim`: so many slots at the bottom of `free` are unneeded."""


def _class_count(shift: int) -> int:
    return shift - SMALLEST_SLOT.bit_length() + 2


class Heap:
    """The owner's side of a heap. One thread allocates; any thread may free."""

    def __init__(self, name: str, limit: int, shares: int = 1, later: Later | None = None) -> None:
        """`limit`: bytes in slots of one size, rounded up to a power of two. `shares`: heaps in the file, of which this
        is the first (SharedHeap). `later`: runs the steps that release the memory after `close` and the last slot and
        view; None: it is released in one call."""
        self._own(create_file(name, limit, shares), 0, shares, later, True)

    @classmethod
    def of_file(cls, descriptor: int, share: int = 0, shares: int = 1, later: Later | None = None) -> Heap:
        """Create a heap in a file of another process (`create_file`). Takes over the descriptor. `later`: runs the
        steps that unmap the file; the other process releases its memory."""
        heap = cls.__new__(cls)
        heap._own(descriptor, share, shares, later, False)
        return heap

    def _own(self, descriptor: int, share: int, shares: int, later: Later | None, owns_file: bool) -> None:
        self._remains = Remains(later)
        self._owns_file = owns_file
        self._descriptor = descriptor
        self._shift = _shift_of(descriptor, shares)
        self.limit = 1 << self._shift
        """Bytes; also the size of the largest tensor."""
        self._mask = self.limit - 1
        count = _class_count(self._shift)
        self._first_part = first = share * count
        """Index, among the file's parts, of this heap's first."""
        self._classes = [
            _SizeClass(SMALLEST_SLOT << index, first + index << self._shift, first + index + 1 << self._shift)
            for index in range(count)
        ]
        self._parts = [_UNMAPPED] * count

    def allocate(self, nbytes: int) -> tuple[int, memoryview]:
        """Allocate a slot until `free`. Returns its offset and a writable view, not zeroed. Raises HeapFull."""
        index = (nbytes - 1 >> 6).bit_length() if nbytes > SMALLEST_SLOT else 0
        if index >= len(self._classes):
            raise HeapFull(nbytes, self.limit)
        slots = self._classes[index]
        free = slots.free
        if free:
            offset = free.pop()
            if len(free) < slots.fewest_free:
                slots.fewest_free = len(free)
        elif slots.bare:
            offset = slots.bare.pop()
        else:
            offset = slots.next
            if offset == slots.end:
                raise HeapFull(nbytes, self.limit)
            if self._parts[index] is _UNMAPPED:
                self._parts[index] = anonymous_file.map_file(
                    self._descriptor, True, self.limit, self._first_part + index << self._shift, self._remains.unmap
                )
            slots.next = offset + slots.size
        start = offset & self._mask
        return offset, self._parts[index][start : start + nbytes]

    def view(self, offset: int, nbytes: int) -> memoryview:
        start = offset & self._mask
        return self._parts[(offset >> self._shift) - self._first_part][start : start + nbytes]

    def place(self, nbytes: int) -> tuple[Slot, memoryview]:
        """Allocate a slot that is freed with its last reference. Raises HeapFull."""
        offset, view = self.allocate(nbytes)
        return Slot(self.free, offset, remains=self._remains), view

    def free(self, offset: int) -> None:
        """Free a slot that no process uses any longer."""
        self._classes[(offset >> self._shift) - self._first_part].free.append(offset)

    def trim(self) -> Steps[None]:
        """Give the memory of slots that were not needed since the last trim back to the system, a piece per step,
        except of slots smaller than a page. All steps must be taken."""
        given_back = 0
        for slots in self._classes[_FIRST_OF_PAGES:]:
            unneeded = slots.free[: slots.fewest_free]
            del slots.free[: slots.fewest_free]
            slots.fewest_free = len(slots.free)
            piece = min(slots.size, GIVEN_BACK_AT_ONCE)
            for offset in unneeded:
                for start in range(offset, offset + slots.size, piece):
                    if self._descriptor < 0:
                        return  # The heap has been closed, perhaps since the last step.
                    anonymous_file.give_back(self._descriptor, start, piece)
                    given_back += piece
                    if given_back >= GIVEN_BACK_AT_ONCE:
                        given_back = 0
                        yield
                slots.bare.append(offset)

    def open_for_reading(self) -> int:
        """Open a new read-only descriptor for another process; the caller owns it."""
        return anonymous_file.open_for_reading(self._descriptor)

    def close(self) -> None:
        """Release the file, if still open; the last reader and view release its memory. Slots can still be freed."""
        if self._descriptor >= 0:
            if self._owns_file:
                self._remains.keep(self._descriptor)
            else:
                os.close(self._descriptor)
        self._descriptor = -1
        # Slots and views keep Remains alive; this heap must not: it may wait long for the garbage collector.
        self._remains = NOTHING_LEFT
        self._parts = [_UNMAPPED] * len(self._classes)


class Slot:
    """A slot of a heap, freed when the object dies."""

    __slots__ = ("__weakref__", "_free", "_remains", "heap", "offset")

    def __init__(
        self,
        free: Callable[[int], None],
        offset: int,
        heap: HeapReader | None = None,
        remains: Remains | None = None,
    ) -> None:
        """`free` frees the offset. `heap`: the reader, if another process owns the heap. `remains` keeps the file."""
        self._free = free
        self._remains = remains
        self.offset = offset
        self.heap = heap

    def __del__(self) -> None:
        self._free(self.offset)


def call_all(callbacks: dict[object, Callable[[], None]]) -> None:
    """Call and remove each callback. A callback may remove itself or others."""
    while callbacks:
        callbacks.popitem()[1]()


def create_file(name: str, limit: int, shares: int = 1) -> int:
    """Create the file for a heap that another process will own, or for several."""
    return anonymous_file.create(name, shares * heap_bytes(limit))


def heap_bytes(limit: int) -> int:
    """Return how much of a file a heap takes."""
    shift = max(limit - 1, mmap.PAGESIZE).bit_length()
    return _class_count(shift) << shift


class HeapReader:
    """Reads a heap that another process owns."""

    def __init__(self, descriptor: int, shares: int = 1, later: Later | None = None) -> None:
        """Takes over a descriptor from `Heap.open_for_reading`. `later`: runs the steps that unmap the file after
        `close` and the last slot and view; None: it is unmapped in one call."""
        self.remains = Remains(later)
        """Slots and mappings of this reader keep it alive."""
        self._descriptor = descriptor
        self._shift = _shift_of(descriptor, shares)
        self._mask = (1 << self._shift) - 1
        self._count = shares * _class_count(self._shift)
        self.pages_from = _FIRST_OF_PAGES << self._shift
        """Offset, in a heap without shares, from which slots have a page or more."""
        self._parts: dict[int, memoryview] = {}
        self._kept: dict[weakref.ref[Slot], int] = {}
        """The bytes of each slot that `keep` was called for."""
        self._kept_bytes = 0
        self._forgotten: deque[int] = deque()
        """Bytes of kept slots that have died, to subtract from `_kept_bytes`."""
        self.on_closed: dict[object, Callable[[], None]] = {}
        """Callbacks for the reader's end, by arbitrary keys."""

    def keep(self, slot: Slot) -> bool:
        """Return whether a slot may be kept for an unlimited time; False if its owner might run out of room. Not for
        heaps with shares. Called on one thread; slots may die on any."""
        if weakref.ref(slot) in self._kept:
            return True
        while self._forgotten:
            self._kept_bytes -= self._forgotten.popleft()
        nbytes = SMALLEST_SLOT << (slot.offset >> self._shift)
        if self._kept_bytes + nbytes > MOST_KEPT_BYTES:
            return False
        self._kept[weakref.ref(slot, self._forget)] = nbytes
        self._kept_bytes += nbytes
        return True

    def _forget(self, slot: weakref.ref[Slot]) -> None:
        self._forgotten.append(self._kept.pop(slot))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a tensor's bytes at a place from a trusted owner."""
        start, index = offset & self._mask, offset >> self._shift
        return (self._parts.get(index) or self._part(index))[start : start + nbytes]

    def checked(self, offset: int, nbytes: int) -> memoryview:
        """Return a tensor's bytes at a place from an untrusted owner. Raises ValueError if they are not there."""
        start = offset & self._mask
        end = start + nbytes
        if offset < 0 or nbytes < 0 or end > self._mask + 1 or offset >> self._shift >= self._count:
            raise ValueError(f"a tensor of {nbytes} bytes at byte {offset} lies outside of its heap")
        # Larger tensors must have been written, because reading an untouched page would allocate it.
        if nbytes > 64 << 10 and os.lseek(self._descriptor, offset, os.SEEK_HOLE) < offset + nbytes:
            raise ValueError(f"a tensor of {nbytes} bytes at byte {offset} was not written to its end")
        index = offset >> self._shift
        return (self._parts.get(index) or self._part(index))[start:end]

    def offset_of(self, data: Buffer) -> int | None:
        """Return the offset of a view from this reader; None if the view is not in the heap."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        for index, part in self._parts.items():
            start = address - np.frombuffer(part, np.uint8).ctypes.data
            if 0 <= start <= self._mask:
                return (index << self._shift) + start
        return None

    def open_for_reading(self) -> int:
        """Open a new descriptor for another reader, which owns it. Raises OSError if this reader is closed."""
        return os.dup(self._descriptor)

    def close(self, is_last: bool = False) -> None:
        """Release the file, if still open; views stay valid. `is_last`: this process created the file and the heap's
        owner has ended, so the memory is released with the mappings."""
        if self._descriptor >= 0:
            if is_last:
                # Without a free descriptor the memory is released with the last mapping, in one call.
                with contextlib.suppress(OSError):
                    self.remains.keep(anonymous_file.open_for_writing(self._descriptor))
            os.close(self._descriptor)
        self._descriptor = -1
        self.remains = NOTHING_LEFT
        self._parts.clear()
        call_all(self.on_closed)

    def _part(self, index: int) -> memoryview:
        length = self._mask + 1
        part = anonymous_file.map_file(self._descriptor, False, length, index << self._shift, self.remains.unmap)
        # Another thread may have mapped the part meanwhile.
        return self._parts.setdefault(index, part)


def _shift_of(descriptor: int, shares: int) -> int:
    """Compute the length of a part (as a power of two) from the file's."""
    size = os.fstat(descriptor).st_size
    for shift in range(mmap.PAGESIZE.bit_length(), 62):
        if shares * _class_count(shift) << shift == size:
            return shift
    raise ValueError(f"a file of {size} bytes is not a heap")


SHARES = 64
"""One for the owner, one per front end (by default at most 32), the rest for dead ones whose tensors are still read."""


class SharedHeap(Heap):
    """A heap whose file has shares: ranges that other processes write as heaps, and that one reader reads through one
    descriptor. A share is lent until this process's last reference to its HeapShare. This object is the lender, and
    uses the first share. Used on one thread."""

    def __init__(self, name: str, limit: int, later: Later | None = None) -> None:
        """`limit`: as in Heap, for each share."""
        super().__init__(name, limit, SHARES, later)
        self._later = later
        self.reader: HeapReader
        """Set while any share is lent."""
        self._free_shares = [*range(SHARES - 1, 0, -1)]
        self._lent = 0
        self.on_closed: dict[object, Callable[[], None]] = {}
        """Callbacks for the heap's end, by arbitrary keys."""

    def lend(self) -> HeapShare | None:
        """Lend a share; None if none is left or the heap is closed."""
        if not self._free_shares or self._descriptor < 0:
            return None
        if not self._lent:
            self.reader = HeapReader(self.open_for_reading(), SHARES, self._later)
        self._lent += 1
        return HeapShare(self, self._free_shares.pop(), self._remains)

    def open_for_writing(self) -> int:
        """Open a new descriptor for the owner of a share; the caller owns it."""
        return os.dup(self._descriptor)

    def take_back(self, share: int) -> None:
        self._lent -= 1
        if self._descriptor >= 0:
            steps = self._clear(share, self._descriptor, self._remains)
            if self._later is None:
                deque(steps, 0)
            else:
                self._later(steps)
        if not self._lent:
            self.reader.close()

    def _clear(self, share: int, descriptor: int, remains: Remains) -> Steps[None]:
        """Give a share's memory back in steps, before it can be lent again. `remains` keeps the descriptor open."""
        nbytes = heap_bytes(self.limit)
        yield from anonymous_file.give_back_pieces(descriptor, share * nbytes, (share + 1) * nbytes, GIVEN_BACK_AT_ONCE)
        self._free_shares.append(share)

    def close(self) -> None:
        """Close as Heap does. Tensors in shares can be read until the shares are taken back."""
        super().close()
        call_all(self.on_closed)


class HeapShare:
    """A lent share, taken back when the object dies."""

    def __init__(self, heap: SharedHeap, number: int, remains: Remains) -> None:
        """`remains`: keeps the heap's file."""
        self.heap = heap
        self.number = number
        self._remains = remains

    def __del__(self) -> None:
        self.heap.take_back(self.number)
