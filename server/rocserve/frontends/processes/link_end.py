"""Posts the messages of one end of a front end's link, lays out tensors and texts in its heap, and returns places that
have been read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct

from rocserve.core.steps import Steps
from rocserve.core.tensors import Buffer
from rocserve.links.entries import ENTRY, HEAP_SHIFT, TEXT, post_returns, return_entries, returned_places
from rocserve.links.opening import FRONT_RETURNS, MESSAGES
from rocserve.links.outbox import Outbox
from rocserve.links.rings import ENTRY_BYTES, LinkEnd
from rocserve.links.texts import SentTexts, Text
from rocserve.plane.heap import Heap, copy_in_steps, fill
from rocserve.plane.loop import PlaneLoop
from rocserve.plane.trimming import Trimmer

MOST_HEAPS = (1 << 64 - HEAP_SHIFT) - 2
HELD_OUTPUTS, AWAITED_OUTPUTS = (number << HEAP_SHIFT for number in (MOST_HEAPS, MOST_HEAPS + 1))
"""These replace a heap's number in the numbers that `hold` returns for outputs in other heaps. AWAITED_OUTPUTS are
large: a model may wait for their memory."""

_PAGE_BYTES = 64 << 10
LARGEST_SHARED = _PAGE_BYTES // 8
"""Bytes up to which contents share a page, because a copy costs less than a separate slot."""
_NO_PAGE = memoryview(bytearray())
"""Only an answer without outputs fits into it."""


class FrontLinkEnd(Outbox):
    """Posts entries for one end of a link, the front end's or the server's. On the plane's thread."""

    def __init__(self, link: LinkEnd, heap: Heap, plane: PlaneLoop, ring: Callable[[], None] = lambda: None) -> None:
        """`heap`: the heap of this end. `ring`: wakes the other end. While its doorbell is unknown, that end polls by
        itself before it first sleeps."""
        messages = link.writers[MESSAGES]
        super().__init__(plane, lambda: messages.room, messages.post, ring)
        self._returns = link.writers[FRONT_RETURNS]
        self.returned = link.readers[FRONT_RETURNS]
        self.heaps = {0: heap}
        """Number -> heap. 0 is this end's own heap; the others are its shares of other heaps."""
        self.to_return: list[int] = []
        """Places to return to the other end, with the next message or by `flush`."""
        self.give_back: Callable[[int], None] = self.to_return.append
        """Takes a place in the other end's heap that is no longer read. Safe on any thread; a thread other than the
        plane's must wake the plane after the call, because it may be asleep."""
        self.trimmer = Trimmer(plane)
        self._slots: dict[int, object] = {}
        """Place -> slot that the other end may still read."""
        self._held_numbers = itertools.count()
        self._turn_places: list[int] = []
        """The places among `_slots` that the other end reads only while it handles the entries of this turn."""
        self._page, self._page_place, self._page_used = _NO_PAGE, 0, 0

    def post_entry(
        self,
        kind: int,
        number: int = 0,
        *,
        flags: int = 0,
        count: int = 0,
        text: int = 0,
        place: int = 0,
        nbytes: int = 0,
    ) -> None:
        self.post(ENTRY.pack(kind, flags, count, text, number, place, nbytes))

    def post_text(
        self, kind: int, content: Buffer, number: int = 0, count: int = 0, text: int = 0, flags: int = 0
    ) -> None:
        """Post an entry with a content that the other end reads while it handles this turn. Raises HeapFull."""
        place, nbytes = self.place_in_turn((content,), len(content)), len(content)
        self.post(ENTRY.pack(kind, flags, count, text, number, place, nbytes))

    def send_text(self, texts: SentTexts, text: Text, content: bytes, remembers: bool) -> None:
        """Post a text for the entry that follows. Raises HeapFull. `remembers`: False = it gets no number."""
        place = self.place_in_turn((content,), len(content))
        number = texts.keep(text, texts.take_number()) if remembers else 0
        self.post(ENTRY.pack(TEXT, 0, 0, number, text.index, place, len(content)))

    def copy_then(
        self, post: Callable[[], None], view: memoryview, left_out: Sequence[tuple[int, Buffer]], source: object
    ) -> None:
        """Call `post` when the parts that `fill` has left out have been copied to their slot, unless the other end has
        gone. Later entries may be posted before. `source` is kept until then."""

        def steps(source: object) -> Steps[None]:
            for begin, part in left_out:
                yield from copy_in_steps(view, begin, part)
            if self.is_open:
                post()

        self.plane.work_off(steps(source))

    def take_back(self, place: int) -> None:
        """Free a place that no posted entry names or will name."""
        self._slots.pop(place, None)

    def end_heap(self, number: int) -> None:
        """Put nothing more into a heap. Its memory is freed when all its places have been returned."""
        heap = self.heaps.pop(number)
        self.trimmer.forget(heap)
        heap.close()

    def hold(self, slot: object, nbytes: int) -> int:
        """Keep a slot of another heap until the other end returns the number that this call returns."""
        number = next(self._held_numbers) | (AWAITED_OUTPUTS if nbytes > LARGEST_SHARED else HELD_OUTPUTS)
        self._slots[number] = slot
        return number

    def place_in_turn(self, pieces: Iterable[Buffer], nbytes: int) -> int:
        """Return the place of contents that the other end reads while it handles this turn. Small contents share a
        slot. Raises HeapFull."""
        if nbytes > LARGEST_SHARED:
            place, view = self.new_slot(nbytes)
            fill(view, pieces)
            self._turn_places.append(place)
            return place
        if self._page_used + nbytes > len(self._page):
            self._page_place, self._page = self.new_slot(_PAGE_BYTES)
            self._page_used = 0
            self._turn_places.append(self._page_place)
        begin = self._page_used
        self._page_used = end = begin + nbytes
        fill(self._page[begin:end], pieces)
        return self._page_place + begin

    def new_slot(self, nbytes: int, heap_number: int = 0) -> tuple[int, memoryview]:
        """Return a place of `nbytes` bytes, kept until the other end returns it, and its memory. Raises HeapFull."""
        heap = self.heaps[heap_number]
        slot, view = heap.place(nbytes)
        place = slot.offset | heap_number << HEAP_SHIFT
        self._slots[place] = slot
        self.trimmer.trim_later(heap, self.take_returns)
        return place, view

    def flush(self) -> None:
        if self._turn_places:
            # The other end returns these places when it reads the entries below.
            returns = return_entries(self._turn_places)
            self._queue += [returns[start : start + ENTRY_BYTES] for start in range(0, len(returns), ENTRY_BYTES)]
            self._turn_places.clear()
            self._page, self._page_used = _NO_PAGE, 0
        count = self.post_waiting()
        to_return = self.to_return
        # Only AWAITED_OUTPUTS are worth waking the other end for: a model may wait for their memory.
        is_awaited = bool(to_return) and max(to_return) >= AWAITED_OUTPUTS
        # A separate message costs as much as returning 24 places.
        if to_return and (not count or is_awaited or len(to_return) >= 24):
            post_returns(self._returns, to_return)
        if count or is_awaited:
            self.ring()

    def drop(self) -> None:
        super().drop()
        self._turn_places.clear()
        self._slots.clear()
        for heap in self.heaps.values():
            self.trimmer.forget(heap)

    def take_returns(self) -> None:
        slots = self._slots
        for place in returned_places(self.returned.take()):
            slots.pop(place, None)


@lru_cache(256)
def numbers(count: int) -> Struct:
    """Return the format of `count` numbers (u64 each)."""
    return Struct(f"<{count}Q")
