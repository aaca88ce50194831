"""Bounds how often something that goes on is logged or tried."""

from __future__ import annotations

import time


class Allowance:
    """Lets `burst` through at once, and from then on `per_second`. For one thread.

    With a burst of 1 a message is logged at once, and then at most one in 1 / `per_second` seconds.
    """

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = float(burst)
        self._per_second = per_second
        self._left = self._burst
        self._counted_at = time.monotonic()

    def take(self, amount: int = 1) -> bool:
        """Whether `amount` more may pass now."""
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
