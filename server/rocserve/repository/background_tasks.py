"""Tasks that nobody awaits, whose failures are logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from rocserve.core.errors import ServeError
from rocserve.core.printable import shortened

Result = TypeVar("Result")


class BackgroundTasks:
    """Runs tasks in the background and logs their failures."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Return when no task runs, including tasks started meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ServeError):
            # Expected: the text is enough, and the task's starter gets the error. It may quote what a client has sent.
            self._log.info("%s failed: %s", shortened(task.get_name()), shortened(error.text, 2000))
        elif error is not None:
            self._log.error("%s failed: %r", task.get_name(), error, exc_info=error)
