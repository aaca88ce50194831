"""Versions as requests find them in the serving table: models on workers, and ensembles."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rocserve.amd_inference_server.single_items import SingleItems
from rocserve.core.exchange import Exchange
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.serving import ReadinessCheck, ServedModel
from rocserve.plane.loop import PlaneLoop
from rocserve.presets import TEXT_FACTS
from rocserve.protocol import model_config_pb2 as messages
from rocserve.repository.connected_workers import ConnectedWorkers, drained
from rocserve.scheduling.ensemble.members import EnsembleMembers
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.scheduling.served_version import ScheduledVersion


class VersionFacts:
    """A version's facts for the index, the metadata and the metrics, from its workers."""

    is_cold = False
    """It has no workers, or is closed: ensembles' steps find another version by name."""
    workers: ConnectedWorkers | None = None
    """None = it needs no workers, or is cold."""
    load_seconds: float = 0.0
    _members: tuple[weakref.ref[EnsembleMembers], ...] = ()
    """Those of which the version is one."""

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

    @property
    def keeps_members(self) -> bool:
        return False

    def follow_members(self, served: Mapping[str, ServedModel], is_decoupled: bool) -> None:
        """Does nothing: only an ensemble has members."""

    def leave_members(self) -> None:
        """Does nothing: only an ensemble has members."""

    def join(self, members: EnsembleMembers) -> None:
        """Note that the version is one of these members."""
        known = [reference for reference in self._members if reference() is not None]
        self._members = (*known, weakref.ref(members))

    def when_left(self, by_requests: bool, call: Callable[[], None]) -> None:
        """Call when no ensemble offers the version to new requests, and, with `by_requests`, no ensemble's request runs
        on it. On the data plane's thread."""
        for reference in self._members:
            members = reference()
            if members is not None and (members.is_in_use if by_requests else members.is_offered):
                members.wait(functools.partial(self.when_left, by_requests, call))
                return
        call()

    def close_last(self, close: Callable[[Callable[[], None]], None], drained: Callable[[], None]) -> None:
        """Close the version, by `close(drained)`, when no ensemble's request runs on it. On the data plane's thread."""
        self.when_left(True, functools.partial(close, drained))

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

    async def unload(self, at_once: bool = False) -> None:
        close: Callable[[Callable[[], None]], None] = self._close
        if not at_once:
            # No time limit: an ensemble may go on with this version until its own new content is loaded.
            await drained(self.workers.mail.plane, functools.partial(self.when_left, False), 0.0)
            close = functools.partial(self.close_last, close)
        await self.workers.drain_and_stop(close)
        if self._answers is not None:
            self.workers.mail.plane.call_soon(self._answers.close)

    def _close(self, drained: Callable[[], None]) -> None:
        # From now on ensembles' steps find the member by name.
        self.is_cold = True
        self._scheduler.close(drained)


@dataclass(eq=False, kw_only=True)
class LoadedEnsemble(VersionFacts, EnsembleVersion):
    """A stateless ensemble: the repository checks its members."""

    plane: PlaneLoop
    load_check: LoadCheckReport = NOT_CHECKED
    pending_requests = 0
    _has_members = False
    """Whether `members` serve new requests."""

    @property
    def properties(self) -> Mapping[str, str]:
        told = {name: text for name in TEXT_FACTS if (text := self.config.parameters.get(name))}
        return {**told, **({"load_check": self.load_check.text} if self.load_check.parts else {})}

    @property
    def keeps_members(self) -> bool:
        return bool(self.members.steps)

    def follow_members(self, served: Mapping[str, ServedModel], is_decoupled: bool) -> None:
        found, before = self.find_members(served), self.members
        if not self._has_members or found.versions != before.versions or found.steps != before.steps:
            for version in found.versions:
                if found.steps and isinstance(version, VersionFacts):
                    version.join(found)
            self.members = found
            if self._has_members:
                # Only now, because until here new requests could take them.
                self.plane.call_soon(before.leave)
            self._has_members = True
        if is_decoupled == self.config.decoupled:
            return
        message = messages.ModelConfig.FromString(self.config_message)
        message.model_transaction_policy.decoupled = is_decoupled
        config = replace(self.config, decoupled=is_decoupled)
        self.reconfigure(config, message.SerializeToString(deterministic=True))

    def leave_members(self) -> None:
        if self._has_members:
            self._has_members = False
            self.plane.call_soon(self.members.leave)

    async def ensure_loaded(self) -> None:
        for member in self.members.versions:
            await member.ensure_loaded()

    async def unload(self, at_once: bool = False) -> None:
        self.leave_members()
        # No time limit: an ensemble has no workers, and its members limit their requests' times.
        await drained(self.plane, functools.partial(self.close_last, self.close), 0.0)
        if self.answers is not None:
            self.plane.call_soon(self.answers.close)


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
