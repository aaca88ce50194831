"""A data plane's loop that the test's thread turns: when a call returns, the scheduler has done its work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rocserve.plane.loop import TimerHandle, TimerQueue
from support.waiting import PATIENCE_SECONDS


class HandLoop:
    """Stands in for rocserve.plane.loop.PlaneLoop."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._soon: deque[Callable[[], None]] = deque()
        self._ends: dict[Callable[[], None], None] = {}
        self._timers = TimerQueue()

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        handle = TimerHandle(self._timers, when, callback)
        self._timers.push(handle)
        return handle

    def work_off(self, steps: Iterator[None]) -> None:
        for _ in steps:
            pass

    def at_end_of_turn(self, callback: Callable[[], None]) -> None:
        self._ends[callback] = None

    def turn(self) -> None:
        """Run due callbacks until none is due."""
        while True:
            callbacks = list(self._soon)
            self._soon.clear()
            now = time.monotonic()
            while (due := self._timers.pop_due(now)) is not None:
                callbacks.append(due)
            if not callbacks:
                callbacks = list(self._ends)
                self._ends.clear()
            if not callbacks:
                return
            for callback in callbacks:
                callback()

    def run(self, seconds: float) -> None:
        """Turn the loop for some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()
            self._sleep(0.001)
        self.turn()

    def wait_for(self, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Turn the loop until a condition holds."""
        end = time.monotonic() + seconds
        self.turn()
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            self._sleep(0.001)
            self.turn()

    def turning(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that the loop turns after it."""

        def turned(*arguments: Any, **named: Any) -> Any:
            try:
                return call(*arguments, **named)
            finally:
                self.turn()

        return turned


class Turned:
    """Wraps an object so that the loop turns after each of the object's calls."""

    def __init__(self, loop: HandLoop, inner: object) -> None:
        self.inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return self._loop.turning(value) if callable(value) else value


class Flag:
    """Stands in for threading.Event: the loop turns while a test waits for it."""

    def __init__(self, loop: HandLoop) -> None:
        self._loop = loop
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        self._loop.wait_for(lambda: self._is_set, seconds)
        return True
