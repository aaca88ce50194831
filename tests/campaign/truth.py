"""The right answers: the constant that a swapped model adds, and since when."""

from __future__ import annotations

import math
import threading
import time


class Constants:
    """The constants that a model Y = X + c may add at a time: the newest, and the previous one until the newest is
    served."""

    def __init__(self, first: float) -> None:
        self._lock = threading.Lock()
        self._spans = {first: (-math.inf, math.inf)}
        """Constant -> the interval in which a request may be answered by it."""

    def offer(self, constant: float) -> None:
        """Record that files with this constant will appear now."""
        with self._lock:
            self._spans[constant] = (time.monotonic(), math.inf)

    def settle(self, constant: float) -> None:
        """Record that a request was answered by this constant: later requests get no other."""
        now = time.monotonic()
        with self._lock:
            for other, (since, until) in list(self._spans.items()):
                if other != constant and until == math.inf:
                    self._spans[other] = (since, now)

    def allowed(self, begun: float, ended: float) -> set[float]:
        """The constants that may answer a request that began and ended at these times."""
        with self._lock:
            return {value for value, (since, until) in self._spans.items() if since <= ended and until >= begun}
