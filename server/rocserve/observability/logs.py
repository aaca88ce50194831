"""The log: one line a message on standard error or in a file, in one of tritonserver's two formats."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from logging.handlers import WatchedFileHandler
from typing import Any

from rocserve.core.printable import printable
from rocserve.settings import LogSettings

ROOT = "rocserve"
ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"


class ServerLog:
    """The log and its settings, which may be changed from any thread while the server runs.

    All parts' loggers hang under `logger`; other libraries' loggers are left alone.
    """

    def __init__(self, settings: LogSettings, environment: Mapping[str, str] = os.environ) -> None:
        """`environment`: TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 in it has messages written as they are, not in quotes.
        Raises: OSError: the log file cannot be opened."""
        handler = _LogFile(settings.file) if settings.file else logging.StreamHandler()
        handler.addFilter(self._is_wanted)
        self._formatter = _LineFormatter(escapes=environment.get(ESCAPE_VARIABLE) != "0")
        handler.setFormatter(self._formatter)
        self.logger = logging.getLogger(ROOT)
        self.logger.handlers = [handler]
        self.logger.propagate = False
        self.on_change: list[Callable[[], object]] = []
        """All are called when settings have changed."""
        self.settings = settings
        self._apply(settings)

    def change(self, **changes: Any) -> None:
        """New values by the names of LogSettings, from the next line on; `file` stays as it is."""
        self._apply(replace(self.settings, **changes))
        for callback in self.on_change:
            callback()

    def close(self) -> None:
        """Let go of the file."""
        for handler in self.logger.handlers:
            handler.close()
        self.logger.handlers = []

    def _apply(self, settings: LogSettings) -> None:
        self.settings = settings
        self._formatter.is_iso8601 = settings.format == "ISO8601"
        self.logger.setLevel(logging.DEBUG if settings.verbose else logging.INFO)

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        settings = self.settings
        if record.levelno >= logging.ERROR:
            return settings.error
        if record.levelno >= logging.WARNING:
            return settings.warning
        if record.levelno >= logging.INFO:
            return settings.info
        return settings.verbose > 0


class _LogFile(WatchedFileHandler):
    """Opens a file that was moved away, by logrotate say, again under its name. A line that cannot be written, for the
    folder has gone or the disk is full, goes to standard error: nothing that logs fails."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)
            return
        elsewhere = logging.StreamHandler()
        elsewhere.setFormatter(self.formatter)
        elsewhere.emit(record)


class _LineFormatter(logging.Formatter):
    """`I1121 14:03:05.123456 4711 scan_loop.py:48] "text"`, or with an ISO 8601 time in UTC first."""

    def __init__(self, escapes: bool) -> None:
        super().__init__()
        self._escapes = escapes
        self.is_iso8601 = False

    def format(self, record: logging.LogRecord) -> str:
        # tritonserver has three letters; details are information to it.
        level = "E" if record.levelno >= logging.ERROR else "W" if record.levelno >= logging.WARNING else "I"
        moment = time.gmtime(record.created)
        if self.is_iso8601:
            head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {level}"
        else:
            micros = int(record.created % 1 * 1e6)
            head = f"{level}{time.strftime('%m%d %H:%M:%S', moment)}.{micros:06d}"
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        text = record.getMessage()
        if self._escapes:
            # Without what JSON leaves but a terminal would obey, and what has no form in UTF-8.
            quoted = json.dumps(text + trace, ensure_ascii=False)
            text = printable(quoted.encode(errors="backslashreplace").decode())
        else:
            text = printable(text) + trace
        return f"{head} {record.process} {record.filename}:{record.lineno}] {text}"


class LinesWithLevels(logging.Formatter):
    """Of a process whose lines the server's log takes in: the level before each, also those of a traceback."""

    def __init__(self, prefix: Callable[[], str] = str) -> None:
        """`prefix`: between the level and the line."""
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines() or [""]
        prefix = self._prefix()
        return "\n".join(f"{record.levelname} {prefix}{line}" for line in lines)
