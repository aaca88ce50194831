"""How many requests to the member of one step may be under way at a time, over all requests to the ensemble."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class InflightLimit:
    """Callable from any thread; each start is matched by one `end`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_starting = False

    def begin(self, start: Callable[[], None]) -> bool:
        """Call `start` now, or when those before it have ended; False: it has to wait."""
        with self._lock:
            if self._waiting or self._running >= self._limit:
                self._waiting.append(start)
                return False
            self._running += 1
        start()
        return True

    def end(self) -> None:
        """One that was started has ended."""
        with self._lock:
            self._running -= 1
            if self._is_starting or not self._waiting:
                return
            self._is_starting = True
        # A loop, for one that ends as soon as it starts would lead back here once for each that waits.
        while (start := self._next()) is not None:
            start()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._waiting and self._running < self._limit:
                self._running += 1
                return self._waiting.popleft()
            self._is_starting = False
            return None
