"""Virtual time for tests of asyncio code: hardly any passes while something runs, and a wait for a timer takes none."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec
from unittest.mock import patch

_TURN_SECONDS = 1e-6
"""A turn of the loop takes some time: timers are set again without end at one moment otherwise."""

_Arguments = ParamSpec("_Arguments")


def in_virtual_time(test: Callable[_Arguments, Coroutine[Any, Any, None]]) -> Callable[_Arguments, None]:
    """Run an asynchronous test in virtual time, which time.monotonic() tells, too. Not for threads and processes:
    their time is the real one."""

    @functools.wraps(test)
    def run(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        loop = _VirtualTimeLoop()
        with patch("time.monotonic", loop.time), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(test(*arguments, **named))

    return run


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(_ImpatientSelector(self._pass))

    def time(self) -> float:
        return self._seconds

    def _pass(self, seconds: float) -> None:
        self._seconds += seconds


class _ImpatientSelector(selectors.EpollSelector):
    """Does not wait until a time is over, but lets it pass."""

    def __init__(self, let_pass: Callable[[float], None]) -> None:
        super().__init__()
        self._let_pass = let_pass

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()
        ready = super().select(0)
        self._let_pass(_TURN_SECONDS if ready else max(_TURN_SECONDS, timeout))
        return ready
