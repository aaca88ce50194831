"""Leads what happens to a version and its workers to its scheduler, the index and its metadata."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rocserve.backends.request_model import ModelCall
from rocserve.core.custom_metrics import MetricChanges, OwnedMetrics
from rocserve.core.errors import ServeError, unavailable
from rocserve.plane.loop import PlaneLoop
from rocserve.scheduling.scheduler import Scheduler
from rocserve.workers.group import WorkerGroupEvents
from rocserve.workers.instance import Instance
from rocserve.workers.instance_requests import CallStarter, OpenCall

_Handed = TypeVar("_Handed")

OUTAGE_SECONDS = 5.0
"""How long requests wait for a crashed model's workers to come back before they are refused."""


class VersionWiring(WorkerGroupEvents):
    """All calls but `start_call` are made on the asyncio loop; the
    properties may be read from any thread. The one place from where the loop's side talks to a scheduler, which lives
    on the data plane's thread."""

    def __init__(
        self,
        model_name: str,
        on_change: Callable[[], None],
        on_progress: Callable[[str], None],
        start_call: CallStarter,
        metrics: OwnedMetrics,
        plane: PlaneLoop,
    ) -> None:
        """`on_change` and `on_progress`: see lifecycle.LoadVersion.

        `metrics`: takes those that the model defines."""
        self._model_name = model_name
        self._on_change = on_change
        self._on_progress = on_progress
        self._start_call = start_call
        self._metrics = metrics
        self._plane = plane
        self._has_called = False
        self._scheduler: Scheduler | None = None
        self._open: set[Instance] = set()
        self._outage_timer: asyncio.TimerHandle | None = None
        self._trouble = ""
        self._silence = ""
        self._progress = ""
        self.properties: Mapping[str, str] = {}
        """What the engine tells of how it runs the model."""

    @property
    def available(self) -> bool:
        return bool(self._open)

    @property
    def reason(self) -> str:
        """What is wrong, and what goes on beside the model."""
        return "; ".join(filter(None, (self._trouble, self._silence, self._progress)))

    def connect(self, scheduler: Scheduler, instances: Sequence[Instance]) -> None:
        """From now on the scheduler gets the instances."""
        self._scheduler = scheduler
        self._open.update(instances)
        for instance in instances:
            self._hand_over(scheduler.attach, instance)

    async def drain(self, seconds: float) -> bool:
        """Let the scheduler finish what it took, as `drained` does."""
        scheduler = self._scheduler
        assert scheduler is not None, "connected until the version is gone"
        return await drained(self._plane, scheduler.close, seconds)

    def refuse_waiting(self, error: ServeError) -> None:
        """Refuse what waits for the workers, and what comes."""
        self.stop_waiting()
        if self._scheduler is not None:
            self._hand_over(self._scheduler.fail_queue, error)

    def disconnect(self) -> None:
        """The version is gone. Its instances know the wiring, through their supervisor: were they not let go of here,
        each would hold its buffers until the garbage collector comes by."""
        self.stop_waiting()
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            for instance in self._open:
                self._hand_over(scheduler.detach, instance)
        self._open.clear()
        self._metrics.forget()

    def start_call(self, call: ModelCall, opened: OpenCall) -> None:
        """See workers.instance_requests.CallStarter. On the data plane's thread."""
        scheduler = self._scheduler
        if scheduler is not None and not self._has_called:
            self._has_called = True
            scheduler.stop_sending_ahead()
        self._start_call(call, opened)

    def instance_opened(self, instance: Instance) -> None:
        if self._scheduler is None:
            return
        self._open.add(instance)
        self._hand_over(self._scheduler.attach, instance)

    def instance_lost(self, instance: Instance, reason: ServeError) -> None:
        self._open.discard(instance)
        if self._scheduler is not None:
            self._hand_over(self._scheduler.detach, instance)

    def restarting(self, reason: str, delay_seconds: float) -> None:
        self._trouble = f"restarting: {reason}"
        if not self._open and self._outage_timer is None:
            loop = asyncio.get_running_loop()
            self._outage_timer = loop.call_later(OUTAGE_SECONDS, self._outage)
        self._on_change()

    def recovered(self) -> None:
        self._trouble = ""
        self.stop_waiting()
        self._on_change()

    def progress(self, text: str) -> None:
        self._progress = text
        if self._scheduler is None:
            self._on_progress(text)

    def silent(self, text: str) -> None:
        self._silence = text

    def described(self, properties: Mapping[str, str]) -> None:
        self.properties = properties

    def measured(self, changes: MetricChanges) -> None:
        self._metrics.apply(changes)

    def stop_waiting(self) -> None:
        if self._outage_timer is not None:
            self._outage_timer.cancel()
            self._outage_timer = None

    def _outage(self) -> None:
        """Nobody should wait for ever: until a worker is back, requests are refused with the reason."""
        self._outage_timer = None
        if not self._open:
            self.refuse_waiting(unavailable(f"model '{self._model_name}' has no worker: {self.reason}"))

    def _hand_over(self, call: Callable[[_Handed], None], handed: _Handed) -> None:
        self._plane.call_soon(functools.partial(call, handed))


async def drained(plane: PlaneLoop, close: Callable[[Callable[[], None]], None], seconds: float) -> bool:
    """Close a version, and wait until all that it took has been answered, at most so long (0 = without a limit);
    whether it has been."""
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
