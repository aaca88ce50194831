"""What both ends of a front's link do: lay out tensors and texts, post entries, also when a ring is full, and give back
what has been read."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from struct import Struct

from rocserve.core.tensor_places import lay_out, padded
from rocserve.core.tensors import Buffer
from rocserve.frontends.processes.entries import ANSWERS, AWAITED_OUTPUTS, HEAP_SHIFT, HELD_OUTPUTS, RETURNS
from rocserve.plane.heap import COPIED_AT_ONCE, Heap, copy_in_steps, fill
from rocserve.plane.link import ENTRY_BYTES, LinkEnd
from rocserve.plane.loop import PlaneLoop
from rocserve.plane.trimming import HeapTrimmer
from rocserve.workers.entries import ENTRY, return_entries, returned_places

_RETRY_SECONDS = 0.001
"""After a ring was full."""
_REMEMBERED_TABLES = 1024
"""Clients send the same sizes again and again."""
_PAGE_BYTES = 64 << 10
LARGEST_SHARED = _PAGE_BYTES // 8
"""Bytes up to which something shares a page: copying it costs less than a slot of its own."""
_RETURNED_AT_ONCE = 24
"""Places that may wait to be returned while there is more to post: a message of their own costs as much as they do."""
_NO_PAGE = memoryview(bytearray())
"""An answer without outputs fits into it."""


class FrontLinkEnd:
    """One end's posting. On the plane's thread."""

    def __init__(self, link: LinkEnd, heap: Heap, plane: PlaneLoop) -> None:
        """`heap`: its own."""
        self._messages, self._returns = link.writers[ANSWERS], link.writers[RETURNS]
        self.returned = link.readers[RETURNS]
        """Places that `take_returns` takes."""
        self.heaps = {0: heap}
        """By number: its own, and the shares that it has of others."""
        self._plane = plane
        self._posts: deque[bytes] = deque()
        self.to_return: list[int] = []
        """Places to return to the other end, with what is posted next, or by `flush`."""
        self.give_back: Callable[[int], None] = self.to_return.append
        """Takes a place in the other's heap that nobody reads any more. From any thread."""
        self._trimmer = HeapTrimmer(plane)
        self._slots: dict[int, object] = {}
        """By place: what the other end may still read."""
        self._held_numbers = itertools.count()
        self._of_turn: list[int] = []
        """Of these, what it need not keep for longer than it handles the entries of this turn."""
        self._page, self._page_place, self._page_used = _NO_PAGE, 0, 0
        self.ring: Callable[[], None] = lambda: None
        """Where the other end cannot be rung yet it looks by itself before it first sleeps."""
        self._is_open = True

    def post(self, entry: bytes) -> None:
        """At the end of this turn, behind all that was posted before."""
        if not self._is_open:
            return
        if not self._posts:
            self._plane.at_end_of_turn(self.flush)
        self._posts.append(entry)

    def post_contents(self, kind: int, number: int, contents: Sequence[Buffer], count: int = 0) -> None:
        """Post an entry with contents, which the other end gives back. Raises: HeapFull."""
        pieces, nbytes = framed(contents)
        place, view = self.new_slot(nbytes)
        left_out = fill(view, pieces, COPIED_AT_ONCE)
        self.post_written(ENTRY.pack(kind, 0, count, number, place, nbytes, len(contents)), view, left_out, contents)

    def post_written(
        self, entry: bytes, view: memoryview, left_out: Sequence[tuple[int, Buffer]], source: object
    ) -> None:
        """Post an entry when all of it lies in its slot; others may go before. `source`: keeps what is copied."""

        def steps(source: object) -> Generator[None, None, None]:
            for begin, part in left_out:
                yield from copy_in_steps(view, begin, part)
            self.post(entry)

        self._plane.work_off(steps(source))

    def end_heap(self, number: int) -> None:
        """Put nothing more there; its memory goes when all places in it have been returned."""
        heap = self.heaps.pop(number)
        self._trimmer.forget(heap)
        heap.close()

    def place(self, pieces: Iterable[Buffer], nbytes: int, heap_number: int = 0) -> int:
        """As `new_slot`, with these in it."""
        place, view = self.new_slot(nbytes, heap_number)
        fill(view, pieces)
        return place

    def hold(self, slot: object, nbytes: int) -> int:
        """Keep what the other end may still read, and which lies elsewhere, until it has returned what this gives."""
        number = next(self._held_numbers) | (AWAITED_OUTPUTS if nbytes > LARGEST_SHARED else HELD_OUTPUTS)
        self._slots[number] = slot
        return number

    def place_in_turn(self, pieces: Iterable[Buffer], nbytes: int) -> int:
        """As `place`, of what the other end reads while it handles this turn's entries: small ones share a slot."""
        if nbytes > LARGEST_SHARED:
            place = self.place(pieces, nbytes)
            self._of_turn.append(place)
            return place
        if self._page_used + nbytes > len(self._page):
            self._page_place, self._page = self.new_slot(_PAGE_BYTES)
            self._page_used = 0
            self._of_turn.append(self._page_place)
        begin = self._page_used
        self._page_used = end = begin + nbytes
        fill(self._page[begin:end], pieces)
        return self._page_place + begin

    def new_slot(self, nbytes: int, heap_number: int = 0) -> tuple[int, memoryview]:
        """The place of `nbytes` bytes, which is kept until the other end has returned it, and its memory. Raises:
        HeapFull."""
        heap = self.heaps[heap_number]
        slot, view = heap.place(nbytes)
        place = slot.offset | heap_number << HEAP_SHIFT
        self._slots[place] = slot
        self._trimmer.trim_later(heap, self.take_returns)
        return place, view

    def flush(self) -> None:
        posts, messages = self._posts, self._messages
        if self._of_turn:
            # The other end gives them back when it has come to here.
            entries = return_entries(self._of_turn)
            posts += [entries[start : start + ENTRY_BYTES] for start in range(0, len(entries), ENTRY_BYTES)]
            self._of_turn.clear()
            self._page, self._page_used = _NO_PAGE, 0
        count = min(len(posts), messages.room)
        if count:
            messages.post(b"".join([posts.popleft() for _ in range(count)]))
        to_return = self.to_return
        # Other places that come back are nothing to be woken for; a model may wait for these.
        is_awaited = bool(to_return) and max(to_return) >= AWAITED_OUTPUTS
        if to_return and (not count or is_awaited or len(to_return) >= _RETURNED_AT_ONCE):
            returns = min(self._returns.room, -(-len(to_return) // 3))
            self._returns.post(return_entries(to_return[: 3 * returns]))
            del to_return[: 3 * returns]
        if count or is_awaited:
            self.ring()
        if posts:
            self._plane.call_at(time.monotonic() + _RETRY_SECONDS, self.flush)

    def drop(self) -> None:
        """Nobody takes it any more."""
        self._is_open = False
        self._posts.clear()
        self._of_turn.clear()
        self._slots.clear()
        for heap in self.heaps.values():
            self._trimmer.forget(heap)

    def take_returns(self) -> None:
        slots = self._slots
        for place in returned_places(self.returned.take()):
            slots.pop(place, None)


@lru_cache(256)
def numbers(count: int) -> Struct:
    """The form of `count` numbers (u64 each)."""
    return Struct(f"<{count}Q")


def framed(contents: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """What lies at a place of these, and how many bytes that is: their sizes (u64 each), and they behind them."""
    pieces = padded([numbers(len(contents)).pack(*map(len, contents)), *contents])
    return pieces, sum(map(len, pieces))


def read(view: memoryview, count: int) -> list[Buffer]:
    """The contents of a place, `count` of them."""
    return [view[begin:end] for begin, end in _bounds(bytes(view[: 8 * count]))]


@lru_cache(_REMEMBERED_TABLES)
def _bounds(table: bytes) -> list[tuple[int, int]]:
    """Where each of the contents behind such a table begins and ends."""
    sizes = numbers(len(table) // 8).unpack(table)
    offsets, _ = lay_out(sizes, len(table))
    return [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
