"""Decides when a process that serves requests gives freed memory back to the system: after a burst of requests."""

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
"""Consecutive checks that must find little memory in requests before a burst counts as over."""
_LITTLE = 1 / 16
"""Fraction of the process's growth. If requests hold more, the growth is theirs, not freed memory's."""
_REPEAT_CHECKS = 15
"""Checks until a trim is repeated without new growth, because memory that was in use then may be free now. With 250 MiB
free in 12,500 places the first trim takes 31 ms, a repetition 7 ms."""


@dataclass(eq=False)
class HeapTrim:
    """Decides when to trim. Only one thread at a time may call `check` and run `steps`."""

    _use: Callable[[], int]
    """Returns the bytes that requests and answers hold."""
    _trim: Callable[[], Iterator[object]]
    """Gives memory back in steps of some milliseconds."""
    _private: Callable[[], int] = private_bytes
    _quiet: int = 0
    _checks_to_repeat: int = 0

    def __post_init__(self) -> None:
        self._least = self._left = self._private()
        """`_least`: the fewest private bytes ever seen. `_left`: the private bytes after the last trim."""

    async def run(self) -> None:
        """Check every second, and trim when it is time, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            # Reading /proc fails without a free descriptor; the next check may succeed.
            with suppress(OSError):
                if self.check():
                    await asyncio.to_thread(deque, self.steps(), 0)

    def check(self) -> bool:
        private = self._private()
        self._least = min(self._least, private)
        growth = private - self._least
        self._quiet = self._quiet + 1 if growth >= WORTH_BYTES and self._use() <= growth * _LITTLE else 0
        self._checks_to_repeat -= 1
        return self._quiet >= _QUIET_CHECKS and (private - self._left >= WORTH_BYTES or self._checks_to_repeat <= 0)

    def steps(self) -> Steps[None]:
        for _ in self._trim():
            yield
        self._left = self._private()
        self._quiet = 0
        self._checks_to_repeat = _REPEAT_CHECKS
