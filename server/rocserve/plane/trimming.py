"""Gives unneeded memory back to the system: the unneeded slots of heaps, and freed memory that the C library keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.steps import Steps
from rocserve.plane.freed_memory import WORTH_BYTES, FreedMemory
from rocserve.plane.heap import Heap
from rocserve.plane.loop import Alarm, PlaneLoop

TRIM_PERIOD_SECONDS = 10.0
_ROUNDS = 2
"""Rounds after which an unused heap has given back all its memory, and a burst of requests counts as over."""


@dataclass(slots=True)
class _Use:
    """How long a used heap is still trimmed."""

    take_returns: Callable[[], None] | None
    rounds: int = _ROUNDS
    """The rounds left."""


class Trimmer:
    """Trims heaps, and perhaps the process's freed memory, on the plane's thread."""

    def __init__(self, plane: PlaneLoop) -> None:
        self._plane = plane
        self._used: dict[Heap, _Use] = {}
        self._next_round = Alarm(plane)
        self._freed: FreedMemory | None = None
        self._held_bytes: Callable[[], int] = lambda: 0
        self._quiet_rounds = 0

    def trim_later(self, heap: Heap, take_returns: Callable[[], None] | None = None) -> None:
        """Trim a used heap in the next rounds. `take_returns` frees slots that readers no longer need."""
        use = self._used.get(heap)
        if use is None:
            self._used[heap] = _Use(take_returns)
            self._set()
        else:
            use.rounds = _ROUNDS

    def forget(self, heap: Heap) -> None:
        """Forget a heap, before it is closed."""
        self._used.pop(heap, None)

    def trim_process(self, freed: FreedMemory, held_bytes: Callable[[], int]) -> None:
        """Also give freed memory back from now on, after bursts of requests. `held_bytes` returns what requests and
        answers hold. From any thread, once."""
        self._freed, self._held_bytes = freed, held_bytes
        self._plane.call_soon(self._set)

    def _set(self) -> None:
        self._next_round.set(time.monotonic() + TRIM_PERIOD_SECONDS, self._begin)

    def _begin(self) -> None:
        self._plane.work_off(self._round())
        if self._used or self._freed is not None:
            self._set()

    def _round(self) -> Steps[None]:
        for heap, use in list(self._used.items()):
            if heap not in self._used:
                continue
            if use.take_returns is not None:
                use.take_returns()
            yield from heap.trim()
            use.rounds -= 1
            if not use.rounds:
                self.forget(heap)
            yield
        if self._freed is not None and self._is_burst_over(self._freed.grown_bytes()):
            yield from self._freed.give_back()

    def _is_burst_over(self, grown_bytes: int) -> bool:
        """Return whether requests have held little for some rounds, although the process has grown."""
        # If requests hold more, the growth is theirs, not freed memory's.
        is_quiet = grown_bytes >= WORTH_BYTES and self._held_bytes() <= grown_bytes / 16
        self._quiet_rounds = self._quiet_rounds + 1 if is_quiet else 0
        # Once more after six rounds, because memory that was in use then may be free now. With 250 MiB free in 12,500
        # places the first time takes 31 ms, a repetition 7 ms.
        return self._quiet_rounds % 6 == _ROUNDS
