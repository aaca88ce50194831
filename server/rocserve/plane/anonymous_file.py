"""Anonymous files are memory that processes share: the creator hands out descriptors to write or only to read. They are
not in /dev/shm, so a container's small /dev/shm does not limit them, and the last user's end frees them. Their
size is sealed, so that no reader gets SIGBUS beyond the end of the file."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rocserve.core.steps import Steps

_NAME_BYTES = 200
"""The file's name shows in /proc/PID/maps; Linux takes at most 249 bytes."""

GIVEN_BACK_AT_ONCE = 8 << 20
"""Bytes per step: about 2 ms, in which the process does nothing else."""

Later = Callable[[Steps[None]], object]
"""Runs the steps of long work. Safe on any thread."""

# PyDLL keeps the GIL: the calls take less time than releasing it would.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
_FAILED = ctypes.c_void_p(-1).value


def create(name: str, size: int) -> int:
    """Create a file of zeros, which use no memory until they are touched. Returns a writable descriptor."""
    shown = os.fsencode(name)[:_NAME_BYTES].decode(errors="ignore")
    descriptor = os.memfd_create(shown, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # A process of another user that gets a read-only descriptor must not reopen the file for writing.
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, size)
    # Not sealed against writing by readers: the seal would also forbid giving memory back to the system.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def open_for_reading(descriptor: int) -> int:
    """Open a new read-only descriptor of the file; it cannot be mapped for writing."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def open_for_writing(descriptor: int) -> int:
    """Open a new writable descriptor of a file that this process created. Raises OSError if no descriptor is free."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def map_file(
    descriptor: int,
    to_write: bool,
    size: int | None = None,
    offset: int = 0,
    on_unused: Callable[[int, int], None] = unmap,
) -> memoryview:
    """Map a file, or a part of it, until the last view is gone. Keeps no descriptor (`mmap.mmap` keeps a copy before
    Python 3.13). `on_unused` gets address and bytes after the last view, and must unmap them."""
    if size is None:
        size = os.fstat(descriptor).st_size
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if to_write else 0)
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"memory cannot be mapped: {os.strerror(number)}")
    memory: Any = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, on_unused, address, size).atexit = False
    octets = np.frombuffer(memory, np.uint8)
    octets.flags.writeable = to_write
    view: memoryview = octets.data
    return view


def give_back(descriptor: int, start: int, nbytes: int) -> None:
    """Give a file's pages back to the system; they become zeros."""
    # 3 is FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE.
    if _libc.fallocate(descriptor, 3, start, nbytes):
        raise OSError(ctypes.get_errno(), "memory cannot be given back")


def give_back_pieces(descriptor: int, start: int, end: int, piece: int) -> Steps[None]:
    """Give the memory in a range of a file back, a piece per step; skips pages without memory."""
    while True:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # No memory after `start`.
        if start >= end:
            return
        give_back(descriptor, start, min(piece, end - start))
        start += piece
        yield


def replace_by_zeros(address: int, nbytes: int) -> bool:
    """Replace mapped pages by private zero pages. Returns whether the kernel could."""
    # 0x10 is MAP_FIXED of mman.h; Python has no name for it.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
    found: int | None = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return found != _FAILED


class Remains:
    """Releases mappings, and perhaps the memory of a file, when it is deleted: after the heap or reader, its slots and
    its views. Unmapping a tensor of 1 GiB takes 40 to 80 ms of CPU time, freeing its pages another 150. A thread on
    which requests wait therefore releases some megabytes at a time."""

    def __init__(self, later: Later | None) -> None:
        """`later` runs the steps; None: everything is released in one call."""
        self._later = later
        self._descriptor = -1
        self._unused: list[tuple[int, int]] = []
        """Addresses and bytes of mappings without views."""

    def keep(self, descriptor: int) -> None:
        """Take over a writable descriptor of a file whose memory is released after this process's last use."""
        if self._later is None:
            os.close(descriptor)
        else:
            self._descriptor = descriptor

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap a mapping without views; with `later`, when this object is deleted."""
        if self._later is None:
            unmap(address, nbytes)
        else:
            self._unused.append((address, nbytes))

    def __del__(self) -> None:
        if self._later is not None and (self._unused or self._descriptor >= 0):
            self._later(_pieces(self._descriptor, self._unused))


NOTHING_LEFT = Remains(None)
"""For a closed heap or reader."""


def _pieces(descriptor: int, mappings: list[tuple[int, int]]) -> Steps[None]:
    try:
        if descriptor >= 0:
            # This removes the pages from the mappings too, so that unmapping takes no time.
            size = os.fstat(descriptor).st_size
            yield from give_back_pieces(descriptor, 0, size, GIVEN_BACK_AT_ONCE)
        else:
            while mappings:
                address, nbytes = mappings.pop()
                piece = min(GIVEN_BACK_AT_ONCE, nbytes)
                unmap(address, piece)
                if nbytes > piece:
                    mappings.append((address + piece, nbytes - piece))
                yield
    finally:
        for address, nbytes in mappings:
            unmap(address, nbytes)
        if descriptor >= 0:
            os.close(descriptor)
