"""A version without workers, which its first request loads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from rocserve.core.errors import ServeError, unavailable
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.statistics import ModelStatistics
from rocserve.repository.loaded_versions import VersionFacts
from rocserve.repository.residency.resident_models import Resident, ResidentModels
from rocserve.repository.residency.room import Stage
from rocserve.repository.retries import Failure
from rocserve.scheduling.cold_scheduler import ColdScheduler
from rocserve.scheduling.queue import QueueFull
from rocserve.scheduling.scheduler import SchedulerParts


class ColdVersion(VersionFacts):
    """Implements repository.load_order.LoadedVersion until the loaded version is published, which then gets the waiting
    requests. Methods about requests are called on the data plane's thread."""

    is_cold = True

    def __init__(
        self,
        resident: Resident,
        residents: ResidentModels,
        config: ModelConfig,
        config_message: bytes,
        statistics: ModelStatistics | None,
        sees_requests: bool,
        failure: Callable[[], Failure | None],
    ) -> None:
        """`config`: as the last load completed it; as registered before the first load. `statistics`: those of earlier
        loads; None = there was none. `failure`: of the last load."""
        self.name = config.name
        self.version = resident.number
        self.config = config
        self.config_message = config_message
        self.sees_requests = sees_requests
        self._resident = resident
        self._residents = residents
        self._failure = failure
        self._statistics = statistics
        self._scheduler: ColdScheduler | None = None

    @property
    def statistics(self) -> ModelStatistics:
        return self._statistics or ModelStatistics()

    @property
    def has_statistics(self) -> bool:
        """Whether the version was loaded, or has refused a request."""
        return self._statistics is not None

    @property
    def in_flight(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.waiting

    @property
    def pending_requests(self) -> int:
        return self.in_flight

    def infer(self, request: InferRequest, exchange: Exchange) -> None:
        self._resident.use()
        now_ns = time.monotonic_ns()
        residents = self._residents
        refusal = self.refusal()
        if refusal is None:
            if not residents.settings.wait_for_model:
                refusal = unavailable(f"model '{self.name}' is being loaded; ask again in a second")
                refusal.retry_seconds = 1.0
            else:
                try:
                    self._opened_scheduler().submit(request, exchange)
                except QueueFull:
                    refusal = unavailable(f"Exceeds maximum queue size: model '{self.name}' is being loaded")
                    refusal.is_overload = True
            # Only after the request is queued, because the end of an unload checks for waiting requests.
            residents.call_on_loop(self._resident.wake)
            if refusal is None:
                return
        self._counting_statistics().record_refusal(refusal, now_ns, time.monotonic_ns())
        exchange.send(refusal)

    def want(self) -> None:
        if self.refusal() is None:
            self._resident.use()
            self._residents.call_on_loop(self._resident.wake)

    async def ensure_loaded(self) -> None:
        await self._resident.ensure_loaded()

    def refusal(self) -> ServeError | None:
        """Return why requests cannot load the version now; None = they can."""
        failure = self._failure()
        if failure is None or failure.is_due():
            return None
        return unavailable(f"model '{self.name}' version {self.version} could not be loaded: {failure.text}")

    def refuse_waiting(self) -> None:
        """Refuse the waiting requests if the version cannot be loaded now."""
        if self._scheduler is not None and (refusal := self.refusal()) is not None:
            self._scheduler.fail_queue(refusal)
            self._scheduler = None

    def give_statistics(self, loaded: ModelStatistics) -> None:
        """Continue the counters in the loaded version's statistics."""
        if self._statistics is not None:
            loaded.continue_from(self._statistics)
        self._statistics = loaded

    async def unload(self, at_once: bool = False) -> None:
        """Give the waiting requests to the version that is published now."""
        await self._residents.on_plane(self._hand_over)

    def _hand_over(self) -> None:
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None:
            return
        counts = self._residents.counts
        for request in scheduler.take_all():
            if self._resident.stage is Stage.LOADED:
                counts.cold_requests += 1
                counts.cold_seconds += time.monotonic() - request.queue_start_ns / 1e9
            self._residents.dispatcher.dispatch(request, request.exchange)

    def _opened_scheduler(self) -> ColdScheduler:
        if self._scheduler is None:
            parts = SchedulerParts(
                self.config,
                self.version,
                self._counting_statistics(),
                self._residents.plane,
                self._residents.limits,
                self._residents.log,
            )
            on_empty = functools.partial(self._residents.call_on_loop, self._resident.review)
            self._scheduler = ColdScheduler(parts, self._residents.settings.model_wait_seconds, on_empty)
        return self._scheduler

    def _counting_statistics(self) -> ModelStatistics:
        self._statistics = self._statistics or ModelStatistics()
        return self._statistics
