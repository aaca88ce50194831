"""Shared memory between the server and a worker: anonymous files (memfd), mapped by both.

Both ends write. The file's size is sealed, so a faulty worker cannot make the server's reads fault (SIGBUS).
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import numpy as np

from rocserve.core.errors import internal
from rocserve.core.tensors import Buffer
from rocserve.plane import anonymous_file

ALIGNMENT = 64
"""Bytes; tensors begin at multiples of it, for the engines' vector instructions."""

_SMALLEST = 64 * 1024
"""Bytes of an arena that are mapped at least."""

LARGEST = 1 << 40
"""Bytes of an arena, and so of all tensors of a batch: more than a machine holds. Pages that nobody touches cost
nothing, so each arena has as much of the file to itself."""

_COPIED_IN_PLACE = 64 * 1024
"""Bytes up to which a copy takes less time than letting go of the GIL for it."""

_BLOCK_BYTES = 512
"""The unit of st_blocks (stat(2))."""

_MAPPED_AT_ONCE = 1 << 30
"""Bytes; a call moves less than 2 GiB."""

_Octets = np.ndarray[Any, np.dtype[np.uint8]]


def aligned(offset: int) -> int:
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def written_size(descriptor: int) -> int:
    """Up to where a memfd can have been written, in bytes. Making it long takes no memory, but whoever reads what
    nobody has written has the memory made at his own expense."""
    status = os.fstat(descriptor)
    return min(status.st_size, status.st_blocks * _BLOCK_BYTES)


class ArenaFile:
    """A memfd that arenas share, so that they cost one descriptor together. It is closed with the last of them."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        """Take over a descriptor that `create` made, here or in the other process."""
        self.descriptor = descriptor

    @classmethod
    def create(cls, name: str, arenas: int) -> ArenaFile:
        return cls(anonymous_file.create(name, arenas * LARGEST))

    def __del__(self) -> None:
        os.close(self.descriptor)


class _SealedMapping(mmap.mmap):
    """Of an arena: unlike a client's file, what it maps cannot be cut."""


class Arena:
    """A part of a file, mapped from its first use on as far as it is used; `trim` gives its pages back.

    Whoever writes calls `reserve`, whoever reads calls `cover`. Either may map the part anew; views on the earlier
    mapping stay valid, on the same memory. Not thread-safe: one batch at a time owns an arena.
    """

    __slots__ = ("_file", "_start", "mapping", "octets", "peak", "size", "untrimmed", "view")

    def __init__(self, file: ArenaFile, index: int) -> None:
        """`index`: which part of the file, from 0 on."""
        self._file: ArenaFile | None = file
        self._start = index * LARGEST
        self.size = -1
        """Bytes that are mapped; -1 = it has not been used yet and has no mapping."""
        self.peak = -1
        """The highest end of a tensor since the last `trim`; up to here neither `reserve` nor `cover` is needed."""
        self.untrimmed = 0
        """Up to here pages may be in use."""

    def reserve(self, nbytes: int) -> None:
        """Make the mapping at least `nbytes` long. Raises: ServeError: INTERNAL, nothing is as large."""
        if nbytes > self.size:
            if nbytes > LARGEST:
                raise internal(f"the tensors of a batch take {nbytes} bytes, expected at most {LARGEST}")
            self._map(nbytes)
        self._touch(nbytes)

    def cover(self, nbytes: int) -> None:
        """Make the mapping reach the end of what the other side wrote.

        Raises:
            ValueError: the other side has not written `nbytes` bytes.
        """
        if nbytes > self.size:
            written = self._written()
            if nbytes > max(written, _SMALLEST):
                raise ValueError(f"a tensor ends at byte {nbytes} of shared memory of {written} bytes")
            try:
                self._map(nbytes)
            except OSError as error:
                raise ValueError(f"shared memory of {nbytes} bytes cannot be mapped: {error}") from None
        self._touch(nbytes)

    def _written(self) -> int:
        """Up to where all pages are there, in bytes: whoever reads others has them made at his own expense."""
        return min(os.lseek(self._open_file.descriptor, self._start, os.SEEK_HOLE) - self._start, LARGEST)

    def write(self, offset: int, data: Buffer) -> None:
        """Copy a flat view of bytes to memory that is reserved."""
        nbytes = len(data)
        if nbytes <= _COPIED_IN_PLACE:
            self.mapping[offset : offset + nbytes] = data
        elif type(data) is memoryview and type(data.obj) is mmap.mmap:
            self._write_mapped(offset, data)
        else:
            # numpy lets go of the GIL while it copies.
            self.octets[offset : offset + nbytes] = np.frombuffer(data, dtype=np.uint8)

    def _write_mapped(self, offset: int, data: memoryview) -> None:
        """From a mapped file, which is a client's and may be cut at any time. Touching what is gone would end the
        process (SIGBUS); the kernel's copy just ends there. In the place of what is gone stand zeros."""
        descriptor = self._open_file.descriptor
        done, nbytes = 0, len(data)
        while done < nbytes:
            try:
                done += os.pwrite(descriptor, data[done : done + _MAPPED_AT_ONCE], self._start + offset + done)
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                self.octets[offset + done : offset + nbytes] = 0
                return

    def trim(self, keep: int) -> None:
        """Give the pages beyond the first `keep` bytes, and beyond what was used since the last call, back to the
        system; they read as zeros from then on."""
        used = max(self.peak, keep)
        if self.untrimmed > used:
            start = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
            if start < self.size:
                self.mapping.madvise(mmap.MADV_REMOVE, start, self.size - start)
            self.untrimmed = used
        self.peak = min(self.peak, 0)

    def _touch(self, nbytes: int) -> None:
        self.peak = max(self.peak, nbytes)
        self.untrimmed = max(self.untrimmed, nbytes)

    def close(self) -> None:
        """Let go of the file. The memory goes when the last view on it goes."""
        if self._file is not None:
            self._file = None
            if self.size >= 0:
                del self.mapping, self.view, self.octets

    @property
    def _open_file(self) -> ArenaFile:
        assert self._file is not None, "the arena is closed"
        return self._file

    def _map(self, nbytes: int) -> None:
        """Untouched pages cost no memory, so it grows in powers of two."""
        size = 1 << (max(nbytes, _SMALLEST) - 1).bit_length()
        self.mapping = _SealedMapping(
            self._open_file.descriptor, size, offset=self._start, **anonymous_file.MAPPED_WITHOUT_A_COPY
        )
        self.size = size
        self.view = memoryview(self.mapping)
        self.octets: _Octets = np.frombuffer(self.mapping, dtype=np.uint8)
