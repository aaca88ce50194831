"""The parts of a repository that its models and versions share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set

from rocserve.backends.registry import BackendRegistry
from rocserve.core.backoff import Backoff
from rocserve.core.model_names import ModelKey
from rocserve.core.serving import ServedVersion, ServingTable
from rocserve.repository.background_tasks import BackgroundTasks
from rocserve.repository.content import ContentReader
from rocserve.repository.debounce import Debounce
from rocserve.repository.load_order import FilesChanged, LoadedVersion, LoadVersion
from rocserve.repository.load_slots import LoadSlots
from rocserve.repository.residency.resident_models import ResidentModels
from rocserve.repository.retries import Retries
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScanner
from rocserve.repository.watch import RepositoryWatch
from rocserve.settings import ControlMode, RepositorySettings
from rocserve.settings.repository import WhatKind


class HeldMembers:
    """Knows which versions that the serving table no longer offers are members of an ensemble that goes on with them: a
    served one until its own new content is served, one that was retired or lost its members until its requests are
    answered. All calls are made on the loop's thread."""

    def __init__(self) -> None:
        self._members: dict[LoadedVersion, Set[ServedVersion]] = {}
        """Ensemble -> the members that it goes on with."""
        self._waiting: list[asyncio.Future[None]] = []

    def holds(self, ensemble: LoadedVersion) -> bool:
        return ensemble in self._members

    def hold(self, ensemble: LoadedVersion, members: Set[ServedVersion], table: ServingTable) -> None:
        """Let an ensemble go on with these members, which are those of an earlier table."""
        ensemble.hold_members(table)
        self._members[ensemble] = members

    def release(self, ensemble: LoadedVersion) -> None:
        """Let an ensemble use the current members; or it has ended."""
        if self._members.pop(ensemble, None) is not None:
            ensemble.hold_members(None)
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self, member: ServedVersion) -> None:
        """Return when no ensemble uses the member."""
        while any(member in members for members in self._members.values()):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter


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
        self.held_members = HeldMembers()
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
