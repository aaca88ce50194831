"""Trimming gives the memory of unneeded heap slots back to the system."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.plane.heap import Heap
from rocserve.plane.loop import PlaneLoop

TRIM_PERIOD_SECONDS = 10.0
_BETWEEN_PIECES_SECONDS = 0.01
_AT_ONCE_SECONDS = 0.001
_ROUNDS = 2
"""Rounds after which an unused heap has given back all its memory."""


class HeapTrimmer:
    """Trims heaps on the plane's thread."""

    def __init__(self, plane: PlaneLoop) -> None:
        self._plane = plane
        self._used: dict[Heap, _Use] = {}
        self._to_trim: list[Heap] = []
        self._is_set = False

    def trim_later(self, heap: Heap, take_returns: Callable[[], None] | None = None) -> None:
        """Trim a used heap in the next rounds. `take_returns` frees slots that readers no longer need."""
        use = self._used.get(heap)
        if use is None:
            self._used[heap] = _Use(take_returns)
            if not self._is_set:
                self._is_set = True
                self._plane.call_at(time.monotonic() + TRIM_PERIOD_SECONDS, self._trim)
        else:
            use.rounds = _ROUNDS

    def forget(self, heap: Heap) -> None:
        """Forget a heap, before it is closed."""
        self._used.pop(heap, None)

    def _trim(self) -> None:
        """Give back a piece, or little of several heaps, because the thread does nothing else meanwhile."""
        heaps = self._to_trim
        if not heaps:
            heaps += self._used
        until = time.monotonic() + _AT_ONCE_SECONDS
        while heaps and time.monotonic() < until:
            if self._give_back(heaps[-1]):
                break
            heaps.pop()
        self._is_set = bool(heaps or self._used)
        if self._is_set:
            seconds = _BETWEEN_PIECES_SECONDS if heaps else TRIM_PERIOD_SECONDS
            self._plane.call_at(time.monotonic() + seconds, self._trim)

    def _give_back(self, heap: Heap) -> bool:
        """Give back a piece of a heap. Returns whether it has more to give."""
        use = self._used.get(heap)
        if use is None:
            return False
        if use.take_returns is not None:
            use.take_returns()
        if heap.trim():
            return True
        use.rounds -= 1
        if not use.rounds:
            del self._used[heap]
        return False


@dataclass(slots=True)
class _Use:
    take_returns: Callable[[], None] | None
    rounds: int = _ROUNDS
    """Rounds to come."""
