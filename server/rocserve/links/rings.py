"""Rings carry entries between two processes, in shared memory, without locks.

Each end owns a file that the other end maps to read. The file holds the end's words and its rings. The words are how
much it has posted on each of its rings, how much it has taken from each of the other end's, which of its threads sleep,
and how far a worker was with its last group. A writer stores entries, then its word; a reader copies entries, then
stores its word. All words are aligned 64-bit stores. x86 keeps their order; other processors need a fence.

Each end checks the other end's words: impossible numbers raise LinkBroken. It does not check the content of entries.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from rocserve.plane import anonymous_file
from rocserve.plane.doorbell import KEEPS_STORE_ORDER, fence

ENTRY_BYTES = 32
"""Four words of 64 bits."""
SMALLEST_RING = mmap.PAGESIZE // ENTRY_BYTES
"""Entries."""

_MOST_RINGS = 4
_RINGS_AT = mmap.PAGESIZE


def _word(kind: int, number: int) -> int:
    # 64 bytes apart, so that two processors do not share a cache line.
    return (kind * _MOST_RINGS + number) * 8


_POSTED, _TAKEN, _ASLEEP, _BEGUN = range(4)


class LinkBroken(Exception):
    """The other end has written impossible numbers; it must no longer be read."""


def create_file(name: str, rings: Sequence[int]) -> int:
    """Create the file that one end owns. `rings`: each ring's entries, a multiple of SMALLEST_RING."""
    if len(rings) > _MOST_RINGS or any(entries < 1 or entries % SMALLEST_RING for entries in rings):
        raise ValueError(f"expected at most {_MOST_RINGS} rings of whole pages of entries, got {list(rings)}")
    return anonymous_file.create(name, _RINGS_AT + sum(rings) * ENTRY_BYTES)


class RingWriter:
    """The posting end of a ring. One thread at a time."""

    def __init__(self, own: memoryview, other_words: memoryview, ring: memoryview, number: int) -> None:
        self._own_words, self._other_words = own, other_words
        self._posted_at, self._taken_at = _word(_POSTED, number), _word(_TAKEN, number)
        self._ring = ring
        self._size = len(ring)
        self.posted = 0
        """Bytes since the beginning."""
        self._reserved = 0
        """Entries that have a place, and are not posted yet."""

    def reserve(self) -> bool:
        """Reserve a place for an entry that `post_reserved` will post. Returns False if none is free. Raises
        LinkBroken."""
        if self.room <= 0:
            return False
        self._reserved += 1
        return True

    def post_reserved(self, entry: bytes) -> None:
        self._reserved -= 1
        self.post(entry)

    def give_up_reserved(self) -> None:
        self._reserved -= 1

    def is_taken(self, posted: int) -> bool:
        """Return whether the other end has taken everything before this byte."""
        return self._other_words[self._taken_at] >= posted

    @property
    def room(self) -> int:
        """Return how many entries can be posted now, besides those that have reserved a place. Raises LinkBroken."""
        under_way = self.posted - self._other_words[self._taken_at]
        if not 0 <= under_way <= self._size:
            raise LinkBroken(f"the other end of a link reports {self.posted - under_way} of {self.posted} bytes taken")
        return (self._size - under_way) // ENTRY_BYTES - self._reserved

    def post(self, entries: bytes) -> None:
        """Write whole entries, seen together by the other end. Writers with bounded entries need not check `room`."""
        size, start = len(entries), self.posted % self._size
        end = start + size
        if end <= self._size:
            self._ring[start:end] = entries
        else:
            first = self._size - start
            self._ring[start:] = entries[:first]
            self._ring[: size - first] = entries[first:]
        if not KEEPS_STORE_ORDER:
            fence()
        self.posted += size
        self._own_words[self._posted_at] = self.posted


class RingReader:
    """The taking end of a ring. One thread at a time."""

    def __init__(self, own: memoryview, other_words: memoryview, ring: memoryview, number: int) -> None:
        self._own_words, self.other_words = own, other_words
        self.posted_at, self._taken_at = _word(_POSTED, number), _word(_TAKEN, number)
        self._ring = ring
        self._size = len(ring)
        self.taken = 0
        """Bytes since the beginning. There is mail while `other_words[posted_at]` differs; loops test that."""

    def has_mail(self) -> bool:
        return self.other_words[self.posted_at] != self.taken

    def take(self) -> bytes:
        """Take all entries since the last call, in their order. Raises LinkBroken."""
        posted, taken = self.other_words[self.posted_at], self.taken
        if posted == taken:
            return b""
        count = posted - taken
        if not 0 < count <= self._size or count % ENTRY_BYTES:
            raise LinkBroken(f"the other end of a link reports {posted} bytes posted, but {taken} were taken")
        if not KEEPS_STORE_ORDER:
            fence()
        start = taken % self._size
        end = start + count
        if end <= self._size:
            entries = bytes(self._ring[start:end])
        else:
            entries = bytes(self._ring[start:]) + bytes(self._ring[: end - self._size])
        if not KEEPS_STORE_ORDER:
            fence()
        self._own_words[self._taken_at] = self.taken = posted
        return entries


class LinkEnd:
    """One end of a link: its writers, its readers, and the sleep words of threads."""

    def __init__(self, own: int, sends: Sequence[int], other: int, takes: Sequence[int]) -> None:
        """`own`, `other`: the files; the caller keeps the descriptors. `sends`, `takes`: the entries of each ring."""
        own_view = anonymous_file.map_file(own, to_write=True)
        other_view = anonymous_file.map_file(other, to_write=False)
        self._own_words, self._other_words = own_view[:_RINGS_AT].cast("Q"), other_view[:_RINGS_AT].cast("Q")
        words = self._own_words, self._other_words
        self.writers = [RingWriter(*words, ring, number) for number, ring in enumerate(_rings(own_view, sends))]
        self.readers = [RingReader(*words, ring, number) for number, ring in enumerate(_rings(other_view, takes))]

    def own_sleep_word(self, number: int = 0) -> memoryview:
        """Return the word in which a thread of this end counts its sleeps (see `doorbell`)."""
        at = _word(_ASLEEP, number)
        return self._own_words[at : at + 1]

    def other_sleep_word(self, number: int = 0) -> memoryview:
        at = _word(_ASLEEP, number)
        return self._other_words[at : at + 1]

    def note_begun(self, group: int, count: int) -> None:
        """Note how many requests of a group, by its batch's number, have begun to run. In one word, so that the count
        of one group is never read for another."""
        self._own_words[_word(_BEGUN, 0)] = group << 16 | count

    def others_begun(self) -> tuple[int, int]:
        """Return the other end's last group, and how many of its requests have begun."""
        return divmod(self._other_words[_word(_BEGUN, 0)], 1 << 16)


def _rings(view: memoryview, entries: Sequence[int]) -> list[memoryview]:
    rings: list[memoryview] = []
    start = _RINGS_AT
    for count in entries:
        end = start + count * ENTRY_BYTES
        if end > len(view):
            raise ValueError(f"rings of {sum(entries)} entries in a file of {len(view)} bytes")
        rings.append(view[start:end])
        start = end
    return rings
