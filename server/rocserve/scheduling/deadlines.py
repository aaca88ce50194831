"""The times at which requests expire, and the timer for the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from rocserve.scheduling.alarm import Alarm
from rocserve.scheduling.entry import QueuedRequest
from rocserve.scheduling.timers import ExactTimers

_FEW = 256


class Deadlines:
    """Not thread-safe: the scheduler that owns it calls it under its lock.

    A request that has begun or was answered stays until its time, or until there are many like it.
    """

    def __init__(self, timers: ExactTimers, on_due: Callable[[], None]) -> None:
        """`on_due` is called on the timers' thread when `pop_due` has something to give."""
        self._alarm = Alarm(timers, on_due)
        self._heap: list[tuple[float, int, QueuedRequest]] = []
        self._numbers = itertools.count()
        self._most = _FEW

    def add(self, entry: QueuedRequest) -> bool:
        """A request that has a time to expire at; True: there are many, and it is time to call `keep_only`."""
        when = entry.expires_at
        assert when is not None
        heapq.heappush(self._heap, (when, next(self._numbers), entry))
        self._alarm.set(when)
        return len(self._heap) > self._most

    def keep_only(self, entries: Iterable[QueuedRequest]) -> None:
        """Forget all but these."""
        self._heap = [
            (entry.expires_at, next(self._numbers), entry) for entry in entries if entry.expires_at is not None
        ]
        heapq.heapify(self._heap)
        self._most = max(_FEW, 2 * len(self._heap))

    def pop_due(self, now: float) -> list[QueuedRequest]:
        """Those whose time has come, and the timer is set for the next; `now` is time.monotonic()."""
        self._alarm.rung()
        due: list[QueuedRequest] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, entry = heapq.heappop(self._heap)
            # A request may have been given another time.
            if entry.expires_at == when:
                due.append(entry)
        if self._heap:
            self._alarm.set(self._heap[0][0])
        return due
