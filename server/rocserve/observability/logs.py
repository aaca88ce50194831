"""The log: one line per message to standard error or a file, in one of tritonserver's two formats or as JSON."""

from __future__ import annotations

import json
import logging
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from rocserve.core.printable import printable
from rocserve.observability.json_lines import LONGEST_LINE, JsonFormatter, unfinished
from rocserve.settings import LogSettings

ROOT = "rocserve"


class WholeLines:
    """A stream for handlers of `logging`. Nothing is buffered, so every logged line is written even if the process is
    killed right after, and lines of several processes do not mix. If a line can be written only in part, because the
    disk is full, `take_back` is called with the number of its bytes that were written."""

    encoding = "utf-8"

    def __init__(self, descriptor: int, take_back: Callable[[int], None] | None = None) -> None:
        self._descriptor = descriptor
        self._take_back = take_back

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> None:
        """Write text that ends with the end of a line. Raises OSError."""
        for line in text.encode(errors="backslashreplace").splitlines(keepends=True):
            self._write_line(line)

    def _write_line(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):
                try:
                    written += os.write(self._descriptor, line[written:])
                except BlockingIOError:
                    # The parent process may have made the standard error non-blocking.
                    select.select((), (self._descriptor,), ())
        except OSError:
            if written and self._take_back is not None:
                self._take_back(written)
            raise

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        os.close(self._descriptor)


class ServerLog:
    """The log and its settings, which any thread may change. All parts' loggers are below `logger`."""

    def __init__(self, settings: LogSettings, environment: Mapping[str, str] = os.environ) -> None:
        """TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 turns off quotes. Raises OSError if the file cannot be opened."""
        is_json = settings.format == "json"
        handler = _LogFile(settings.file, is_json) if settings.file else logging.StreamHandler(_standard_error())
        handler.addFilter(self._is_wanted)
        self._formatter = _LineFormatter(
            escapes=environment.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0",
            # Users turn off colours in all programs with NO_COLOR (no-color.org).
            has_colours=not settings.file and sys.stderr.isatty() and not environment.get("NO_COLOR"),
        )
        handler.setFormatter(JsonFormatter() if is_json else self._formatter)
        self.logger = logging.getLogger(ROOT)
        self.logger.handlers = [handler]
        self.logger.propagate = False
        self.on_change: list[Callable[[], object]] = []
        """Called after each call of `change`."""
        self.settings = settings
        self._apply(settings)

    def change(self, **changes: Any) -> None:
        """Set fields of LogSettings from the next line on; `file`, and the format json, cannot change."""
        self._apply(replace(self.settings, **changes))
        for callback in self.on_change:
            callback()

    def close(self) -> None:
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


def _standard_error() -> WholeLines:
    return WholeLines(sys.stderr.fileno())


class _LogFile(WatchedFileHandler):
    """Reopens a file that was moved away, for example by logrotate. A line that cannot be written (missing folder, full
    disk) goes to standard error: logging never fails. The file never keeps part of a line: the part that a full disk
    leaves is removed, and so is the part that a killed server has left of JSON."""

    def __init__(self, file: Path, is_json: bool) -> None:
        self._is_json = is_json
        super().__init__(file)

    def _open(self) -> Any:  # `logging` only writes to it.
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

        def take_back(count: int) -> None:
            with suppress(OSError):  # It may be a pipe.
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - count)

        if self._is_json and stat.S_ISREG(os.fstat(descriptor).st_mode) and (left := _unfinished(self.baseFilename)):
            take_back(left)
        return WholeLines(descriptor, take_back)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)
            return
        elsewhere = logging.StreamHandler(_standard_error())
        elsewhere.setFormatter(self.formatter)
        elsewhere.emit(record)


def _unfinished(file: str) -> int:
    """Return the bytes of a line of JSON that a killed server has begun; 0 if the file cannot be read."""
    try:
        with Path(file).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LONGEST_LINE))
            return unfinished(log.read())
    except OSError:
        return 0


class _LineFormatter(logging.Formatter):
    """Formats `I1121 14:03:05.123456 4711 scan_loop.py:48] "text"`, or `2025-11-21T14:03:05Z I 4711 ...`, in UTC."""

    def __init__(self, escapes: bool, has_colours: bool) -> None:
        super().__init__()
        self._escapes = escapes
        # Red errors, yellow warnings.
        self._colours = {"E": "\x1b[31m", "W": "\x1b[33m"} if has_colours else {}
        self.is_iso8601 = False

    def format(self, record: logging.LogRecord) -> str:
        # tritonserver has three levels; its verbose messages have "I".
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
            # json.dumps leaves some control characters of terminals, and lone surrogates, which UTF-8 cannot encode.
            quoted = json.dumps(text + trace, ensure_ascii=False)
            text = printable(quoted.encode(errors="backslashreplace").decode())
        else:
            text = printable(text) + trace
        line = f"{head} {record.process} {record.filename}:{record.lineno}] {text}"
        colour = self._colours.get(level, "")
        return f"{colour}{line}\x1b[0m" if colour else line


class LinesWithLevels(logging.Formatter):
    """Formats a child process's lines for the server's log: each, including those of a traceback, begins with the
    level."""

    def __init__(self, prefix: Callable[[], str] = str) -> None:
        """`prefix`: returns the text between the level and the line."""
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines() or [""]
        prefix = self._prefix()
        return "\n".join(f"{record.levelname} {prefix}{line}" for line in lines)
