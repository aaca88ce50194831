"""Gives memory that large traffic has left behind back to the system.

glibc keeps what is freed for the next who wants it, also when that is hundreds of megabytes and nobody comes
(malloc_trim(3)). A smaller mmap threshold would give large blocks back by themselves, and have each large request pay
for the faults of new pages; so the heap is trimmed once traffic has ceased.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_CHECK_SECONDS = 1.0
_QUIET_CHECKS = 3
"""Requests come in bursts: so many checks in a row must find little of them before they count as over."""
_WORTH_BYTES = 32 << 20
"""Growth since the last trim that is worth another."""
_LITTLE = 1 / 16
"""Of that growth: requests that hold less than this are not what has grown."""


def private_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """The memory of this process alone, without what it shares with workers (proc_pid_statm(5))."""
    _, resident, shared = map(int, statm.read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def glibc_trim() -> Callable[[], object]:
    """Does nothing where the C library is another."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept_bytes: None)
    return lambda: trim(0)


class HeapTrim:
    """Decides when to trim. `check` and `trim` are called by one at a time."""

    def __init__(
        self,
        use: Callable[[], int],
        trim: Callable[[], object],
        private: Callable[[], int] = private_bytes,
    ) -> None:
        """`use`: the bytes that requests and answers hold."""
        self._use = use
        self._trim = trim
        self._private = private
        self._least = private()
        self._quiet = 0

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
        return self._quiet >= _QUIET_CHECKS

    def trim(self) -> None:
        """What is left afterwards is in use, and is not looked for again."""
        self._trim()
        self._least = self._private()
        self._quiet = 0
