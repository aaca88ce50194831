"""Keeps the server's log open to a model's worker, whatever the model does to Python's logging."""

from __future__ import annotations

import logging


def keep_server_log() -> None:
    """Switch the server's own loggers on again.

    A model that configures logging for itself by dictConfig or fileConfig switches off every logger that there is,
    unless it thinks of `disable_existing_loggers`. Its own lines by pb_utils.Logger would be lost as well.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "rocserve" and isinstance(logger, logging.Logger):
            logger.disabled = False
