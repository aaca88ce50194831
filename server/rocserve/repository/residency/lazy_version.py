"""A lazy version is loaded by its first request. Requests wait for the load; statistics go on after an unload."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocserve.config.definition import ModelDefinition
from rocserve.config.model_limits import idle_unload_seconds
from rocserve.core.errors import ServeError, deadline_exceeded, unavailable
from rocserve.core.exchange import EndHook, Exchange, HookOrder
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.serving import ReadinessCheck
from rocserve.core.statistics import ModelStatistics
from rocserve.plane.heap import SharedHeap
from rocserve.plane.loop import TimerHandle
from rocserve.repository.loads import NOTHING_TO_REPORT, LoadedVersion, LoadProgress
from rocserve.repository.residency.room import Stage, Tenant
from rocserve.repository.retries import Failure
from rocserve.scheduling.scheduler import cancelled
from rocserve.scheduling.served_version import ScheduledVersion

if TYPE_CHECKING:
    from rocserve.repository.residency.resident_models import ResidentModels

_NOT_LOADED = "not loaded: its first request loads it"

Load = Callable[[Callable[[LoadProgress], None]], Awaitable[LoadedVersion]]
"""Loads the version, and calls back with its progress. Raises ServeError; FilesChanged."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for the load."""

    request: InferRequest
    exchange: Exchange
    since: float
    timer: TimerHandle


class LazyVersion(Tenant):
    """Implements repository.loads.LoadedVersion for a version that is not always in memory. Methods about requests are
    called on the data plane's thread, all others on the asyncio loop. Properties may be read from any thread."""

    def __init__(
        self,
        definition: ModelDefinition,
        number: int,
        needs: Mapping[str, int],
        is_pinned: bool,
        load: Load,
        on_change: Callable[[], None],
        residents: ResidentModels,
    ) -> None:
        super().__init__(needs, is_pinned, idle_unload_seconds(definition.config.parameters))
        self.name = definition.name
        self.version = number
        self.config: ModelConfig = definition.config
        """The configuration as the last load completed it; as registered before the first load."""
        self.config_message = definition.serialized
        self.sees_requests = definition.backend is not None and definition.backend.answers_requests
        self.load = load
        self.on_change = on_change
        self.failure: Failure | None = None
        """Failure of the last load; the next load waits for its retry time."""
        self.progress = NOTHING_TO_REPORT
        self.is_retired = False
        """Never loaded again: its files have changed since the registration, or it is being unloaded."""
        self.newer_problem: ServeError | None = None
        """Why the newer content cannot be used; None = it can, or that is unknown."""
        self.task: asyncio.Task[None] | None = None
        """The running load or unload."""
        self.load_future: asyncio.Future[None] | None = None
        """Completed with the load, for callers that wait without a request."""
        self.is_first_load = False
        """This load decides whether the version is served at all. The caller then logs a failure."""
        self._residents = residents
        self._loaded: LoadedVersion | None = None
        self._statistics: ModelStatistics | None = None
        self._waiting: dict[Exchange, _Waiting] = {}
        batching = self.config.sequence_batching
        self._hold_seconds = batching.max_sequence_idle_microseconds / 1e6 if batching is not None else 0.0

    # Requests

    def infer(self, request: InferRequest, exchange: Exchange) -> None:
        now = time.monotonic()
        self.note_use(now)
        if self._hold_seconds:
            self.held_until = now + self._hold_seconds
        self.in_flight += 1
        exchange.add(EndHook(HookOrder.RESIDENCY, self._request_ended))
        if self._loaded is not None:
            self._loaded.infer(request, exchange)
        else:
            self._infer_cold(request, exchange, now)

    def _request_ended(self) -> None:
        self.in_flight -= 1

    def want(self) -> None:
        """Load the version, because a request of an ensemble will reach it."""
        if self._loaded is None and self.cold_refusal() is None:
            self.note_use(time.monotonic())
            self._residents.call_on_loop(self._residents.want, self)

    def cold_refusal(self) -> ServeError | None:
        """Return why requests cannot load the version now; None = they can."""
        failure = self.failure
        if failure is None or failure.is_due():
            return None
        return unavailable(f"model '{self.name}' version {self.version} could not be loaded: {failure.text}")

    def open(self, loaded: LoadedVersion) -> None:
        """Run the waiting requests on the loaded version, in their order."""
        if self._statistics is not None:
            loaded.statistics.continue_from(self._statistics)
        self.config, self.config_message, self._statistics = loaded.config, loaded.config_message, loaded.statistics
        self._loaded, self.failure = loaded, None
        now = time.monotonic()
        for waiting in self._take_waiting():
            self._residents.counts.cold_requests += 1
            self._residents.counts.cold_seconds += now - waiting.since
            loaded.infer(waiting.request, waiting.exchange)

    def refuse(self, error: ServeError) -> None:
        for waiting in self._take_waiting():
            self._fail(waiting.exchange, waiting.since, ServeError(error.code, error.text))

    def release(self) -> LoadedVersion | None:
        """Return the version to unload; None = it is in use."""
        if not self.is_idle(time.monotonic()):
            return None
        loaded, self._loaded = self._loaded, None
        return loaded

    def close(self) -> LoadedVersion | None:
        """Stop serving, and pass waiting requests to the successor. Returns the version to unload."""
        loaded, self._loaded = self._loaded, None
        for waiting in self._take_waiting():
            self._residents.dispatcher.dispatch(waiting.request, waiting.exchange)
        return loaded

    def _infer_cold(self, request: InferRequest, exchange: Exchange, now: float) -> None:
        refusal = self.cold_refusal()
        if refusal is None:
            if not self.is_retired:
                self._residents.call_on_loop(self._residents.want, self)
            if not self._residents.settings.wait_for_model:
                refusal = unavailable(f"model '{self.name}' is being loaded; ask again in a second")
                refusal.retry_seconds = 1.0
            elif len(self._waiting) >= self._residents.most_waiting:
                refusal = unavailable(f"Exceeds maximum queue size: model '{self.name}' is being loaded")
                refusal.is_overload = True
        if refusal is not None:
            self._fail(exchange, now, refusal)
            return
        limit = now + self._residents.settings.model_wait_seconds
        until = limit if request.deadline is None else min(limit, request.deadline)
        timer = self._residents.plane.call_at(until, functools.partial(self._expire, exchange, until < limit))
        self._waiting[exchange] = _Waiting(request, exchange, now, timer)
        exchange.watch_cancellation(functools.partial(self._drop, exchange, cancelled()))

    def _expire(self, exchange: Exchange, is_deadline: bool) -> None:
        text = f"model '{self.name}' was not loaded within {self._residents.settings.model_wait_seconds:g} s; ask again"
        self._drop(exchange, deadline_exceeded() if is_deadline else unavailable(text))

    def _drop(self, exchange: Exchange, error: ServeError) -> None:
        waiting = self._waiting.pop(exchange, None)
        if waiting is not None:
            waiting.timer.cancel()
            self._fail(exchange, waiting.since, error)
            if not self._waiting:
                self._residents.call_on_loop(self._residents.withdraw, self)

    def _fail(self, exchange: Exchange, since: float, error: ServeError) -> None:
        self._statistics = self.statistics
        self._statistics.record_refusal(error, int(since * 1e9), time.monotonic_ns())
        exchange.send(error)

    def _take_waiting(self) -> Sequence[_Waiting]:
        waiting, self._waiting = tuple(self._waiting.values()), {}
        for one in waiting:
            one.timer.cancel()
            one.exchange.unwatch()
        return waiting

    def complete_load(self, error: ServeError | None = None) -> None:
        """Complete `load_future`. Called on the loop."""
        load_future, self.load_future = self.load_future, None
        if load_future is not None and error is not None:
            load_future.set_exception(error)
        elif load_future is not None:
            load_future.set_result(None)

    # State

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    @property
    def has_statistics(self) -> bool:
        """Whether the version was loaded, or has refused a request."""
        return self._statistics is not None

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting or self.load_future)

    @property
    def inputs(self) -> SharedHeap | None:
        """The heap in which workers read inputs; None while the version is not loaded."""
        loaded = self._loaded
        return loaded.inputs if isinstance(loaded, ScheduledVersion) else None

    @property
    def statistics(self) -> ModelStatistics:
        """Statistics over all loads."""
        return self._statistics or ModelStatistics()

    @property
    def available(self) -> bool:
        loaded = self._loaded
        return self.failure is None if loaded is None else loaded.available

    @property
    def status_reason(self) -> str:
        loaded, failure = self._loaded, self.failure
        if loaded is not None:
            return loaded.status_reason
        if failure is not None:
            return failure.text
        shown = {Stage.WAITING: "waits for room", Stage.LOADING: self.progress.text or "is being loaded"}
        return shown.get(self.stage, _NOT_LOADED)

    @property
    def properties(self) -> Mapping[str, str]:
        return {} if (loaded := self._loaded) is None else loaded.properties

    @property
    def pending_requests(self) -> int:
        loaded = self._loaded
        return len(self._waiting) + (0 if loaded is None else loaded.pending_requests)

    @property
    def load_seconds(self) -> float:
        return 0.0 if (loaded := self._loaded) is None else loaded.load_seconds

    @property
    def load_check(self) -> LoadCheckReport:
        return NOT_CHECKED if (loaded := self._loaded) is None else loaded.load_check

    @property
    def worker_pids(self) -> Mapping[int, int]:
        return {} if (loaded := self._loaded) is None else loaded.worker_pids

    @property
    def worker_restarts(self) -> int:
        return 0 if (loaded := self._loaded) is None else loaded.worker_restarts

    @property
    def own_check(self) -> ReadinessCheck | None:
        return None if (loaded := self._loaded) is None else loaded.own_check

    def follow_members(self, is_decoupled: bool) -> None:
        """Does nothing: a model has no members."""

    async def unload(self) -> None:
        await self._residents.unload(self)
