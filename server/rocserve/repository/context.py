"""The parts of a repository that its models and versions share."""

from __future__ import annotations

import logging

from rocserve.backends.registry import BackendRegistry
from rocserve.core.backoff import Backoff
from rocserve.core.model_names import ModelKey
from rocserve.repository.background_tasks import BackgroundTasks
from rocserve.repository.content import ContentReader
from rocserve.repository.debounce import Debounce
from rocserve.repository.load_order import FilesChanged, LoadVersion
from rocserve.repository.load_slots import LoadSlots
from rocserve.repository.residency.resident_models import ResidentModels
from rocserve.repository.retries import Retries
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScanner
from rocserve.repository.watch import RepositoryWatch
from rocserve.settings import ControlMode, RepositorySettings
from rocserve.settings.repository import WhatKind


class RepositoryContext:
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
        self.retries = Retries(Backoff(settings.retry_seconds, settings.longest_retry_seconds))
        self.retries.enabled = False
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
