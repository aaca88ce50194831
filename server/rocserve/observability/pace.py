"""How often something that goes on is said in the log."""

from __future__ import annotations

import time


class Pace:
    """Lets the first remark through, and then one in so many seconds. For one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether it is to be said now; whoever asks and hears yes says it."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
