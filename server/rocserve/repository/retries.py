"""Retries of failed loads and unreadable folders: growing pauses, at a bounded rate."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rocserve.core.backoff import Backoff
from rocserve.core.errors import ServeError
from rocserve.observability.failures import Allowance


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed load or reading, and when it is tried again."""

    error: ServeError
    attempts: int = 1
    retry_at: float | None = None
    """time.monotonic() of the next try; None = no try is planned."""
    waits_for_files: bool = False
    """The same files would fail again, so the next try waits until they change."""
    failed_ms: int = field(default=0, compare=False)
    """When the load or the reading failed, since the epoch; 0 = nothing was tried, because it cannot succeed."""

    @property
    def text(self) -> str:
        """Return the reason as the repository index shows it."""
        tries = "once" if self.attempts == 1 else f"{self.attempts} times"
        if self.waits_for_files:
            return f"{self.error.text} (failed {tries}, not tried again until its files change)"
        if self.retry_at is None:
            return self.error.text
        seconds = math.ceil(max(0.0, self.retry_at - time.monotonic()))
        return f"{self.error.text} (failed {tries}, next try in {seconds} s)"

    def is_due(self) -> bool:
        return self.retry_at is not None and time.monotonic() >= self.retry_at


class Retries:
    """Decides whether and when to retry, and bounds the rate of retries: a thousand broken folders must not delay the
    good ones."""

    def __init__(self, backoff: Backoff, a_second: float = 1.0, burst: int = 8) -> None:
        """`burst`: retries that may run in a row after a time without any."""
        self._backoff = backoff
        self.enabled = True
        """False = nothing is tried again for now."""
        self._pause_seconds = 1 / a_second
        self._allowance = Allowance(burst, a_second)
        self._lock = asyncio.Lock()

    def next_failure(self, error: ServeError, previous: Failure | None = None, took_seconds: float = 0.0) -> Failure:
        """Record a failure. `previous`: how the same content failed before."""
        attempts = 1 if previous is None else previous.attempts + 1
        now_ms = time.time_ns() // 1_000_000
        if not self.enabled or not error.can_pass:
            return Failure(error, attempts, waits_for_files=self.enabled, failed_ms=now_ms)
        # At least as long as the last try: a load that fails after an hour of compiling must not compile all the time.
        pause_seconds = max(self._backoff.pause_seconds(attempts), took_seconds)
        return Failure(error, attempts, time.monotonic() + pause_seconds, failed_ms=now_ms)

    def schedule(self, failure: Failure, callback: Callable[[], None]) -> asyncio.Task[None] | None:
        """Call back when the next try is due and earlier due retries have run. Cancelling the task prevents the call.
        Returns None if there is no next try."""
        if failure.retry_at is None:
            return None
        work = self._run(failure.retry_at - time.monotonic(), callback)
        return asyncio.get_running_loop().create_task(work, name="retry")

    async def _run(self, pause_seconds: float, callback: Callable[[], None]) -> None:
        await asyncio.sleep(pause_seconds)
        async with self._lock:
            while not self._allowance.take():  # noqa: ASYNC110 - it notifies nobody
                await asyncio.sleep(self._pause_seconds)
        callback()
