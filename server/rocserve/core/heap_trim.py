"""Decides when a process that serves requests gives back to the system what they have freed: once they are over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from rocserve.core.freed_memory import WORTH_BYTES, private_bytes
from rocserve.core.steps import Steps

_CHECK_SECONDS = 1.0
_QUIET_CHECKS = 3
"""Checks in a row that must find little of requests, which come in bursts, before they count as over."""
_LITTLE = 1 / 16
"""Of that growth: requests that hold less than this are not what has grown."""
_REPEAT_CHECKS = 15
"""After a trim until the next without such growth: what was in use then may have been freed since. With 250 MiB free in
12,500 places the first trim takes 31 ms, a repetition 7."""


@dataclass(eq=False)
class HeapTrim:
    """Decides when to trim. `check` and `trim` are called by one at a time."""

    _use: Callable[[], int]
    """The bytes that requests and answers hold."""
    _trim: Callable[[], Iterator[object]]
    """Its steps; each takes some milliseconds at most."""
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
        self._quiet = self._quiet + 1 if growth >= WORTH_BYTES and self._use() <= growth * _LITTLE else 0
        self._checks_to_repeat -= 1
        return self._quiet >= _QUIET_CHECKS and (private - self._left >= WORTH_BYTES or self._checks_to_repeat <= 0)

    def trim(self) -> None:
        """All at once."""
        deque(self.steps(), 0)

    def steps(self) -> Steps[None]:
        """The rest is in use, as far as anybody can tell then."""
        for _ in self._trim():
            yield
        self._left = self._private()
        self._quiet = 0
        self._checks_to_repeat = _REPEAT_CHECKS
