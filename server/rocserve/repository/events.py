"""Remembers what has become of models: the changes of their rows in the index."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.core.serving import IndexEntry

_KEPT = 200
"""Events; a reason may have some kilobytes."""


@dataclass(frozen=True, slots=True)
class RepositoryEvent:
    number: int
    time_ms: int
    """Since the epoch."""
    row: IndexEntry


class RepositoryEvents:
    """All calls are made on the loop."""

    def __init__(self) -> None:
        self._events: deque[RepositoryEvent] = deque(maxlen=_KEPT)
        self._rows: dict[str, Sequence[IndexEntry]] = {}
        """By the models' keys, as they were last."""
        self._number = 0
        self._next = asyncio.Event()
        """Set with the next event, and then replaced."""
        self.has_ended = False

    def note(self, key: str, rows: Sequence[IndexEntry]) -> None:
        """What a model's rows are now."""
        known = set(self._rows.get(key, ()))
        self._rows[key] = [IndexEntry(row.name, row.version, row.state, row.reason) for row in rows]
        for row in self._rows[key]:
            if row not in known:
                self._number += 1
                self._events.append(RepositoryEvent(self._number, time.time_ns() // 1_000_000, row))
                self._wake()

    def end(self) -> None:
        """The server ends: `after` waits no longer."""
        self.has_ended = True
        self._wake()

    async def after(self, number: int, seconds: float) -> Sequence[RepositoryEvent]:
        """Those after an event; the next ones where there are none yet, or none after some time. One that has not been
        yet is another server's: all are returned then."""
        number = 0 if number > self._number else number
        if number == self._number and not self.has_ended:
            try:
                async with asyncio.timeout(seconds):
                    await self._next.wait()
            except TimeoutError:
                return ()
        return [event for event in self._events if event.number > number]

    def _wake(self) -> None:
        waited, self._next = self._next, asyncio.Event()
        waited.set()
