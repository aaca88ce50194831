"""The log: one line a message on standard error or in a file, in one of tritonserver's two formats."""

from __future__ import annotations

import logging
import time

from rocserve.core.printable import printable
from rocserve.settings import LogSettings

ROOT = "rocserve"


class _LineFormatter(logging.Formatter):
    """`I1121 14:03:05.123456 4711 repository] text`, or with an ISO 8601 time in UTC first."""

    def __init__(self, iso8601: bool) -> None:
        super().__init__()
        self._iso8601 = iso8601

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname[0]
        moment = time.gmtime(record.created)
        if self._iso8601:
            head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {level}"
        else:
            micros = int(record.created % 1 * 1e6)
            head = f"{level}{time.strftime('%m%d %H:%M:%S', moment)}.{micros:06d}"
        text = printable(record.getMessage())
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return f"{head} {record.process} {record.name.removeprefix(ROOT + '.')}] {text}"


class _WantedLevels(logging.Filter):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return self._settings.error
        if record.levelno >= logging.WARNING:
            return self._settings.warning
        if record.levelno >= logging.INFO:
            return self._settings.info
        return self._settings.verbose > 0


def set_up_logging(settings: LogSettings) -> logging.Logger:
    """The logger that all parts' loggers hang under; other libraries' loggers are left alone.

    Raises:
        OSError: the log file cannot be opened.
    """
    handler = logging.FileHandler(settings.file) if settings.file else logging.StreamHandler()
    handler.setFormatter(_LineFormatter(settings.format == "ISO8601"))
    handler.addFilter(_WantedLevels(settings))
    log = logging.getLogger(ROOT)
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.DEBUG if settings.verbose else logging.INFO)
    return log
