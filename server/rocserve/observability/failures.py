"""Reports unexpected exceptions to clients and the log, and limits how often messages are logged."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

from rocserve.core.errors import ServeError, internal
from rocserve.core.private_paths import PrivatePaths


class Allowance:
    """Limits a rate: allows `burst` immediately, and then `per_second`. Used on one thread. With a burst of 1 a message
    is logged immediately, and then at most once in 1 / `per_second` seconds."""

    __slots__ = ("_burst", "_clock", "_counted_at", "_left", "_per_second")

    def __init__(self, burst: float, per_second: float, clock: Callable[[], float] | None = None) -> None:
        self._burst = self._left = float(burst)
        self._per_second = per_second
        self._clock = clock or time.monotonic
        self._counted_at = self._clock()

    def take(self, amount: int = 1) -> bool:
        if self._refilled() < amount:
            return False
        self._left -= amount
        return True

    @property
    def left(self) -> int:
        return int(self._refilled())

    @property
    def is_full(self) -> bool:
        return self._refilled() == self._burst

    def _refilled(self) -> float:
        now = self._clock()
        self._left = min(self._left + (now - self._counted_at) * self._per_second, self._burst)
        self._counted_at = now
        return self._left


_SECONDS_BETWEEN_TRACEBACKS = 10.0
"""For each line of code. Limited, because clients can repeat a request as fast as they like."""


class RequestFailures:
    """Logs tracebacks: at most one in ten seconds for each line of code that raises. Safe on any thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._paths = PrivatePaths()
        self._lock = threading.Lock()
        # The program has a limited number of lines that raise, so these do not grow without limit.
        self._allowances: dict[tuple[CodeType, int] | None, Allowance] = {}
        self._left_out: Counter[tuple[CodeType, int] | None] = Counter()

    def error_of(self, what: str, error: Exception) -> ServeError:
        """Return the client's error for a failed request. Unexpected errors are logged with `what`, the request."""
        if isinstance(error, ServeError):
            return error
        self.report(f"{what} failed", error)
        return internal(self._paths.hide(f"{type(error).__name__}: {error}"))

    def report(self, text: str, error: Exception) -> None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = None if trace is None else (trace.tb_frame.f_code, trace.tb_lineno)
        with self._lock:
            if not self._allowances.setdefault(line, Allowance(1, 1 / _SECONDS_BETWEEN_TRACEBACKS)).take():
                self._left_out[line] += 1
                return
            left_out = self._left_out.pop(line, 0)
        since = f" ({left_out} more like it since the last logged one)" if left_out else ""
        self._log.error("%s%s", text, since, exc_info=error)


def log_loop_error(log: logging.Logger, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that nobody awaits. Bound to a log, this is the exception handler of a loop of asyncio."""
    log.error("%s", context.get("message", "error in the event loop"), exc_info=context.get("exception"))
