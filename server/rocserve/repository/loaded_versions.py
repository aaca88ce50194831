"""Versions as requests find them in the serving table: models on workers, and ensembles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rocserve.amd_inference_server.single_items import SingleItems
from rocserve.core.exchange import Exchange
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.serving import ReadinessCheck, ServingTable
from rocserve.plane.loop import PlaneLoop
from rocserve.presets import TEXT_FACTS
from rocserve.protocol import model_config_pb2 as messages
from rocserve.repository.connected_workers import ConnectedWorkers, drained
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.scheduling.served_version import ScheduledVersion


class VersionFacts:
    """A version's facts for the index, the metadata and the metrics, from its workers."""

    is_cold = False
    """It has no workers: its first request loads it."""
    workers: ConnectedWorkers | None = None
    """None = it needs no workers, or is cold."""
    load_seconds: float = 0.0

    @property
    def has_statistics(self) -> bool:
        return True

    @property
    def available(self) -> bool:
        return self.workers is None or self.workers.available

    @property
    def status_reason(self) -> str:
        return "" if self.workers is None else self.workers.status

    @property
    def properties(self) -> Mapping[str, str]:
        return {} if self.workers is None else self.workers.properties

    @property
    def load_check(self) -> LoadCheckReport:
        return NOT_CHECKED if self.workers is None else self.workers.checked

    @property
    def worker_pids(self) -> Mapping[int, int]:
        return {} if self.workers is None else self.workers.models_of_workers

    @property
    def worker_restarts(self) -> int:
        return 0 if self.workers is None else self.workers.restarts

    @property
    def own_check(self) -> ReadinessCheck | None:
        return None if self.workers is None else self.workers.own_check

    @property
    def in_flight(self) -> int:
        return 0

    def follow_members(self, is_decoupled: bool) -> None:
        """Does nothing: only an ensemble has members."""

    def hold_members(self, table: ServingTable | None) -> None:
        """Does nothing: only an ensemble has members."""

    async def answered(self) -> None:
        """Does nothing: only ensembles are asked."""

    def watch_use(self, on_request: Callable[[], None]) -> None:
        """Does nothing: only a loaded model is unloaded again."""

    def want(self) -> None:
        """Does nothing: it is loaded."""

    async def ensure_loaded(self) -> None:
        """Does nothing: it is loaded."""


@dataclass(eq=False, kw_only=True)
class LoadedModelVersion(VersionFacts, ScheduledVersion):
    """A version whose workers run."""

    workers: ConnectedWorkers
    load_seconds: float

    @property
    def in_flight(self) -> int:
        return self._scheduler.in_flight

    def watch_use(self, on_request: Callable[[], None]) -> None:
        self.on_request = on_request

    async def unload(self) -> None:
        await self.workers.drain_and_stop()
        if self._answers is not None:
            self.workers.mail.plane.call_soon(self._answers.close)


@dataclass(eq=False, kw_only=True)
class LoadedEnsemble(VersionFacts, EnsembleVersion):
    """A stateless ensemble: the repository checks its members."""

    plane: PlaneLoop
    load_check: LoadCheckReport = NOT_CHECKED
    pending_requests = 0

    @property
    def properties(self) -> Mapping[str, str]:
        told = {name: text for name in TEXT_FACTS if (text := self.config.parameters.get(name))}
        return {**told, **({"load_check": self.load_check.text} if self.load_check.parts else {})}

    def follow_members(self, is_decoupled: bool) -> None:
        if is_decoupled == self.config.decoupled:
            return
        message = messages.ModelConfig.FromString(self.config_message)
        message.model_transaction_policy.decoupled = is_decoupled
        config = replace(self.config, decoupled=is_decoupled)
        self.reconfigure(config, message.SerializeToString(deterministic=True))

    def hold_members(self, table: ServingTable | None) -> None:
        # Running requests' steps find them there, too.
        self.dispatcher.held = table

    async def answered(self) -> None:
        await drained(self.plane, self.close, 0.0)

    async def ensure_loaded(self) -> None:
        for member in self.members():
            await member.ensure_loaded()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.on_request = _want_members

    async def unload(self) -> None:
        # No time limit: an ensemble has no workers, and its members limit their requests' times.
        await self.answered()
        if self.answers is not None:
            self.plane.call_soon(self.answers.close)


def _want_members(ensemble: EnsembleVersion) -> None:
    for member in ensemble.members():
        member.want()


class _TakesItems:
    """A version in AMD Inference Server's dialect that also accepts its clients' single items."""

    config: ModelConfig

    @functools.cached_property
    def _items(self) -> SingleItems:
        return SingleItems(self.config)


class ItemModelVersion(_TakesItems, LoadedModelVersion):
    def infer(self, request: InferRequest, exchange: Exchange) -> None:
        super().infer(self._items.take(request, exchange), exchange)


class ItemEnsemble(_TakesItems, LoadedEnsemble):
    def infer(self, request: InferRequest, exchange: Exchange) -> None:
        super().infer(self._items.take(request, exchange), exchange)
