"""Shared memory between the server and a worker: anonymous files (memfd), mapped by both.

Not /dev/shm: a container's small /dev/shm is no limit, and nothing is left behind when both ends are gone. The file is
sealed against shrinking, so a faulty worker cannot make the server's reads fault (SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from typing import Any

import numpy as np

from rocserve.core.tensors import Buffer

ALIGNMENT = 64
"""Bytes; tensors begin at multiples of it, for the engines' vector instructions."""

_SMALLEST = 64 * 1024

_NAME_BYTES = 200
"""Of the file's name, which shows in /proc/PID/maps."""

_COPIED_IN_PLACE = 64 * 1024
"""Bytes up to which a copy takes less time than letting go of the GIL for it."""

_BLOCK_BYTES = 512
"""The unit of st_blocks (stat(2))."""

_MAPPED_AT_ONCE = 1 << 30
"""Bytes; a call moves less than 2 GiB."""

# Before Python 3.13 each mapping keeps a copy of the file's descriptor.
_MAPPED_WITHOUT_A_COPY: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

_Octets = np.ndarray[Any, np.dtype[np.uint8]]


def aligned(offset: int) -> int:
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def written_size(descriptor: int) -> int:
    """Up to where a memfd can have been written, in bytes. Making it long takes no memory, but whoever reads what
    nobody has written has the memory made at his own expense."""
    status = os.fstat(descriptor)
    return min(status.st_size, status.st_blocks * _BLOCK_BYTES)


class Arena:
    """One memfd, mapped whole. It grows on demand and never shrinks; `trim` gives its pages back instead.

    Whoever writes calls `reserve`, whoever reads calls `cover`. Either may map the file anew; views on the earlier
    mapping stay valid, on the same memory. Not thread-safe: one batch at a time owns an arena.
    """

    __slots__ = ("_descriptor", "mapping", "octets", "peak", "size", "untrimmed", "view")

    def __init__(self, descriptor: int) -> None:
        """Take over a descriptor that `create` made, here or in the other process."""
        self._descriptor = descriptor
        self.peak = 0
        """The highest end of a tensor since the last `trim`; up to here neither `reserve` nor `cover` is needed."""
        self.untrimmed = 0
        """Up to here pages may be in use."""
        try:
            self._map()
        except BaseException:
            os.close(descriptor)
            self._descriptor = -1
            raise

    @classmethod
    def create(cls, name: str) -> Arena:
        # Linux takes 249 bytes; a model's name may be longer.
        shown = os.fsencode(name)[:_NAME_BYTES].decode(errors="ignore")
        descriptor = os.memfd_create(shown, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _SMALLEST)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def reserve(self, nbytes: int) -> None:
        """Make the mapping at least `nbytes` long. Untouched pages cost no memory, so it grows in powers of two."""
        if nbytes > self.size:
            os.ftruncate(self._descriptor, 1 << (nbytes - 1).bit_length())
            self._map()
        self._touch(nbytes)

    def cover(self, nbytes: int) -> None:
        """Make the mapping reach the end of what the other side wrote.

        Raises:
            ValueError: the file has fewer than `nbytes` bytes.
        """
        if nbytes > self.size:
            true_size = written_size(self._descriptor)
            if nbytes > true_size:
                raise ValueError(f"a tensor ends at byte {nbytes} of shared memory of {true_size} bytes")
            try:
                self._map()
            except OSError as error:
                raise ValueError(f"shared memory of {true_size} bytes cannot be mapped: {error}") from None
        self._touch(nbytes)

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
        done, nbytes = 0, len(data)
        while done < nbytes:
            try:
                done += os.pwrite(self._descriptor, data[done : done + _MAPPED_AT_ONCE], offset + done)
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
        self.peak = 0

    def _touch(self, nbytes: int) -> None:
        self.peak = max(self.peak, nbytes)
        self.untrimmed = max(self.untrimmed, nbytes)

    def close(self) -> None:
        """Let go of the file. The memory goes when the last view on it goes."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            del self.mapping, self.view, self.octets

    def __del__(self) -> None:
        self.close()

    def _map(self) -> None:
        size = os.fstat(self._descriptor).st_size
        self.mapping = mmap.mmap(self._descriptor, size, **_MAPPED_WITHOUT_A_COPY)
        self.size = size
        self.view = memoryview(self.mapping)
        self.octets: _Octets = np.frombuffer(self.mapping, dtype=np.uint8)
