"""The lifecycle of models and versions: the parts that they share, and their background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from rocserve.backends.registry import BackendRegistry
from rocserve.core.backoff import Backoff
from rocserve.core.errors import ServeError
from rocserve.core.model_names import ModelKey
from rocserve.repository.content import ContentReader
from rocserve.repository.debounce import Debounce
from rocserve.repository.loads import FilesChanged, LoadSlots, LoadVersion
from rocserve.repository.retries import Retries, RetryPolicy
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScanner
from rocserve.repository.watch import RepositoryWatch
from rocserve.settings import ControlMode, RepositorySettings
from rocserve.settings.repository import WhatKind

if TYPE_CHECKING:
    from rocserve.repository.residency.resident_models import ResidentModels

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
            # Expected: the text says all, and the task's starter gets the error.
            self._log.info("%s failed: %s", task.get_name(), error.text)
        elif error is not None:
            self._log.error("%s failed: %r", task.get_name(), error, exc_info=error)


class LifecycleContext:
    """Shares the parts of a repository among its models and versions."""

    def __init__(
        self,
        settings: RepositorySettings,
        registry: BackendRegistry,
        load: LoadVersion,
        residents: ResidentModels,
        log: logging.Logger,
    ) -> None:
        self.settings = settings
        self.load = load
        self.residents = residents
        self.log = log
        self.reader = ContentReader(registry, settings)
        self.scanner = RepositoryScanner(settings, registry, log)
        is_file = settings.single is not None and settings.single.kind is WhatKind.FILE
        self.watch = RepositoryWatch(self.scanner.roots, log, recursive=not is_file)
        self.debounce = Debounce[ModelKey](settings.settle_seconds)
        self.load_slots = LoadSlots(settings.concurrent_loads, settings.long_load_seconds)
        self.retry = RetryPolicy(Backoff(settings.retry_seconds, settings.longest_retry_seconds), enabled=False)
        self.retries = Retries()
        self.background = BackgroundTasks(log)
        self.load_level = logging.DEBUG
        """Level of lines about loads and unloads that succeed. At the start a table shows the models instead, and at
        the end all are unloaded."""

    @property
    def is_polling(self) -> bool:
        """Whether the server loads changed files by itself."""
        return self.settings.control_mode is ControlMode.POLL

    async def check_unchanged(self, scan: ModelScan, version: int) -> None:
        """Check after a load that the files are still the scanned ones. In polling mode changed files are loaded again
        after they have settled. Raises FilesChanged."""
        changed = await self.scanner.changed_file(scan, version)
        if changed is None:
            return
        # Nobody watches files outside the repositories, which a client's load request may name.
        is_followed = self.is_polling and any(scan.folder.is_relative_to(root) for root in self.scanner.roots)
        if is_followed:
            self.debounce.reopen(scan.key)
            self.watch.wake()
        raise FilesChanged(is_followed, changed)
