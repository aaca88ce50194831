"""Bounds how many models load beside each other, without letting one that takes an hour keep the others waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class LoadSlots:
    def __init__(self, count: int, patience_seconds: float) -> None:
        """`patience_seconds`: after these a load that may take long lets the next begin beside it."""
        self._free = asyncio.Semaphore(count)
        self._patience_seconds = patience_seconds

    @property
    def all_taken(self) -> bool:
        return self._free.locked()

    @contextlib.asynccontextmanager
    async def taken(self, may_take_long: bool) -> AsyncIterator[None]:
        """Wait for a slot and have it. `may_take_long`: as where a program is compiled first, mostly by a process of
        low priority; other loads are over soon and keep their slot, which bounds the work on the machine."""
        await self._free.acquire()
        handed_on = False

        def hand_on() -> None:
            nonlocal handed_on
            if not handed_on:
                handed_on = True
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._patience_seconds, hand_on) if may_take_long else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            hand_on()
