"""Bounds how often something that goes on is logged or tried."""

from __future__ import annotations

import time


class Allowance:
    """Lets so many through at once, and from then on so many a second. For one thread."""

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = float(burst)
        self._per_second = per_second
        self._left = self._burst
        self._counted_at = time.monotonic()

    def take(self, amount: int = 1) -> bool:
        """Whether so many more may pass now."""
        if self.left < amount:
            return False
        self._left -= amount
        return True

    @property
    def left(self) -> int:
        """How many may pass now."""
        now = time.monotonic()
        self._left = min(self._left + (now - self._counted_at) * self._per_second, self._burst)
        self._counted_at = now
        return int(self._left)


class LogRateLimit:
    """Lets the first message through, and then one in so many seconds. For one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether it is to be logged now; whoever asks and hears yes logs it."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
