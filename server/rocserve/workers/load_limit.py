"""Bounds the time of a load."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator


class LoadLimit:
    """Bounds the time in which a worker loads and warms up its model. Time in which the engine reports progress is not
    counted, because engines report compiling, which has separate limits."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: 0 = no limit."""
        self._left = seconds or math.inf
        self._timeout: asyncio.Timeout | None = None
        self._compiles = False
        self._counted_from: float | None = None

    @contextlib.asynccontextmanager
    async def bounding(self) -> AsyncIterator[None]:
        """Bound a part of the load. Raises TimeoutError when the time is over; later parts then fail immediately."""
        async with asyncio.timeout(None) as self._timeout:
            self._count(not self._compiles)
            try:
                yield
            finally:
                self._count(False)
                self._timeout = None

    def note(self, doing: str) -> None:
        self._compiles = bool(doing)
        self._count(not self._compiles)

    def _count(self, counts: bool) -> None:
        if self._timeout is None:
            return
        now = asyncio.get_running_loop().time()
        if self._counted_from is not None:
            self._left = max(0.0, self._left - (now - self._counted_from))
        self._counted_from = now if counts else None
        if not self._timeout.expired():
            self._timeout.reschedule(now + self._left if counts and self._left < math.inf else None)
