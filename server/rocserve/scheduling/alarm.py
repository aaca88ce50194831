"""A timer that is set again and again: it rings at the earliest of the times that it was given."""

from __future__ import annotations

from collections.abc import Callable

from rocserve.scheduling.timers import ExactTimers, TimerHandle


class Alarm:
    """Not thread-safe: its owner sets it, and calls `rung` when it has rung, under its lock."""

    def __init__(self, timers: ExactTimers, on_ring: Callable[[], None]) -> None:
        """`on_ring` is called on the timers' thread."""
        self._timers = timers
        self._on_ring = on_ring
        self._set: tuple[float, TimerHandle] | None = None

    def set(self, when: float) -> None:
        """`when` is time.monotonic() seconds."""
        if self._set is not None:
            if self._set[0] <= when:
                return
            self._set[1].cancel()
        self._set = (when, self._timers.call_at(when, self._on_ring))

    @property
    def is_set(self) -> bool:
        return self._set is not None

    def rung(self) -> None:
        """It has rung, and is to be set anew."""
        self._set = None
