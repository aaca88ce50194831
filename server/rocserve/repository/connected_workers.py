"""The workers of a version that is served: gives their instances to the version's scheduler."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from rocserve.backends.request_model import ModelCall
from rocserve.config.model_limits import time_limits
from rocserve.core.custom_metrics import CustomMetrics, MetricChanges, OwnedMetrics
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.load_check import NOT_CHECKED
from rocserve.observability.log_fields import about
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.engine_plan import EnginePlan, shortened
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.worker_options import plan_version_workers
from rocserve.scheduling.call_cycles import needs_of
from rocserve.scheduling.model_calls import start_call
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.scheduler import Scheduler
from rocserve.settings import EngineSettings, TimeLimits
from rocserve.workers.instance import Instance, InstanceMail
from rocserve.workers.instance_requests import OpenCall
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.version_workers import VersionWorkers

_Argument = TypeVar("_Argument")


class ConnectedWorkers(VersionWorkers):
    """All calls but `start_call` are made on the asyncio loop; the properties may be read from any thread. Only this
    class calls a scheduler from the loop's side, because schedulers live on the data plane's thread."""

    def __init__(
        self,
        order: LoadOrder,
        plan: EnginePlan,
        *,
        launcher: WorkerLauncher,
        mail: InstanceMail,
        dispatcher: Dispatcher,
        engines: EngineSettings,
        default_limits: TimeLimits,
        limiter: RateLimiter | None,
        custom_metrics: CustomMetrics,
        log: logging.Logger,
    ) -> None:
        """`default_limits`: of models that set none. Raises ServeError: as `plan_version_workers`, and INVALID_ARGUMENT
        if the rate limiter's resources can never suffice for an instance."""
        definition = order.definition
        assert definition.backend is not None, "an ensemble has no workers"
        limits = time_limits(definition.config.parameters, default_limits)
        super().__init__(
            plan_version_workers(order, plan, engines, launcher.settings),
            launcher=launcher,
            mail=mail,
            log=log.getChild("workers"),
            start_call=self.start_call if definition.backend.answers_requests else None,
            limits=limits,
            reported=order.reported_warnings,
            is_ours=definition.is_generated,
        )
        self.checked = NOT_CHECKED
        """The findings of the load check that apply to the completed configuration."""
        self._order = order
        self._plan = plan
        # Kept, because each request of an ensemble's step looks for its member's device.
        self._planned = plan.properties
        self._described: Mapping[str, str] = {}
        self._run_call = functools.partial(start_call, dispatcher)
        self._has_called = False
        self._metrics = OwnedMetrics(custom_metrics, order.name, log)
        self._server_log = log
        self._scheduler: Scheduler | None = None
        self._attached: set[Instance] = set()
        self._outage_timer: asyncio.TimerHandle | None = None
        self._release_resources: Callable[[], None] | None = None
        if limiter is not None:
            needs = [needs_of(one.rate_limiter, one.device) for one in plan.workers for _ in range(one.instance_count)]
            try:
                self._release_resources = limiter.register(needs)
            except ServeError:
                mail.close_heap(self.inputs)
                raise

    @property
    def available(self) -> bool:
        return bool(self._attached)

    @property
    def properties(self) -> Mapping[str, str]:
        """How the version runs. Properties that the engine reports override the plan's."""
        checked = {"load_check": self.checked.text} if self.checked.parts else {}
        return {**self._planned, **checked, **self._described}

    @property
    def status(self) -> str:
        """The workers' problems, or their background work; "" = none."""
        return "; ".join(filter(None, (self._plan.warning, shortened(self.checked.warning), self.troubles)))

    def connect(self, scheduler: Scheduler) -> None:
        """Give the instances to the scheduler, now and whenever they change."""
        self._scheduler = scheduler
        for instance in self.instances:
            self.instance_opened(instance)

    async def drain_and_stop(self, close: Callable[[Callable[[], None]], None]) -> None:
        """Let the scheduler finish its requests within the drain timeout, then end the workers. Workers that are late
        are killed, and their requests refused. `close`: closes the scheduler, see `drained`."""
        assert self._scheduler is not None, "connected until the version is gone"
        drain_seconds = self._limits.drain_timeout_seconds
        if await drained(self.mail.plane, close, drain_seconds):
            self._cancel_outage_timer()
            await self.stop(10.0)
            return
        text = f"{self._order.name} was unloaded and had not answered within {drain_seconds:g} s (--drain-timeout-secs)"
        fields = about(model=self._order.definition.name, version=self._order.version)
        self._server_log.warning("%s; its workers are killed", text, extra=fields)
        self._refuse_waiting(self._scheduler, unavailable(text))
        await self.stop(0.0, text)

    async def stop(self, grace_seconds: float, reason: str = "") -> None:
        """See VersionWorkers. Afterwards no reference to the scheduler or the instances is left, because each would
        keep its buffers until the next garbage collection."""
        await super().stop(grace_seconds, reason)
        self._cancel_outage_timer()
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            for instance in self._attached:
                self._call_on_plane(scheduler.detach, instance)
        self._attached.clear()
        self._metrics.forget()
        if self._release_resources is not None:
            self._release_resources()

    def start_call(self, call: ModelCall, opened: OpenCall) -> None:
        """Implements workers.instance_requests.CallStarter. Called on the data plane's thread."""
        scheduler, caller = self._scheduler, None
        if scheduler is not None:
            caller = scheduler.caller(opened.instance)
            if not self._has_called:
                self._has_called = True
                scheduler.stop_sending_ahead()
        self._run_call(call, opened, caller)

    # Events, see VersionWorkers

    def instance_opened(self, instance: Instance) -> None:
        if self._scheduler is not None:
            self._attached.add(instance)
            self._call_on_plane(self._scheduler.attach, instance)

    def instance_lost(self, instance: Instance) -> None:
        self._attached.discard(instance)
        if self._scheduler is not None:
            self._call_on_plane(self._scheduler.detach, instance)

    def restarting(self, reason: str, delay_seconds: float) -> None:
        if not self._attached and self._outage_timer is None:
            loop = asyncio.get_running_loop()
            # Requests wait five seconds for the workers of a crashed model.
            self._outage_timer = loop.call_later(5.0, self._refuse_in_outage)
        self._order.on_change()

    def recovered(self) -> None:
        self._cancel_outage_timer()
        self._order.on_change()

    def progress(self, text: str, is_check: bool) -> None:
        if self._scheduler is None:
            self._order.on_progress(text, is_check)

    def described(self, properties: Mapping[str, str]) -> None:
        self._described = properties

    def measured(self, changes: MetricChanges) -> None:
        self._metrics.apply(changes)

    # Outages

    def _cancel_outage_timer(self) -> None:
        if self._outage_timer is not None:
            self._outage_timer.cancel()
            self._outage_timer = None

    def _refuse_in_outage(self) -> None:
        self._outage_timer = None
        if not self._attached and self._scheduler is not None:
            text = f"model '{self._order.definition.name}' has no worker: {self.troubles}"
            self._refuse_waiting(self._scheduler, unavailable(text))

    def _refuse_waiting(self, scheduler: Scheduler, error: ServeError) -> None:
        self._cancel_outage_timer()
        self._call_on_plane(scheduler.fail_queue, error)

    def _call_on_plane(self, call: Callable[[_Argument], None], argument: _Argument) -> None:
        self.mail.plane.call_soon(functools.partial(call, argument))


async def drained(plane: PlaneLoop, close: Callable[[Callable[[], None]], None], seconds: float) -> bool:
    """Close a version and wait at most `seconds` (0 = no limit). Returns whether all its requests are answered."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def on_drained() -> None:
        loop.call_soon_threadsafe(event.set)

    plane.call_soon(functools.partial(close, on_drained))
    try:
        async with asyncio.timeout(seconds or None):
            await event.wait()
    except TimeoutError:
        return False
    return True
