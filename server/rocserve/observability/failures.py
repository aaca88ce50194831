"""Reports faults of the server: one that a request met, of which the client gets a status and the log a traceback now
and then, and errors that reach nobody but the event loop. Bounds how often something that goes on is logged or
tried."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

from rocserve.core.errors import ServeError, internal
from rocserve.core.private_paths import PrivatePaths


class Allowance:
    """Lets `burst` through at once, and from then on `per_second`. For one thread.

    With a burst of 1 a message is logged at once, and then at most one in 1 / `per_second` seconds.
    """

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
        """Whether it is as if nothing had been taken."""
        return self._refilled() == self._burst

    def _refilled(self) -> float:
        now = self._clock()
        self._left = min(self._left + (now - self._counted_at) * self._per_second, self._burst)
        self._counted_at = now
        return self._left


_SECONDS_BETWEEN_TRACEBACKS = 10.0
"""Of one line of code; clients can repeat the same request as fast as they like."""


class RequestFailures:
    """Reports unexpected exceptions: a traceback of the first at each line of code, then one in ten seconds, which
    says how many were left out. Callable from any thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._paths = PrivatePaths()
        self._lock = threading.Lock()
        # As many as the program has lines that raise.
        self._allowances: dict[tuple[CodeType, int] | None, Allowance] = {}
        self._left_out: Counter[tuple[CodeType, int] | None] = Counter()

    def error_of(self, what: str, error: Exception) -> ServeError:
        """The error for the client of a failed request. An error that is no ServeError is the server's own fault, and
        `what`, the request, is reported with it."""
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
        since = f" ({left_out} more like it since the last that was logged)" if left_out else ""
        self._log.error("%s%s", text, since, exc_info=error)


_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SECONDS_BETWEEN_ERRORS = 10.0


class LoopErrors:
    """An exception handler for asyncio's loops. That connections cannot be accepted is said in one line, now and then:
    asyncio reports it for each one that waits, again every second, with a traceback."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._allowance = Allowance(1, 1 / _SECONDS_BETWEEN_ERRORS)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _EXHAUSTED and "socket" in context:
            if self._allowance.take():
                self._log.error(
                    "connections cannot be accepted: %s; raise the hard limit of open files (ulimit -Hn, LimitNOFILE),"
                    " or let fewer clients connect",
                    os.strerror(error.errno),
                )
            return
        self._log.error("%s", context.get("message", "error in the event loop"), exc_info=error)
