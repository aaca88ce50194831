"""Slots, which bound how many models load at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

OVERDUE_PER_SLOT = 4
"""Loads that may run on without their slot, for each slot. More than 0, because a hanging load must not block the
others. Bounded, because loads that are slow for lack of memory or CPUs must not become ever more."""


class LoadSlots:
    """Bounds how many models load at the same time. Loads that take long or fail repeatedly do not block the others."""

    def __init__(self, count: int, patience_seconds: float) -> None:
        """`patience_seconds`: after this time a load passes its slot on to the next one."""
        self._free = count
        self._first_loads: deque[asyncio.Future[None]] = deque()
        self._retries: deque[asyncio.Future[None]] = deque()
        """Retries wait for a slot behind first loads."""
        self.patience_seconds = patience_seconds
        self._overdue_permits = asyncio.Semaphore(count * OVERDUE_PER_SLOT)
        """Permits of overdue loads that have passed their slots on. Without a permit an overdue load keeps its slot."""

    @property
    def is_full(self) -> bool:
        return not self._free

    @contextlib.asynccontextmanager
    async def acquire(self, compiles: bool, is_retry: bool = False) -> AsyncIterator[None]:
        """Wait for a slot and hold it. `compiles`: the load compiles a program first, usually in a bounded process
        of low priority; such loads pass their slots on without a permit. `is_retry`: the same content has failed
        before."""
        if self._free:
            self._free -= 1
        else:
            waiter = asyncio.get_running_loop().create_future()
            (self._retries if is_retry else self._first_loads).append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    # The slot was granted together with the cancellation.
                    self._release()
                raise
        passing_on = asyncio.ensure_future(self._pass_slot_on(compiles))
        try:
            yield
        finally:
            if passing_on.cancel():
                self._release()
            elif not compiles:
                self._overdue_permits.release()

    async def _pass_slot_on(self, compiles: bool) -> None:
        await asyncio.sleep(self.patience_seconds)
        if not compiles:
            await self._overdue_permits.acquire()
        self._release()

    def _release(self) -> None:
        for queue in (self._first_loads, self._retries):
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self._free += 1
