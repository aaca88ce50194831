"""Loads a version of a model: workers, then the completed configuration, then the scheduler over their channels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from rocserve.backends.request_model import ModelCall
from rocserve.config.definition import ModelDefinition, complete_definition
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.serving import ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.repository.instance_plan import plan_workers
from rocserve.repository.loader import LoadedVersion
from rocserve.repository.version_workers import config_text, load_message, worker_group
from rocserve.scheduling.ensemble import EnsembleVersion
from rocserve.scheduling.model_calls import ModelCallDispatcher
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.served_version import ScheduledVersion
from rocserve.workers.channel import Channel
from rocserve.workers.completion import CompletionThread
from rocserve.workers.conversation import CallStarter, OpenCall
from rocserve.workers.group import WorkerGroup
from rocserve.workers.launcher import WorkerLauncher

STOP_SECONDS = 10.0
"""How long a worker may take to end by itself once it has nothing to do."""

OUTAGE_SECONDS = 5.0
"""How long requests wait for a crashed model's workers to come back before they are refused."""


class WorkerVersionLoader:
    """Implements repository.loader.VersionLoader with worker processes."""

    def __init__(
        self,
        launcher: WorkerLauncher,
        completion: CompletionThread,
        tables: ServingTableHolder,
        limits: QueueLimits,
        strict: bool,
        log: logging.Logger,
    ) -> None:
        self._launcher = launcher
        self._completion = completion
        self._tables = tables
        self._calls = ModelCallDispatcher(tables)
        self._limits = limits
        self._strict = strict
        self._log = log

    async def load(
        self, definition: ModelDefinition, version: int, version_folder: Path, on_change: Callable[[], None]
    ) -> LoadedVersion:
        """See repository.loader.VersionLoader."""
        if definition.backend is None:
            complete = complete_definition(definition, None, strict=self._strict)
            return LoadedEnsemble(complete.config, complete.serialized, version, ModelStatistics(), self._tables)
        wiring = _Wiring(definition.name, on_change, self._calls.start)
        group = worker_group(
            load_message(definition, version, version_folder, self._log.isEnabledFor(logging.DEBUG)),
            definition,
            plan_workers(definition.config, definition.backend.engines[0]),
            launcher=self._launcher,
            completion=self._completion,
            events=wiring,
            start_call=wiring.start_call,
            log=self._log.getChild("workers"),
        )
        try:
            signature = await group.load()
            complete = complete_definition(definition, signature, strict=self._strict)
            for warning in complete.warnings[len(definition.warnings) :]:
                self._log.getChild("config").warning("model '%s': %s", definition.name, warning)
            statistics = ModelStatistics()
            scheduler = ModelScheduler(
                complete.config,
                version,
                statistics,
                self._completion,
                self._limits,
                self._log.getChild("scheduler"),
                definition.backend.answers_requests,
            )
            await group.warm_up(complete.config, config_text(complete))
        except BaseException:
            await asyncio.shield(group.stop(0.0))
            raise
        wiring.connect(scheduler, group.channels)
        return LoadedModelVersion(complete, version, statistics, scheduler, group, wiring)


class _Wiring:
    """Leads what happens to the workers to the scheduler and the index."""

    def __init__(self, model_name: str, on_change: Callable[[], None], start_call: CallStarter) -> None:
        self._model_name = model_name
        self._on_change = on_change
        self._start_call = start_call
        self._has_called = False
        self._scheduler: ModelScheduler | None = None
        self._open: set[Channel] = set()
        self._outage_timer: asyncio.TimerHandle | None = None
        self.reason = ""

    @property
    def available(self) -> bool:
        return bool(self._open)

    def connect(self, scheduler: ModelScheduler, channels: Sequence[Channel]) -> None:
        """From now on the scheduler gets the channels."""
        self._scheduler = scheduler
        self._open.update(channels)
        for channel in channels:
            scheduler.attach(channel)

    def disconnect(self) -> None:
        """The version is gone. Its channels know the wiring, through their supervisor: were they not let go of here,
        each would hold its buffers until the garbage collector comes by."""
        self.stop_waiting()
        self._scheduler = None
        self._open.clear()

    def start_call(self, call: ModelCall, opened: OpenCall) -> None:
        """See workers.conversation.CallStarter."""
        scheduler = self._scheduler
        if scheduler is not None and not self._has_called:
            self._has_called = True
            scheduler.stop_sending_ahead()
        self._start_call(call, opened)

    def channel_opened(self, channel: Channel) -> None:
        if self._scheduler is None:
            return
        self._open.add(channel)
        self._scheduler.attach(channel)

    def channel_lost(self, channel: Channel, reason: ServeError) -> None:
        self._open.discard(channel)
        if self._scheduler is not None:
            self._scheduler.detach(channel)

    def restarting(self, reason: str, delay_seconds: float) -> None:
        self.reason = f"restarting: {reason}"
        if not self._open and self._outage_timer is None:
            loop = asyncio.get_running_loop()
            self._outage_timer = loop.call_later(OUTAGE_SECONDS, self._outage)
        self._on_change()

    def recovered(self) -> None:
        self.reason = ""
        self.stop_waiting()
        self._on_change()

    def stop_waiting(self) -> None:
        if self._outage_timer is not None:
            self._outage_timer.cancel()
            self._outage_timer = None

    def _outage(self) -> None:
        """Nobody should wait for ever: until a worker is back, requests are refused with the reason."""
        self._outage_timer = None
        if not self._open and self._scheduler is not None:
            self._scheduler.fail_queue(unavailable(f"model '{self._model_name}' has no worker: {self.reason}"))


class LoadedModelVersion(ScheduledVersion):
    """A version with workers, for the repository's hands."""

    def __init__(
        self,
        definition: ModelDefinition,
        version: int,
        statistics: ModelStatistics,
        scheduler: ModelScheduler,
        group: WorkerGroup,
        wiring: _Wiring,
    ) -> None:
        super().__init__(definition.config, definition.serialized, version, statistics, scheduler)
        self._group = group
        self._wiring = wiring

    @property
    def available(self) -> bool:
        return self._wiring.available

    @property
    def status_reason(self) -> str:
        return self._wiring.reason

    async def unload(self) -> None:
        """See repository.loader.LoadedVersion."""
        await _drain(self._scheduler.close)
        self._wiring.stop_waiting()
        await self._group.stop(STOP_SECONDS)
        self._wiring.disconnect()


class LoadedEnsemble(EnsembleVersion):
    """An ensemble, for the repository's hands; whether its members are there is the repository's to know."""

    available = True
    status_reason = ""

    async def unload(self) -> None:
        """See repository.loader.LoadedVersion."""
        await _drain(self.close)


async def _drain(close: Callable[[Callable[[], None]], None]) -> None:
    """Close, and wait until all that was taken has been answered."""
    loop = asyncio.get_running_loop()
    drained = asyncio.Event()

    def on_drained() -> None:
        loop.call_soon_threadsafe(drained.set)

    close(on_drained)
    await drained.wait()
