"""Errors that reach nobody but the event loop, in the server's log."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import Any

from rocserve.observability.rate_limits import LogRateLimit

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SECONDS_BETWEEN_ERRORS = 10.0


class LoopErrors:
    """An exception handler for asyncio's loops. That connections cannot be accepted is said in one line, now and then:
    asyncio tells of it for each one that waits, again every second, with a traceback."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._rate_limit = LogRateLimit(_SECONDS_BETWEEN_ERRORS)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _EXHAUSTED and "socket" in context:
            self._log_exhausted(error.errno)
            return
        self._log.error("%s", context.get("message", "error in the event loop"), exc_info=error)

    def _log_exhausted(self, number: int) -> None:
        if self._rate_limit.is_due():
            self._log.error(
                "connections cannot be accepted: %s; raise the hard limit of open files (ulimit -Hn, LimitNOFILE), or"
                " let fewer clients connect",
                os.strerror(number),
            )
