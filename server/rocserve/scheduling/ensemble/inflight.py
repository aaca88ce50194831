"""How many requests to the member of one step may be under way at a time, over all requests to the ensemble."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class InflightLimit:
    """Each start is matched by one `end`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_starting = False

    def begin(self, start: Callable[[], None]) -> bool:
        """Call `start` now, or when those before it have ended; False: it has to wait."""
        if self._waiting or self._running >= self._limit:
            self._waiting.append(start)
            return False
        self._running += 1
        start()
        return True

    def end(self) -> None:
        """One that was started has ended."""
        self._running -= 1
        if self._is_starting:
            # It ended as soon as it was started: the loop below goes on, instead of one call within the other.
            return
        self._is_starting = True
        try:
            while self._waiting and self._running < self._limit:
                self._running += 1
                self._waiting.popleft()()
        finally:
            self._is_starting = False
