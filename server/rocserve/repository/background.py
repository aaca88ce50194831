"""Tasks that run beside their starter, and none of which is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from rocserve.core.errors import ServeError

Result = TypeVar("Result")


class BackgroundTasks:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Run `work`; an exception that nobody foresaw goes to the log."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Return when none is running, those counted that were started meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ServeError):
            # Foreseen: its text says all, and whoever started the task has it.
            self._log.info("%s failed: %s", task.get_name(), error.text)
        elif error is not None:
            self._log.error("%s failed: %r", task.get_name(), error, exc_info=error)
