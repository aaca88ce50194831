"""The timers of a scheduler: one that is set again and again, and the times at which requests expire."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from rocserve.core.requests import InferRequest
from rocserve.plane.loop import PlaneLoop, TimerHandle

_FEW = 256


class Alarm:
    """Fires at the earliest of the times that it was given. It knows whom it calls only while it is set."""

    def __init__(self, plane: PlaneLoop) -> None:
        self._plane = plane
        self._timer: tuple[float, TimerHandle] | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, when: float, on_fired: Callable[[], None]) -> None:
        """`when` is time.monotonic() seconds; `on_fired` begins with `fired`."""
        if self._timer is not None:
            if self._timer[0] <= when:
                return
            self._timer[1].cancel()
        self._timer = (when, self._plane.call_at(when, on_fired))

    def fired(self) -> None:
        """It may be set anew."""
        self._timer = None

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None


class Deadlines:
    """Keeps the times at which requests expire, and an alarm for the next.

    A request that has begun or was answered stays until its time, or until there are many like it.
    """

    def __init__(self, plane: PlaneLoop) -> None:
        self.alarm = Alarm(plane)
        self._heap: list[tuple[float, int, InferRequest]] = []
        self._numbers = itertools.count()
        self._most = _FEW

    def add(self, when: float, entry: InferRequest, on_due: Callable[[], None]) -> bool:
        """A request, and when it expires; `on_due` begins with `pop_due`. True: there are many, and it is time to call
        `keep_only`."""
        heapq.heappush(self._heap, (when, next(self._numbers), entry))
        self.alarm.set(when, on_due)
        return len(self._heap) > self._most

    def keep_only(self, entries: Iterable[InferRequest]) -> None:
        """Forget all but these."""
        self._heap = [
            (entry.expires_at, next(self._numbers), entry) for entry in entries if entry.expires_at is not None
        ]
        heapq.heapify(self._heap)
        self._most = max(_FEW, 2 * len(self._heap))

    def pop_due(self, now: float, on_due: Callable[[], None]) -> list[InferRequest]:
        """Those whose time has come, and the alarm is set for the next; `now` is time.monotonic()."""
        self.alarm.fired()
        due: list[InferRequest] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, entry = heapq.heappop(self._heap)
            # A request may have been given another time.
            if entry.expires_at == when:
                due.append(entry)
        if self._heap:
            self.alarm.set(self._heap[0][0], on_due)
        return due
