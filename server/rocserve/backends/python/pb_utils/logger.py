"""Lets models write to the server's log."""

from __future__ import annotations

import enum
import logging

from rocserve.backends.python.pb_utils.errors import as_text


class Level(enum.Enum):
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG


class Logger:
    """Writes log lines, which get the model's name in front."""

    LogLevel = Level
    INFO, WARNING, ERROR, VERBOSE = Level

    @staticmethod
    def log(message: str | bytes, level: Level = Level.INFO) -> None:
        logging.getLogger("rocserve.model").log(level.value, "%s", as_text(message, "a message"))

    @staticmethod
    def log_info(message: str | bytes) -> None:
        Logger.log(message)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        Logger.log(message, Level.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        Logger.log(message, Level.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        """Dropped unless the server's log is verbose."""
        Logger.log(message, Level.VERBOSE)
