"""The watch over sequences that nobody uses."""

from __future__ import annotations

import time
from collections.abc import Callable

from rocserve.core.model_config import SequenceBatching
from rocserve.scheduling.alarm import Alarm
from rocserve.scheduling.sequence.book import SequenceBook
from rocserve.scheduling.timers import ExactTimers

_DEFAULT_MICROSECONDS = 1_000_000


class IdleWatch:
    """Not thread-safe: the scheduler that owns it calls it under its lock."""

    def __init__(
        self, batching: SequenceBatching, book: SequenceBook, timers: ExactTimers, on_due: Callable[[], None]
    ) -> None:
        """`on_due` is called on the timers' thread when it is time for `look`."""
        self._seconds = (batching.max_sequence_idle_microseconds or _DEFAULT_MICROSECONDS) / 1e6
        self._book = book
        self._alarm = Alarm(timers, on_due)

    def start(self) -> None:
        """There may be something to look at."""
        if not self._alarm.is_set:
            look_at = self._book.reap(time.monotonic(), self._seconds)
            if look_at is not None:
                self._alarm.set(look_at)

    def look(self) -> None:
        """End the sequences that have been idle for as long as they may."""
        self._alarm.rung()
        self.start()
