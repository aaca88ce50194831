"""What both ends of a front's link do: lay out tensors and texts, post entries, also when a ring is full, and give back
what has been read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

from rocserve.core.tensors import Buffer
from rocserve.frontends.processes.entries import ANSWERS, RETURNS
from rocserve.plane.heap import COPIED_IN_PLACE, Heap, Slot, copy_bytes, lay_out
from rocserve.plane.link import LinkEnd
from rocserve.plane.loop import Plane
from rocserve.plane.trimming import HeapTrimmer
from rocserve.workers.entries import numbers, return_entries, returned_places

_RETRY_SECONDS = 0.001
"""After a ring was full."""
_REMEMBERED_LAYOUTS = 1024
"""Of slots: clients send the same sizes again and again."""


class FrontLinkEnd:
    """One end's posting. On the plane's thread."""

    def __init__(self, link: LinkEnd, heap: Heap, plane: Plane) -> None:
        """`heap`: its own."""
        self._messages, self._returns = link.writers[ANSWERS], link.writers[RETURNS]
        self._returned = link.readers[RETURNS]
        self._heap = heap
        self._plane = plane
        self._posts: deque[bytes] = deque()
        self._to_return: list[int] = []
        self._trimmer = HeapTrimmer(plane)
        self._slots: dict[int, Slot] = {}
        """Of its own heap, by place: what the other end may still read."""
        self.ring: Callable[[], None] = _nobody

    def post(self, entry: bytes) -> None:
        """At the end of this turn, behind all that was posted before."""
        if not self._posts:
            self._plane.at_end_of_turn(self.flush)
        self._posts.append(entry)

    def place(self, tensors: Sequence[Buffer], texts: Sequence[bytes] = ()) -> tuple[int, int]:
        """The place and the bytes of a slot that begins with the sizes (u64 each) of all of these; tensors lie behind
        them, then the texts. It is kept until the other end has returned it. Raises: HeapFull."""
        contents = [*tensors, *texts]
        table, bounds, size = _layout(tuple(map(len, contents)), len(tensors))
        slot, view = self._heap.place(size)
        view[: len(table)] = table
        for (begin, end), content in zip(bounds, contents, strict=True):
            if end - begin <= COPIED_IN_PLACE:
                view[begin:end] = content
            else:
                copy_bytes(view, begin, content)
        self._slots[slot.offset] = slot
        self._trimmer.trim_later(self._heap, self.take_returns)
        return slot.offset, size

    def text_place(self, text: bytes) -> int:
        slot, view = self._heap.place(len(text))
        view[:] = text
        self._slots[slot.offset] = slot
        return slot.offset

    def give_back(self, place: int) -> None:
        """A place in the other's heap that nobody reads any more. From any thread."""
        self._to_return.append(place)

    @property
    def has_returns(self) -> bool:
        """Whether the other end is to be told of places; it is with what is posted next, or by `flush`."""
        return bool(self._to_return)

    def flush(self) -> None:
        posts, messages = self._posts, self._messages
        count = min(len(posts), messages.room)
        if count:
            messages.post(b"".join([posts.popleft() for _ in range(count)]))
        to_return = self._to_return
        entries = min(self._returns.room, -(-len(to_return) // 3)) if to_return else 0
        if entries:
            self._returns.post(return_entries(to_return[: 3 * entries]))
            del to_return[: 3 * entries]
        if count:
            # Places that come back are nothing to be woken for.
            self.ring()
        if posts:
            self._plane.call_at(time.monotonic() + _RETRY_SECONDS, self.flush)

    def drop(self) -> None:
        """Nobody takes it any more."""
        self._posts.clear()
        self._slots.clear()
        self._trimmer.forget(self._heap)

    def take_returns(self) -> None:
        slots = self._slots
        for place in returned_places(self._returned.take()):
            slots.pop(place, None)


def read(view: memoryview, tensors: int, texts: int = 0) -> list[Buffer]:
    """What `place` has written: so many tensors, and so many texts."""
    count = tensors + texts
    return [view[begin:end] for begin, end in _bounds(bytes(view[: 8 * count]), tensors)]


@lru_cache(_REMEMBERED_LAYOUTS)
def _layout(sizes: tuple[int, ...], tensors: int) -> tuple[bytes, tuple[tuple[int, int], ...], int]:
    """The table of a slot, where each of what stands behind it begins and ends, and the slot's bytes. `tensors`: so
    many of the sizes are of tensors, the others of texts."""
    table = numbers(len(sizes))
    offsets, end = lay_out(sizes[:tensors], table.size)
    for size in sizes[tensors:]:
        offsets.append(end)
        end += size
    bounds = tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    return table.pack(*sizes), bounds, end


@lru_cache(_REMEMBERED_LAYOUTS)
def _bounds(table: bytes, tensors: int) -> tuple[tuple[int, int], ...]:
    """As `_layout`, of a table that has come."""
    return _layout(numbers(len(table) // 8).unpack(table), tensors)[1]


def _nobody() -> None:
    """Where the other end cannot be rung yet: it looks by itself before it first sleeps."""
