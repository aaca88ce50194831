"""What failed, and when it is tried again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.errors import ServeError
from rocserve.observability.rate_limits import Allowance

_RETRIES_A_SECOND = 1.0
_BURST = 8
"""Retries that may come at once after a time without any."""


@dataclass(slots=True)
class RetryPolicy:
    """Pauses that double from `first_seconds` up to `longest_seconds`; switched on and off for all who have it."""

    first_seconds: float
    longest_seconds: float
    enabled: bool = True

    def pause(self, attempts: int, took_seconds: float = 0.0) -> float | None:
        """Seconds until the next try after so many failed ones; None = it is not tried again by itself.

        Never less than the last try took: what fails after an hour of compiling is not to be at it all the time.
        """
        if not self.enabled:
            return None
        pause = min(self.longest_seconds, self.first_seconds * 2.0 ** min(attempts - 1, 60))
        return float(max(pause, took_seconds))


@dataclass(frozen=True, slots=True)
class Failure:
    error: ServeError
    content: str
    """The key of the content that failed."""
    attempts: int
    retry_at: float | None
    """time.monotonic() of the next try; None = only when the files change."""

    @property
    def text(self) -> str:
        """The reason as the index tells it."""
        if self.retry_at is None:
            return self.error.text
        seconds = math.ceil(max(0.0, self.retry_at - time.monotonic()))
        tries = "once" if self.attempts == 1 else f"{self.attempts} times"
        return f"{self.error.text} (failed {tries}, next try in {seconds} s)"

    def is_due(self) -> bool:
        return self.retry_at is not None and time.monotonic() >= self.retry_at


def next_failure(
    error: ServeError, content: str, previous: Failure | None, policy: RetryPolicy, took_seconds: float = 0.0
) -> Failure:
    """Record a failure; attempts count on only while the content stays the same."""
    attempts = previous.attempts + 1 if previous is not None and previous.content == content else 1
    pause = policy.pause(attempts, took_seconds)
    return Failure(error, content, attempts, None if pause is None else time.monotonic() + pause)


class Retry:
    """A retry that is to come."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    @property
    def is_cancelled(self) -> bool:
        return self._callback is None

    def cancel(self) -> None:
        """Without effect when it has come."""
        self._callback = None

    def run(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Retries:
    """Bounds how many failed models are tried again in a time, over the whole server: a thousand broken folders must
    not keep it from the good ones. All calls are made on the loop's thread."""

    def __init__(self, a_second: float = _RETRIES_A_SECOND, burst: int = _BURST) -> None:
        self._pause_seconds = 1 / a_second
        self._allowance = Allowance(burst, a_second)
        self._due: deque[Retry] = deque()
        self._is_waiting = False

    def add(self, pause_seconds: float, callback: Callable[[], None]) -> Retry:
        """Call back after the pause, as soon as the retries that were due before allow it."""
        retry = Retry(callback)
        asyncio.get_running_loop().call_later(pause_seconds, self._take, retry)
        return retry

    def _take(self, retry: Retry) -> None:
        self._due.append(retry)
        if not self._is_waiting:
            self._run()

    def _run(self) -> None:
        self._is_waiting = False
        while self._due:
            if self._due[0].is_cancelled:
                self._due.popleft()
            elif self._allowance.take():
                self._due.popleft().run()
            else:
                self._is_waiting = True
                asyncio.get_running_loop().call_later(self._pause_seconds, self._run)
                return
