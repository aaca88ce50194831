"""What schedulers need of the thread that calls them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class ExactTimers(Protocol):
    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """`when` is time.monotonic() seconds."""


class RoughTimers(Protocol):
    def call_about(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """The same where some milliseconds more do not matter."""


class Timers(ExactTimers, RoughTimers, Protocol):
    """Calls back on the completion thread (rocserve.workers.completion.CompletionThread)."""

    collecting: bool
    """More requests are coming on this thread this very moment."""

    def when_collected(self, callback: Callable[[], None]) -> None:
        """Call back once they are all there."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back as soon as the thread gets there. From any thread."""
