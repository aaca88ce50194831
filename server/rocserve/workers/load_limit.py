"""Bounds the time that a worker takes to load its model and to warm it up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class LoadLimit:
    """Not counted is the time in which the engine says that it compiles: that has limits of its own."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: 0 = no limit."""
        self._left = seconds or None
        self._timeout: asyncio.Timeout | None = None
        self._compiles = False
        self._since = 0.0

    @contextlib.asynccontextmanager
    async def bounding(self) -> AsyncIterator[None]:
        """A part of the load. Raises: TimeoutError, the time is over; so it is for what follows."""
        async with asyncio.timeout(None) as self._timeout:
            self._go_on()
            try:
                yield
            finally:
                self._pause()
                self._timeout = None

    def told(self, doing: str) -> None:
        """The engine says what it is at; "" = nothing that takes long."""
        self._pause()
        self._compiles = bool(doing)
        self._go_on()

    def _go_on(self) -> None:
        self._since = asyncio.get_running_loop().time()
        if self._timeout is not None and self._left is not None and not self._compiles:
            self._timeout.reschedule(self._since + self._left)

    def _pause(self) -> None:
        if self._timeout is None or self._left is None or self._compiles or self._timeout.expired():
            return
        self._left = max(0.0, self._left - (asyncio.get_running_loop().time() - self._since))
        self._timeout.reschedule(None)
