"""Tracks request deadlines; an alarm fires at the earliest."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Callable, Iterable

from rocserve.core.requests import InferRequest
from rocserve.plane.loop import Alarm, PlaneLoop

_MOST_UNCHECKED = 256
"""Expiry times that are kept without checking which of their requests still wait."""


class Deadlines:
    """Keeps the times at which requests expire, and an alarm for the earliest. The time of a request that has begun
    stays until it passes or there are many such times; the request, whose data may be large, does not stay."""

    def __init__(self, plane: PlaneLoop) -> None:
        self.alarm = Alarm(plane)
        self._heap: list[tuple[float, int, weakref.ref[InferRequest]]] = []
        self._numbers = itertools.count()
        self._most = _MOST_UNCHECKED

    def add(self, when: float, request: InferRequest, on_due: Callable[[], None]) -> bool:
        """Add a request and its expiry time; `on_due` must call `pop_due`. Returns True if there are so many times that
        the caller must call `keep_only`."""
        heapq.heappush(self._heap, (when, next(self._numbers), weakref.ref(request)))
        self.alarm.set(when, on_due)
        return len(self._heap) > self._most

    def keep_only(self, requests: Iterable[InferRequest]) -> None:
        self._heap = [
            (request.expires_at, next(self._numbers), weakref.ref(request))
            for request in requests
            if request.expires_at is not None
        ]
        heapq.heapify(self._heap)
        self._most = max(_MOST_UNCHECKED, 2 * len(self._heap))

    def pop_due(self, now: float, on_due: Callable[[], None]) -> list[InferRequest]:
        """Remove and return the requests whose time has come by `now`, time.monotonic(); set the alarm for the next."""
        due: list[InferRequest] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, reference = heapq.heappop(self._heap)
            request = reference()
            # The request's time may have changed.
            if request is not None and request.expires_at == when:
                due.append(request)
        if self._heap:
            self.alarm.set(self._heap[0][0], on_due)
        return due
