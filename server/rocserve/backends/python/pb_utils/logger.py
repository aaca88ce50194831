"""The server's log, as models write to it."""

from __future__ import annotations

import enum
import logging

_LOG = logging.getLogger("rocserve.model")


class Level(enum.Enum):
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG


class Logger:
    """Lines of the log, behind the model's name."""

    LogLevel = Level
    INFO = Level.INFO
    WARNING = Level.WARNING
    ERROR = Level.ERROR
    VERBOSE = Level.VERBOSE

    @staticmethod
    def log(message: str, level: Level = Level.INFO) -> None:
        _LOG.log(level.value, "%s", message)

    @staticmethod
    def log_info(message: str) -> None:
        _LOG.info("%s", message)

    @staticmethod
    def log_warn(message: str) -> None:
        _LOG.warning("%s", message)

    @staticmethod
    def log_error(message: str) -> None:
        _LOG.error("%s", message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Dropped unless the server's log is verbose."""
        _LOG.debug("%s", message)
