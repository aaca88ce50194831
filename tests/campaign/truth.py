"""Which answers are right: the constant that a swapped model adds, and since when."""

from __future__ import annotations

import math
import threading
import time


class Constants:
    """The constants that one model Y = X + c may add at a time: the newest one, and until that is served the one before
    it."""

    def __init__(self, first: float) -> None:
        self._lock = threading.Lock()
        self._spans = {first: (-math.inf, math.inf)}
        """Constant -> from when until when a request may be answered by it."""

    def offer(self, constant: float) -> None:
        """Files with the constant are about to be there."""
        with self._lock:
            self._spans[constant] = (time.monotonic(), math.inf)

    def settle(self, constant: float) -> None:
        """A request was answered by the constant: whoever asks from now on gets no other."""
        now = time.monotonic()
        with self._lock:
            for other, (since, until) in list(self._spans.items()):
                if other != constant and until == math.inf:
                    self._spans[other] = (since, now)

    def allowed(self, begun: float, ended: float) -> set[float]:
        """Those that may answer a request of that time."""
        with self._lock:
            return {value for value, (since, until) in self._spans.items() if since <= ended and until >= begun}
