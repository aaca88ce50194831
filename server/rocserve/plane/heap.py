"""Heap holds the tensors of one process: written by it alone, mapped read-only by those that it is given to.

A tensor is a place in a heap, (offset, bytes); it does not move, and lives until its owner frees it.

Slots have powers of two for sizes. Each size class has a part of the file to itself, as long as the whole heap may
become, so that an offset determines its size class and no mixture of sizes can use up the room of another. Parts are
mapped when they are first used; pages that nobody touches take no memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.steps import Steps
from rocserve.core.tensor_places import ALIGNMENT
from rocserve.core.tensors import Buffer
from rocserve.plane import anonymous_file
from rocserve.plane.remains import GIVEN_BACK_AT_ONCE, NOTHING_LEFT, Later, Remains

SMALLEST_SLOT = ALIGNMENT
"""Bytes."""

_FIRST_OF_PAGES = (mmap.PAGESIZE // SMALLEST_SLOT).bit_length() - 1
"""The size class of slots of a page."""

_CHECKED_FROM = 64 << 10
"""Bytes from which on a reader asks whether a tensor was written: a page that was not is made at its own expense."""

COPIED_IN_PLACE = 64 << 10
"""Bytes up to which a copy takes less time than letting go of the GIL for it."""

COPIED_AT_ONCE = 1 << 20
"""Bytes that the data plane copies in a step of what takes long: up to 4 ms where the memory is fresh."""

MOST_KEPT_BYTES = 64 << 20
"""Of a heap's slots that its reader may keep for long: far fewer than those that a worker leaves to be read before it
waits (workers.worker_end)."""

_UNMAPPED = memoryview(b"")


def copy_bytes(view: memoryview, start: int, data: Buffer) -> None:
    """Copy a flat view of bytes to memory, from its byte `start` on."""
    nbytes = len(data)
    if nbytes <= COPIED_IN_PLACE:
        view[start : start + nbytes] = data
    else:
        # numpy lets go of the GIL while it copies.
        np.frombuffer(view, np.uint8, nbytes, start)[:] = np.frombuffer(data, np.uint8)


def copy_in_steps(view: memoryview, start: int, data: Buffer) -> Steps[None]:
    """As `copy_bytes`, some bytes a step."""
    source = memoryview(data)
    for begin in range(0, len(source), COPIED_AT_ONCE):
        copy_bytes(view, start + begin, source[begin : begin + COPIED_AT_ONCE])
        yield


def fill(view: memoryview, pieces: Iterable[Buffer], at_once: int = sys.maxsize) -> list[tuple[int, Buffer]]:
    """Copy buffers, one behind the other, to memory that they fill. Returns: those that do not lie within the first
    `at_once` bytes, which are left out, and where they belong."""
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
    """Tensors on memory of their own, some bytes a step. Raises: ServeError: RESOURCE_EXHAUSTED, there is no memory for
    them."""
    copies: list[Buffer] = []
    for source in data:
        own = new_memory(len(source))
        yield from copy_in_steps(own, 0, source)
        copies.append(own)
    return copies


def new_memory(nbytes: int, what: str = "an answer") -> memoryview:
    """Memory of no heap, to write; its contents are not defined. Raises: ServeError: RESOURCE_EXHAUSTED, there is none
    for what is named."""
    try:
        view: memoryview = np.empty(nbytes, np.uint8).data
    except MemoryError:
        raise no_memory(nbytes, what) from None
    return view


def no_memory(nbytes: int, what: str = "an answer") -> ServeError:
    return ServeError(StatusCode.RESOURCE_EXHAUSTED, f"no memory for {what} of {nbytes} bytes")


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
        """Since the last round of `trim`: the number at the bottom of `free` that nobody has needed."""


def _class_count(shift: int) -> int:
    return shift - SMALLEST_SLOT.bit_length() + 2


class Heap:
    """The owner's side. One thread allocates; slots may be freed by any."""

    def __init__(self, name: str, limit: int, shares: int = 1, later: Later | None = None) -> None:
        """`limit`: bytes of slots of one size that can be taken at once; rounded up to a power of two. `shares`: so
        many heaps lie one behind the other in the file, of which this is the first (SharedHeap). `later`: takes the
        steps in which its memory goes when it is closed, and its slots and all views have gone; None: it goes at
        once."""
        self._own(create_file(name, limit, shares), 0, shares, later, True)

    @classmethod
    def of_file(cls, descriptor: int, share: int = 0, shares: int = 1, later: Later | None = None) -> Heap:
        """One on a file that another process has made for this one (`create_file`); takes the descriptor over.
        `later`: takes the steps in which its mappings go, as the file is not this one's."""
        heap = cls.__new__(cls)
        heap._own(descriptor, share, shares, later, False)
        return heap

    def _own(self, descriptor: int, share: int, shares: int, later: Later | None, has_made_file: bool) -> None:
        self._remains = Remains(later)
        self._has_made_file = has_made_file
        self._descriptor = descriptor
        self._shift = _shift_of(descriptor, shares)
        self.limit = 1 << self._shift
        """Bytes, also of the largest tensor."""
        self._mask = self.limit - 1
        count = _class_count(self._shift)
        self._first_part = first = share * count
        """Of the file's."""
        self._classes = [
            _SizeClass(SMALLEST_SLOT << index, first + index << self._shift, first + index + 1 << self._shift)
            for index in range(count)
        ]
        self._trimming: Iterator[int] | None = None
        self._parts = [_UNMAPPED] * count

    def allocate(self, nbytes: int) -> tuple[int, memoryview]:
        """The offset of memory that is the caller's until `free`, and a view to write it; its contents are not defined.
        Raises: HeapFull."""
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
                self._parts[index] = anonymous_file.map_to_write(
                    self._descriptor, self.limit, self._first_part + index << self._shift, self._remains.unmap
                )
            slots.next = offset + slots.size
        start = offset & self._mask
        return offset, self._parts[index][start : start + nbytes]

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Memory of a slot, to write."""
        start = offset & self._mask
        return self._parts[(offset >> self._shift) - self._first_part][start : start + nbytes]

    def place(self, nbytes: int) -> tuple[Slot, memoryview]:
        """A slot of `nbytes`, and its memory. Raises: HeapFull."""
        offset, view = self.allocate(nbytes)
        return Slot(self.free, offset, remains=self._remains), view

    def free(self, offset: int) -> None:
        """What `allocate` gave is no longer used, by any process that knew of it."""
        self._classes[(offset >> self._shift) - self._first_part].free.append(offset)

    def trim(self) -> bool:
        """Give the memory of slots that nobody has needed since the round before back to the system, a part a call.
        Slots smaller than a page keep theirs. Returns: whether the round goes on; else the next call begins one."""
        if self._trimming is None:
            self._trimming = self._trim_round()
        if next(self._trimming, None) is None:
            self._trimming = None
        return self._trimming is not None

    def _trim_round(self) -> Iterator[int]:
        given = 0
        # Of a file that has been let go of, nothing.
        for slots in self._classes[_FIRST_OF_PAGES:] if self._descriptor >= 0 else ():
            unneeded = slots.free[: slots.fewest_free]
            del slots.free[: slots.fewest_free]
            slots.fewest_free = len(slots.free)
            piece = min(slots.size, GIVEN_BACK_AT_ONCE)
            for offset in unneeded:
                for start in range(offset, offset + slots.size, piece):
                    anonymous_file.give_back(self._descriptor, start, piece)
                    given += piece
                    if given >= GIVEN_BACK_AT_ONCE:
                        yield given
                        given = 0
                slots.bare.append(offset)

    def open_for_reading(self) -> int:
        """A new descriptor for another process; it belongs to the caller. A writable mapping of it is refused."""
        return anonymous_file.open_for_reading(self._descriptor)

    def close(self) -> None:
        """Let go of the file; from then on slots are only freed. Its memory goes when the last reader, and the last
        view, has gone. May be called twice."""
        if self._descriptor >= 0:
            if self._has_made_file:
                self._remains.keep(self._descriptor)
            else:
                os.close(self._descriptor)
        self._descriptor = -1
        # They are held by slots and views from here on: not by this, which may wait for the garbage collector.
        self._remains = NOTHING_LEFT
        self._trimming = None
        self._parts = [_UNMAPPED] * len(self._classes)


class Slot:
    """A slot of a heap, which its owner gets back when nobody holds this any more."""

    __slots__ = ("__weakref__", "_free", "_remains", "heap", "offset")

    def __init__(
        self,
        free: Callable[[int], None],
        offset: int,
        heap: HeapReader | None = None,
        remains: Remains | None = None,
    ) -> None:
        """`free`: gives the place back. `heap`: what it is read by, where another process owns it. `remains`: of its
        file, which stays until then."""
        self._free = free
        self._remains = remains
        self.offset = offset
        self.heap = heap

    def __del__(self) -> None:
        self._free(self.offset)


def call_all(callbacks: dict[object, Callable[[], None]]) -> None:
    """Call each once. One may take itself, or another, out."""
    while callbacks:
        callbacks.popitem()[1]()


def create_file(name: str, limit: int, shares: int = 1) -> int:
    """A descriptor of the file of a heap that another process is to own, or of several."""
    return anonymous_file.create(name, shares * heap_bytes(limit))


def heap_bytes(limit: int) -> int:
    """What a heap takes of a file."""
    shift = max(limit - 1, mmap.PAGESIZE).bit_length()
    return _class_count(shift) << shift


class HeapReader:
    """Another process's side of a heap."""

    def __init__(self, descriptor: int, shares: int = 1, later: Later | None = None) -> None:
        """Takes over a descriptor that `Heap.open_for_reading` gave. `later`: takes the steps in which its mappings go
        when it is closed, and slots that are read by it and all views have gone; None: they go at once."""
        self.remains = Remains(later)
        """What slots that are read by it hold."""
        self._descriptor = descriptor
        self._shift = _shift_of(descriptor, shares)
        self._mask = (1 << self._shift) - 1
        self._count = shares * _class_count(self._shift)
        self.pages_from = _FIRST_OF_PAGES << self._shift
        """Of a heap without shares, where slots are that take a page or more."""
        self._parts: dict[int, memoryview] = {}
        self._kept: dict[weakref.ref[Slot], int] = {}
        """The bytes of slots that `keep` was called for."""
        self._kept_bytes = 0
        self._forgotten: deque[int] = deque()
        """Of these, the bytes of those that have gone since."""
        self.on_closed: dict[object, Callable[[], None]] = {}
        """Called when the file is let go of, under the keys of those who want to know."""

    def keep(self, slot: Slot) -> bool:
        """Whether a slot of this heap, which has no shares, may be held for as long as anything takes; False: its owner
        would lack the room. One thread, but slots may go on any."""
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
        """The bytes of a tensor whose place a trusted owner gave."""
        start, index = offset & self._mask, offset >> self._shift
        return (self._parts.get(index) or self._part(index))[start : start + nbytes]

    def checked(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a tensor whose place an untrusted owner gave. Raises: ValueError: they are not there."""
        start = offset & self._mask
        end = start + nbytes
        if offset < 0 or nbytes < 0 or end > self._mask + 1 or offset >> self._shift >= self._count:
            raise ValueError(f"a tensor of {nbytes} bytes at byte {offset} lies outside of its heap")
        if nbytes > _CHECKED_FROM and os.lseek(self._descriptor, offset, os.SEEK_HOLE) < offset + nbytes:
            raise ValueError(f"a tensor of {nbytes} bytes at byte {offset} was not written to its end")
        index = offset >> self._shift
        return (self._parts.get(index) or self._part(index))[start:end]

    def offset_of(self, data: Buffer) -> int | None:
        """Where a view that this has given lies; None: it is no such view."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        for index, part in self._parts.items():
            start = address - np.frombuffer(part, np.uint8).ctypes.data
            if 0 <= start <= self._mask:
                return (index << self._shift) + start
        return None

    def open_for_reading(self) -> int:
        """A new descriptor for another reader, to whom it belongs. Raises: OSError: the file has been let go of."""
        return os.dup(self._descriptor)

    def close(self, is_last: bool = False) -> None:
        """Let go of the file; views that are still held stay valid. May be called twice. `is_last`: its owner has
        ended, in a file that this process has made: its memory goes together with the mappings."""
        if self._descriptor >= 0:
            if is_last:
                # Where no descriptor is free its memory goes with the last mapping, at once.
                with contextlib.suppress(OSError):
                    self.remains.keep(anonymous_file.open_for_writing(self._descriptor))
            os.close(self._descriptor)
        self._descriptor = -1
        self.remains = NOTHING_LEFT
        self._parts.clear()
        call_all(self.on_closed)

    def _part(self, index: int) -> memoryview:
        length = self._mask + 1
        part = anonymous_file.map_to_read(self._descriptor, length, index << self._shift, self.remains.unmap)
        # Another thread may have been here.
        return self._parts.setdefault(index, part)


def _shift_of(descriptor: int, shares: int) -> int:
    """The length of its parts follows from the file's."""
    size = os.fstat(descriptor).st_size
    for shift in range(mmap.PAGESIZE.bit_length(), 62):
        if shares * _class_count(shift) << shift == size:
            return shift
    raise ValueError(f"a file of {size} bytes is no heap")


SHARES = 64
"""Of a file: its owner's, those of 32 front ends at most, and those of dead ones whose tensors are still read."""


class SharedHeap(Heap):
    """A heap of which other processes own shares: ranges of its file that they write, each its own. A reader of the
    file finds what all have put there, under one descriptor. A share is its owner's until nobody holds it any more,
    here, where it was lent. This is the lender's side; the first share is its own. One thread."""

    def __init__(self, name: str, limit: int, later: Later | None = None) -> None:
        """`limit`: see Heap, of each share."""
        super().__init__(name, limit, SHARES, later)
        self._later = later
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
            self.reader = HeapReader(self.open_for_reading(), SHARES, self._later)
        self._lent += 1
        return HeapShare(self, self._free_shares.pop(), self._remains)

    def open_for_writing(self) -> int:
        """A new descriptor for the owner of a share; it belongs to the caller."""
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
        """Give the memory of a share back, a piece a step; then it may be lent again. `remains`: keeps the descriptor,
        also when the heap is closed meanwhile."""
        nbytes = heap_bytes(self.limit)
        yield from anonymous_file.give_back_pieces(descriptor, share * nbytes, (share + 1) * nbytes, GIVEN_BACK_AT_ONCE)
        self._free_shares.append(share)

    def close(self) -> None:
        """See Heap. What lies in shares can be read until these are back."""
        super().close()
        call_all(self.on_closed)


class HeapShare:
    """A share that has been lent; it is taken back when nobody holds this any more."""

    def __init__(self, heap: SharedHeap, number: int, remains: Remains) -> None:
        """`remains`: of the heap's file."""
        self.heap = heap
        self.number = number
        self._remains = remains

    def __del__(self) -> None:
        self.heap.take_back(self.number)
