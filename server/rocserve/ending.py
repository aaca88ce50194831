"""The end of the server: the signals that ask for it, and the parts that end one after the other."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

_CANCEL_SECONDS = 5.0
"""How long a part that is cut short may take to let go of what it has."""


class Ending:
    """Ends each part, whatever the others do: what fails or takes too long is logged, and the next part has its turn.
    The first signal asks for the end. A second one cuts short what is under way and all that follows. A third ends the
    supervisor, and with it this process whatever it is doing."""

    def __init__(self, log: logging.Logger, drain_seconds: float, exit_timeout_seconds: float) -> None:
        self._log = log
        self._drain_seconds = drain_seconds
        self._exit_timeout_seconds = exit_timeout_seconds
        self._asked = asyncio.Event()
        self._at_once = asyncio.Event()

    @property
    def is_at_once(self) -> bool:
        """Whether a second signal has come."""
        return self._at_once.is_set()

    def on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self._asked.is_set():
            pause = f"not ready from now on; in {self._drain_seconds:g} s " if self._drain_seconds else ""
            self._log.info("%s: %sfinishing the work in flight (at most %g s)", name, pause, self._exit_timeout_seconds)
            self._asked.set()
            return
        self._log.warning("%s again: ending at once", name)
        self._at_once.set()

    async def wait(self) -> None:
        """Until a signal asks for the end."""
        await self._asked.wait()

    async def end(self, part: str, work: Coroutine[Any, Any, object], seconds: float | None = None) -> None:
        """Run what ends a part, for at most `seconds`, and no longer than until a second signal. Never raises."""
        task = asyncio.ensure_future(work)
        cut_short = asyncio.ensure_future(self._at_once.wait())
        await asyncio.wait((task, cut_short), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        cut_short.cancel()
        if not task.done():
            if not self.is_at_once:
                self._log.warning("the exit time-out passed: %s had not ended", part)
            task.cancel()
            await asyncio.wait((task,), timeout=_CANCEL_SECONDS)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("%s did not end as it should; the other parts end all the same", part, exc_info=error)
