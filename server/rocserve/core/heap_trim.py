"""Keeps what large traffic frees for the requests that follow, and gives it back to the system once that is over.

Left to itself glibc does neither (mallopt(3), malloc_trim(3)). Memory freed at the end of one of its heaps goes back
at once, so that each large message pays for the faults of new pages: a message of 4 MiB both ways for 3,700 of them, 9
of 15 ms of CPU time. Memory freed elsewhere stays, also when that is hundreds of megabytes and nobody comes for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CHECK_SECONDS = 1.0
_QUIET_CHECKS = 3
"""Checks in a row that must find little of requests, which come in bursts, before they count as over."""
_WORTH_BYTES = 32 << 20
"""Growth since the last trim that is worth another at once, and growth of the whole that is worth any."""
_LITTLE = 1 / 16
"""Of that growth: requests that hold less than this are not what has grown."""
_REPEAT_CHECKS = 15
"""After a trim until the next without such growth: what was in use then may have been freed since. With 250 MiB free in
12,500 places the first trim takes 31 ms, a repetition 7."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
"""Of malloc.h."""
_OPERATORS_OWN = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)  # fmt: skip
"""Variables of the environment by which the operator sets the same (mallopt(3))."""
_NEVER = -1
_LARGEST_BLOCK = 32 << 20
"""Bytes, the most that glibc takes from its heaps; larger ones are mapped, each for itself."""


def private_bytes() -> int:
    """The memory of this process alone, without what it shares with workers (proc_pid_statm(5))."""
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory(of_any_size: bool = False) -> Callable[[], object]:
    """Have glibc keep all that is freed, unless the operator has set otherwise. Returns: what gives it back. Where
    the C library is another, neither does anything. `of_any_size`: larger blocks too, in one heap: those of further
    threads hold 64 MiB each."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return lambda: None
    if os.environ.keys().isdisjoint(_OPERATORS_OWN):
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        if of_any_size:
            libc.mallopt(_M_ARENA_MAX, 1)
            libc.mallopt(_M_MMAP_MAX, 0)
        else:
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    return lambda: libc.malloc_trim(0)


@dataclass(eq=False)
class HeapTrim:
    """Decides when to trim. `check` and `trim` are called by one at a time."""

    _use: Callable[[], int]
    """The bytes that requests and answers hold."""
    _trim: Callable[[], object]
    _private: Callable[[], int] = private_bytes
    _quiet: int = 0
    _checks_to_repeat: int = 0

    def __post_init__(self) -> None:
        self._least = self._left = self._private()
        """The least that it has ever had, and what the last trim has left."""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            # A server without a free descriptor cannot check; it may have one again the next time.
            with suppress(OSError):
                if self.check():
                    await asyncio.to_thread(self.trim)

    def check(self) -> bool:
        """Whether it is time to trim."""
        private = self._private()
        self._least = min(self._least, private)
        growth = private - self._least
        self._quiet = self._quiet + 1 if growth >= _WORTH_BYTES and self._use() <= growth * _LITTLE else 0
        self._checks_to_repeat -= 1
        return self._quiet >= _QUIET_CHECKS and (private - self._left >= _WORTH_BYTES or self._checks_to_repeat <= 0)

    def trim(self) -> None:
        """The rest is in use, as far as anybody can tell now."""
        self._trim()
        self._left = self._private()
        self._quiet = 0
        self._checks_to_repeat = _REPEAT_CHECKS
