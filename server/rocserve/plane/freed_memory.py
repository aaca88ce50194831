"""Makes glibc keep freed memory for the next request, and gives it back to the system later. By default, glibc does
neither (mallopt(3), malloc_trim(3)). It returns memory that is freed at the end of a heap immediately, so each large
message pays for the page faults of new memory: 3,700 faults, 9 of 15 ms of CPU time, for a message of 4 MiB both ways.
It keeps memory that is freed elsewhere, even hundreds of megabytes that nobody uses."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

from rocserve.core.steps import Steps
from rocserve.plane.anonymous_file import GIVEN_BACK_AT_ONCE

WORTH_BYTES = 32 << 20
"""With less growth of the process, giving memory back is not worth its time."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""Constants of malloc.h."""
_OPERATORS_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)  # fmt: skip
"""Environment variables by which the operator sets the same options (mallopt(3))."""


def private_bytes() -> int:
    """Return the memory of this process without the memory that it shares with workers (proc_pid_statm(5))."""
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class _Counts(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcdefgh", "free_bytes", "j")]


class FreedMemory:
    """The memory that this process has freed and that glibc keeps. Without glibc, nothing is kept or given back. Safe
    on any thread."""

    def __init__(self, of_any_size: bool = False) -> None:
        """Make glibc keep freed memory, unless the operator set its options. `of_any_size`: also keep blocks above 32
        MiB, and use a single heap, because the heap of each further thread reserves 64 MiB."""
        libc = ctypes.CDLL(None)
        self._least_bytes = sys.maxsize
        """The least private memory of this process since then."""
        self.grown_bytes()
        if not hasattr(libc, "mallopt") or not os.environ.keys().isdisjoint(_OPERATORS_VARIABLES):
            return
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        if of_any_size:
            libc.mallopt(_M_ARENA_MAX, 1)
            libc.mallopt(_M_MMAP_MAX, 0)
        else:
            # glibc maps each larger block separately.
            libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)

    def grown_bytes(self) -> int:
        """Return how much the memory of this process has grown since its minimum; 0 if no descriptor is free to read
        it."""
        try:
            private = private_bytes()
        except OSError:
            return 0
        self._least_bytes = min(self._least_bytes, private)
        return private - self._least_bytes

    @staticmethod
    def give_back() -> Steps[None]:
        """Give free pages back to the system, a block per step. The blocks stay allocated until the last step, which
        also gives back smaller free pieces. A single call for all pages takes 70 ms of CPU time per GiB, more if the
        pages are scattered, and no other thread can allocate meanwhile."""
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "malloc_trim"):
            return
        libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        held = list[int]()
        try:
            # Before glibc 2.33 only mallinfo exists, whose counts end at 2 GiB.
            if hasattr(libc, "mallinfo2"):
                libc.mallinfo2.restype = _Counts
                for _ in range(libc.mallinfo2().free_bytes // GIVEN_BACK_AT_ONCE):
                    address = libc.malloc(GIVEN_BACK_AT_ONCE)
                    if not address:
                        break
                    held.append(address)
                    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
                    # The last page may be shared with memory after the block.
                    nbytes = (address + GIVEN_BACK_AT_ONCE - begin) // mmap.PAGESIZE * mmap.PAGESIZE
                    libc.madvise(begin, nbytes, mmap.MADV_DONTNEED)
                    yield
        finally:
            for address in held:
                libc.free(address)
        libc.malloc_trim(0)
