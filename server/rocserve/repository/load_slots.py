"""Bounds how many models load beside each other, without letting those that take long, or fail again and again, keep
the others waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

OVERDUE_PER_SLOT = 4
"""Loads that may go on without their slot, for each slot: what hangs must not keep others from loading, and what takes
long for want of memory or of CPUs must not be joined by ever more."""


class LoadSlots:
    def __init__(self, count: int, patience_seconds: float) -> None:
        """`patience_seconds`: after these a load lets the next begin beside it."""
        self._free = _PrioritySemaphore(count)
        self.patience_seconds = patience_seconds
        self._places = count * OVERDUE_PER_SLOT
        """How many more loads may hand their slots on."""
        self._waiting: deque[_Load] = deque()
        """Overdue ones that have to keep their slots."""

    @property
    def all_taken(self) -> bool:
        return not self._free.count

    @contextlib.asynccontextmanager
    async def taken(self, compiles: bool, is_retry: bool = False) -> AsyncIterator[None]:
        """Wait for a slot and have it. `compiles`: a program is compiled first, mostly by a process of low priority and
        within bounds of its own; any number of such loads hand their slots on. `is_retry`: the same has failed before;
        what is new goes first."""
        await self._free.acquire(is_retry)
        load = _Load(needs_place=not compiles)
        timer = asyncio.get_running_loop().call_later(self.patience_seconds, self._overdue, load)
        try:
            yield
        finally:
            timer.cancel()
            self._ended(load)

    def _overdue(self, load: _Load) -> None:
        if load.needs_place:
            if not self._places:
                self._waiting.append(load)
                return
            self._places -= 1
        load.has_slot = False
        self._free.release()

    def _ended(self, load: _Load) -> None:
        if load.has_slot:
            self._free.release()
            with contextlib.suppress(ValueError):
                self._waiting.remove(load)
        elif load.needs_place:
            self._places += 1
            if self._waiting:
                self._overdue(self._waiting.popleft())


class _Load:
    def __init__(self, needs_place: bool) -> None:
        self.needs_place = needs_place
        self.has_slot = True


class _PrioritySemaphore:
    """A semaphore with two queues, of which one goes first."""

    def __init__(self, count: int) -> None:
        self.count = count
        """Free ones."""
        self._first: deque[asyncio.Future[None]] = deque()
        self._later: deque[asyncio.Future[None]] = deque()

    async def acquire(self, later: bool) -> None:
        if self.count:
            self.count -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        (self._later if later else self._first).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                # It came together with the cancellation.
                self.release()
            raise

    def release(self) -> None:
        for queue in (self._first, self._later):
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self.count += 1
