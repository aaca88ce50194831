"""Anonymous file is memory that processes share: made by one, written by its owner alone, read by whom it is given to.

Not /dev/shm: a container's small /dev/shm is no limit, and nothing is left behind when all ends are gone. The size is
sealed, so that no reader meets the end of the file (SIGBUS).
"""

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
"""Of the file's name, which shows in /proc/PID/maps; Linux takes 249."""

# PyDLL keeps the GIL: the calls take less time than giving it up would.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PUNCH_HOLE_KEEP_SIZE = 3
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
"""Of mman.h; Python has no name for it."""


def create(name: str, size: int) -> int:
    """A descriptor to write, of zeros that take no memory until they are touched."""
    shown = os.fsencode(name)[:_NAME_BYTES].decode(errors="ignore")
    descriptor = os.memfd_create(shown, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Another user's process that is given a descriptor to read cannot open the file once more to write.
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, size)
    # Writing cannot be sealed for readers alone: memory could not be given back any more.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def open_for_reading(descriptor: int) -> int:
    """A new descriptor of the same file; a writable mapping of it is refused."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def open_for_writing(descriptor: int) -> int:
    """A new descriptor of a file that this process has made, by any other. Raises: OSError: there is none free."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def unmap(address: int, nbytes: int) -> None:
    """Whole pages are mapped no more."""
    _libc.munmap(address, nbytes)


def map_to_write(
    descriptor: int, size: int | None = None, offset: int = 0, on_unused: Callable[[int, int], None] = unmap
) -> memoryview:
    """All of the file, or a part of it; mapped until nobody holds a view any more, and without the descriptor, of which
    `mmap.mmap` keeps a copy before Python 3.13. `on_unused`: takes the address and the bytes then; sees to the end of
    the mapping."""
    return _map(descriptor, size, offset, mmap.PROT_READ | mmap.PROT_WRITE, on_unused)


def map_to_read(
    descriptor: int, size: int | None = None, offset: int = 0, on_unused: Callable[[int, int], None] = unmap
) -> memoryview:
    """As `map_to_write`."""
    return _map(descriptor, size, offset, mmap.PROT_READ, on_unused)


def give_back(descriptor: int, start: int, nbytes: int) -> None:
    """Pages of a file go back to the system; they are zeros from then on."""
    if _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, start, nbytes):
        raise OSError(ctypes.get_errno(), "memory cannot be given back")


def give_back_pieces(descriptor: int, start: int, end: int, piece: int) -> Steps[None]:
    """As `give_back`, of a range: a piece a step, wherever there is memory."""
    while True:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # There is none behind it.
        if start >= end:
            return
        give_back(descriptor, start, min(piece, end - start))
        start += piece
        yield


def leave(address: int, nbytes: int) -> None:
    """Count pages of a file that are mapped as this process's no more, until it touches them again."""
    _libc.madvise(address, nbytes, mmap.MADV_DONTNEED)


def put_zeros(address: int, nbytes: int) -> bool:
    """Have zeros of this process alone in the place of whole pages that are mapped; whether they could be had."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    found: int | None = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return found != _FAILED


def _map(
    descriptor: int, size: int | None, offset: int, protection: int, on_unused: Callable[[int, int], None]
) -> memoryview:
    if size is None:
        size = os.fstat(descriptor).st_size
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"memory cannot be mapped: {os.strerror(number)}")
    memory: Any = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, on_unused, address, size).atexit = False
    octets = np.frombuffer(memory, np.uint8)
    octets.flags.writeable = bool(protection & mmap.PROT_WRITE)
    view: memoryview = octets.data
    return view
