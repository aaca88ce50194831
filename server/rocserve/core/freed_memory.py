"""Makes glibc keep freed memory for the next request, and gives it back to the system later. By default glibc does
neither (mallopt(3), malloc_trim(3)). It returns memory that is freed at the end of a heap immediately, so each large
message pays for the page faults of new memory: 3,700 faults, 9 of 15 ms of CPU time, for a message of 4 MiB both ways.
It keeps memory that is freed elsewhere, even hundreds of megabytes that nobody uses."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

WORTH_BYTES = 32 << 20
"""A trim must give back this much to be worth its time."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""Constants of malloc.h."""
_OPERATORS_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)  # fmt: skip
"""Environment variables by which the operator sets the same options (mallopt(3))."""
_NEVER = -1
GIVEN_BACK_AT_ONCE = 8 << 20
"""Bytes that one step gives back: about 1 ms."""
_LARGEST_BLOCK = 32 << 20
"""Bytes. The largest block that glibc takes from its heaps; it maps each larger block separately."""


def private_bytes() -> int:
    """Return the memory of this process without the memory that it shares with workers (proc_pid_statm(5))."""
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class _Counts(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcdefgh", "free_bytes", "j")]


def _drop_free_pages(libc: ctypes.CDLL) -> Iterator[int]:
    """Give free pages back to the system, a block per step. The blocks stay allocated until the last step, which also
    gives back smaller free pieces. A single call for all pages takes 70 ms of CPU time per GiB, more if the pages are
    scattered, and no other thread can allocate meanwhile."""
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
                # The last page may be shared with memory behind the block.
                nbytes = (address + GIVEN_BACK_AT_ONCE - begin) // mmap.PAGESIZE * mmap.PAGESIZE
                libc.madvise(begin, nbytes, mmap.MADV_DONTNEED)
                yield nbytes
    finally:
        for address in held:
            libc.free(address)
    libc.malloc_trim(0)


def keep_freed_memory(of_any_size: bool = False) -> Callable[[], Iterator[int]]:
    """Make glibc keep freed memory, unless the operator set its options. Returns a function that gives the memory back
    in steps; without glibc it does nothing. `of_any_size`: also keep blocks above 32 MiB, and use a single heap,
    because the heap of each further thread reserves 64 MiB."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return lambda: iter(())
    if os.environ.keys().isdisjoint(_OPERATORS_VARIABLES):
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        if of_any_size:
            libc.mallopt(_M_ARENA_MAX, 1)
            libc.mallopt(_M_MMAP_MAX, 0)
        else:
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    return partial(_drop_free_pages, libc)


class KeptMemory:
    """Keeps memory that a worker frees for the worker's next batch, and gives it back when the worker is idle.
    Otherwise a batch of 64 images pays for 2,400 page faults when it becomes one array: 110 of 180 us of CPU time per
    image."""

    def __init__(self) -> None:
        self._pieces = keep_freed_memory()
        self._trimmed_bytes = 0
        """Bytes that the process had after it last gave all free memory back."""
        self._lock = threading.Lock()
        # No batch needs the memory that loading has freed.
        self.give_back(lambda: False)

    def give_back(self, is_wanted: Callable[[], bool]) -> None:
        """Give free memory back until `is_wanted` returns True. Safe on any thread; of simultaneous calls one works."""
        # Reading /proc fails without a free descriptor. The next call may succeed.
        with suppress(OSError):
            if private_bytes() - self._trimmed_bytes < WORTH_BYTES or not self._lock.acquire(blocking=False):
                return
            try:
                for _ in self._pieces():
                    if is_wanted():
                        return
                self._trimmed_bytes = private_bytes()
            finally:
                self._lock.release()
