"""Has glibc keep what is freed, and gives it back to the system.

Left to itself glibc does neither (mallopt(3), malloc_trim(3)). Memory freed at the end of one of its heaps goes back
at once, so that each large message pays for the faults of new pages: a message of 4 MiB both ways for 3,700 of them, 9
of 15 ms of CPU time. Memory freed elsewhere stays, also when that is hundreds of megabytes and nobody comes for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

WORTH_BYTES = 32 << 20
"""As much as is worth a trim."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""Of malloc.h."""
_OPERATORS_OWN = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)  # fmt: skip
"""Variables of the environment by which the operator sets the same (mallopt(3))."""
_NEVER = -1
GIVEN_BACK_AT_ONCE = 8 << 20
"""Bytes, in one step: some 1 ms."""
_LARGEST_BLOCK = 32 << 20
"""Bytes, the most that glibc takes from its heaps; larger ones are mapped, each for itself."""


def private_bytes() -> int:
    """The memory of this process alone, without what it shares with workers (proc_pid_statm(5))."""
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class _Counts(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcdefgh", "free_bytes", "j")]


class FreedMemory:
    """Gives what glibc keeps back to the system. To do all in one call takes 70 ms of CPU time for each GiB, and more
    where its pages are scattered; no other thread may allocate meanwhile."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._libc = libc
        libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def pieces(self) -> Iterator[int]:
        """The pages of free memory, some bytes a step: it is taken, and freed again when it has no pages left. What is
        free in smaller pieces stays to the last step."""
        libc, held = self._libc, list[int]()
        try:
            # Before version 2.33 there is nothing that counts beyond 2 GiB.
            if hasattr(libc, "mallinfo2"):
                libc.mallinfo2.restype = _Counts
                for _ in range(libc.mallinfo2().free_bytes // GIVEN_BACK_AT_ONCE):
                    address = libc.malloc(GIVEN_BACK_AT_ONCE)
                    if not address:
                        break
                    held.append(address)
                    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
                    # The last page may be shared with what lies behind.
                    nbytes = (address + GIVEN_BACK_AT_ONCE - begin) // mmap.PAGESIZE * mmap.PAGESIZE
                    libc.madvise(begin, nbytes, mmap.MADV_DONTNEED)
                    yield nbytes
        finally:
            for address in held:
                libc.free(address)
        libc.malloc_trim(0)


def _nothing() -> Iterator[int]:
    return iter(())


def keep_freed_memory(of_any_size: bool = False) -> Callable[[], Iterator[int]]:
    """Have glibc keep all that is freed, unless the operator has set otherwise. Returns: the steps that give
    it back. Where the C library is another, neither does anything. `of_any_size`: larger blocks too, in one heap: those
    of further threads hold 64 MiB each."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return _nothing
    if os.environ.keys().isdisjoint(_OPERATORS_OWN):
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        if of_any_size:
            libc.mallopt(_M_ARENA_MAX, 1)
            libc.mallopt(_M_MMAP_MAX, 0)
        else:
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    return FreedMemory(libc).pieces


class KeptMemory:
    """Keeps what a worker frees for its next batch, and gives it back when it is idle. A batch of 64 images would
    otherwise pay for the faults of 2,400 new pages each time it is made one array: 110 of 180 us of CPU time an
    image."""

    def __init__(self) -> None:
        self._pieces = keep_freed_memory()
        self._left = 0
        """Bytes that the process had when all was given back."""
        self._lock = threading.Lock()
        # What loading has left is needed by no batch.
        self.give_back(lambda: False)

    def give_back(self, is_wanted: Callable[[], bool]) -> None:
        """In steps, until it is wanted. From any thread; one at a time does it."""
        # A process without a free descriptor cannot look. It may have one again the next time.
        with suppress(OSError):
            if private_bytes() - self._left < WORTH_BYTES or not self._lock.acquire(blocking=False):
                return
            try:
                for _ in self._pieces():
                    if is_wanted():
                        return
                self._left = private_bytes()
            finally:
                self._lock.release()
