"""Link carries messages between two processes: a ring in shared memory for each direction, without a lock.

Each end owns a file that the other maps to read. It holds how many bytes its owner has posted, how many it has taken
from the other, and the ring. Posting stores entries, then the first number; taking copies entries, then stores the
second. Both are plain aligned 64-bit stores. x86 keeps their order; elsewhere a fence does.

An end trusts the other with nothing but the entries' content: numbers that cannot be are a `LinkBroken`.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from rocserve.plane import anonymous_file
from rocserve.plane.doorbell import KEEPS_STORE_ORDER, Ringer, fence

ENTRY_BYTES = 32
"""Of an entry: four words of 64 bits. Messages are whole entries."""

_POSTED, _TAKEN = 0, 8
"""Words of a file; 64 bytes apart, so that two processors do not fight for a cache line."""

_RING_AT = mmap.PAGESIZE


class LinkBroken(Exception):
    """The other end has written what no program of ours writes; nothing more is to be had from it."""


@dataclass(frozen=True, slots=True)
class LinkFiles:
    """The descriptors of one end; they are the holder's, who closes them or gives them to a LinkEnd."""

    own: int
    other: int
    """To read."""

    @classmethod
    def create_pair(cls, name: str, entries: int) -> tuple[LinkFiles, LinkFiles]:
        """Those of both ends. `entries`: that can be under way in one direction; a power of two, 128 at least."""
        size = entries * ENTRY_BYTES
        if entries < 1 or entries & entries - 1 or size % mmap.PAGESIZE:
            raise ValueError(f"expected a power of two of entries that fill pages, got {entries}")
        first, second = (anonymous_file.create(name, _RING_AT + size) for _ in range(2))
        read = anonymous_file.open_for_reading
        return cls(first, read(second)), cls(second, read(first))

    def close(self) -> None:
        os.close(self.own)
        os.close(self.other)


class LinkEnd:
    """One end. Not thread-safe: a process of the data plane has one thread."""

    def __init__(self, files: LinkFiles, ringer: Ringer | None) -> None:
        """Takes the files over. `ringer`: of the other end's process; None when it is this one."""
        own, other = (
            memoryview(anonymous_file.map_to_write(files.own)),
            memoryview(anonymous_file.map_to_read(files.other)),
        )
        files.close()
        self._own_words, self._other_words = own[:_RING_AT].cast("Q"), other[:_RING_AT].cast("Q")
        self._out, self._in = own[_RING_AT:], other[_RING_AT:]
        self._size = len(self._out)
        self._posted = self._taken = 0
        self._ringer = ringer

    @property
    def room(self) -> int:
        """Bytes that can be posted now. Raises: LinkBroken."""
        under_way = self._posted - self._other_words[_TAKEN]
        if not 0 <= under_way <= self._size:
            raise LinkBroken(f"the other end of a link has taken {self._other_words[_TAKEN]} of {self._posted} bytes")
        return self._size - under_way

    def post(self, entries: bytes) -> None:
        """Write messages; the other end sees all of them at once. `ring` after the last of several.

        There has to be `room`: whoever bounds what is under way need not ask.
        """
        size, start = len(entries), self._posted % self._size
        end = start + size
        if end <= self._size:
            self._out[start:end] = entries
        else:
            first = self._size - start
            self._out[start:] = entries[:first]
            self._out[: size - first] = entries[first:]
        if not KEEPS_STORE_ORDER:
            fence()
        self._posted += size
        self._own_words[_POSTED] = self._posted

    def ring(self) -> None:
        """Wake the other end's process, if it sleeps."""
        if self._ringer is not None:
            self._ringer.ring()

    def has_mail(self) -> bool:
        return self._other_words[_POSTED] != self._taken

    def take(self) -> bytes:
        """All that has come since the last call, whole entries in the order of posting. Raises: LinkBroken."""
        posted, taken = self._other_words[_POSTED], self._taken
        if posted == taken:
            return b""
        count = posted - taken
        if not 0 < count <= self._size or count % ENTRY_BYTES:
            raise LinkBroken(f"the other end of a link says {posted} bytes where {taken} were taken")
        if not KEEPS_STORE_ORDER:
            fence()
        start = taken % self._size
        end = start + count
        if end <= self._size:
            entries = bytes(self._in[start:end])
        else:
            entries = bytes(self._in[start:]) + bytes(self._in[: end - self._size])
        if not KEEPS_STORE_ORDER:
            fence()
        self._own_words[_TAKEN] = self._taken = posted
        return entries
