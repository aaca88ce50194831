"""Registers the versions of resident models, loads them on request, and unloads them as room.py decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rocserve.backends.host import Host
from rocserve.config.model_limits import idle_unload_seconds, is_pinned
from rocserve.core.backoff import Backoff
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.model_config import InstanceKind
from rocserve.observability.log_fields import about
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.background_tasks import BackgroundTasks
from rocserve.repository.content import ModelContent
from rocserve.repository.engine_plan import SMALL_MODEL_BYTES
from rocserve.repository.load_order import FilesChanged, LoadedVersion
from rocserve.repository.load_slots import LoadSlots
from rocserve.repository.residency.room import MODELS, Room, Stage, Tenant
from rocserve.repository.retries import Retries
from rocserve.scheduling.queue import QueueLimits
from rocserve.settings import ResidencySettings
from rocserve.workers.resource_watch import share_bytes

_Result = TypeVar("_Result")

_HOST = "memory of the host"


@dataclass(slots=True)
class ResidencyCounts:
    """Counted since the server's start."""

    loads: int = 0
    failed_loads: int = 0
    unloads_for_room: int = 0
    unloads_of_idle: int = 0
    cold_requests: int = 0
    """Requests that waited for their model's load."""
    cold_seconds: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Resident(Tenant):
    """A version that may be unloaded, with its life's callbacks, which run on the loop except `count_in_flight`."""

    needs: Mapping[str, int] = field(default_factory=dict)
    name: str
    number: int
    hold_seconds: float
    """Seconds after each request in which the version's sequences may continue."""
    count_in_flight: Callable[[], int]
    wake: Callable[[], None]
    """Loads the version, unless it must not be loaded now."""
    review: Callable[[], None]
    """Loads the version if somebody waits for it; else stops a load that waits for room."""
    ensure_loaded: Callable[[], Awaitable[None]]
    evict: Callable[[], Awaitable[None]]
    eviction: asyncio.Task[None] | None = None
    """The last unload after which it was, or will be, cold."""

    @property
    def in_flight(self) -> int:
        return self.count_in_flight()

    def use(self) -> None:
        """Note a request. On the data plane's thread."""
        now = time.monotonic()
        self.note_use(now)
        if self.hold_seconds:
            self.held_until = now + self.hold_seconds


class ResidentModels:
    """Loads and unloads resident versions. Lives on the asyncio loop; some calls allow other threads."""

    def __init__(
        self,
        settings: ResidencySettings,
        plane: PlaneLoop,
        dispatcher: Dispatcher,
        *,
        pinned: Sequence[str],
        limits: QueueLimits,
        concurrent_loads: int,
        log: logging.Logger,
    ) -> None:
        """`pinned`: names of models that are never unloaded. `limits`: of the requests that wait for one load."""
        self.counts = ResidencyCounts()
        self.settings = settings
        self.limits = limits
        self.plane = plane
        self.dispatcher = dispatcher
        self._pinned = frozenset(pinned)
        # After ten seconds a load lets the next one begin.
        self._slots = LoadSlots(concurrent_loads, 10.0)
        self.log = log
        self._background = BackgroundTasks(log)
        self.retries = Retries(Backoff(1.0, 60.0))
        """Decides when a request may load a version again after a failed load."""
        room = {MODELS: settings.max_loaded_models, _HOST: settings.max_model_memory}
        room |= {_gpu(number): settings.max_model_gpu_memory for number in Host().gpus}
        self._room_limits = {place: most for place, most in room.items() if most is not None}
        self._room: Room[Resident] = Room(self._room_limits)
        self._registered: set[Resident] = set()
        self._admissions: dict[Resident, asyncio.Future[None]] = {}
        """Loads that wait for room, or run."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    # For the lives of versions

    def manages(self, content: ModelContent) -> bool:
        """Whether the model's versions may be unloaded; ensembles stay. Raises ServeError for a wrong parameter."""
        definition = content.definition
        if definition.is_ensemble:
            return False
        return idle_unload_seconds(definition.config.parameters) < math.inf or bool(self._room_limits)

    def registers(self, content: ModelContent, number: int) -> bool:
        """Whether a version can wait for a request: it may be unloaded, is not pinned, and has inputs and outputs."""
        message = content.definition.message
        if content.definition.refusal is not None or content.scan.versions[number].refusal:
            return False
        # The load reports a wrong parameter.
        with contextlib.suppress(ServeError):
            return self.manages(content) and bool(message.input and message.output) and not self._is_pinned(content)
        return False

    def admit(self, resident: Resident, content: ModelContent) -> None:
        """Count a version among those that may be unloaded, until `leave`."""
        self._loop = asyncio.get_running_loop()
        definition = content.definition
        # The needs are estimated from the files and the configured instances until the first load.
        needs = Counter({_HOST: 0})
        file_bytes = content.scan.versions[resident.number].total_bytes
        assert definition.backend is not None, "an ensemble stays"
        # The same rule as in plan_workers, for the backend's first engine.
        has_threads = definition.backend.engines[0].thread_safe and file_bytes > SMALL_MODEL_BYTES
        for group in definition.config.instance_groups:
            gpus = () if group.kind is InstanceKind.CPU else group.gpus or Host().gpus
            workers = 0 if group.passive else 1 if has_threads and not gpus else group.count
            # A worker takes about 12 MiB in addition to its model's files.
            needs[_HOST] += workers * ((12 << 20) + file_bytes)
            needs.update({_gpu(gpu): workers * file_bytes for gpu in gpus})
        resident.needs, resident.is_pinned = needs, self._is_pinned(content)
        resident.idle_seconds = idle_unload_seconds(definition.config.parameters)
        self._registered.add(resident)

    async def load(self, resident: Resident, load: Callable[[], Awaitable[LoadedVersion]]) -> LoadedVersion:
        """Run a load when there is room and a slot for it. Raises ServeError if it fails, or can never fit next to the
        pinned versions."""
        self._admissions[resident] = admission = asyncio.get_running_loop().create_future()
        resident.note_use(time.monotonic())
        self._room.want(resident)
        self._run_moves()
        try:
            await admission
            began = time.monotonic()
            async with self._slots.acquire(compiles=False):
                free = _free_gpu_bytes()
                loaded = await load()
        except BaseException as error:
            self.counts.failed_loads += isinstance(error, Exception) and not isinstance(error, FilesChanged)
            self._room.remove(resident)
            self._run_moves()
            raise
        finally:
            del self._admissions[resident]
        needs = resident.needs
        if self._room_limits.keys() - {MODELS}:
            # A shared worker's memory is divided equally among its models. Memory that a GPU lost is counted fully,
            # even if other versions load meanwhile.
            host = sum(share_bytes(pid) // models for pid, models in loaded.worker_pids.items())
            left = _free_gpu_bytes().items()
            needs = {_HOST: host, **{_gpu(gpu): max(free.get(gpu, 0) - now, 0) for gpu, now in left}}
        self.counts.loads += 1
        self._room.loaded(resident, needs)
        took = time.monotonic() - began
        fields = about(model=resident.name, version=resident.number, duration_ms=took * 1000)
        self.log.info("loaded '%s' version %d in %.3f s", resident.name, resident.number, took, extra=fields)
        self._run_moves()
        return loaded

    def leave(self, resident: Resident) -> None:
        """Note that a version is gone."""
        self._registered.discard(resident)
        self._room.remove(resident)
        self._run_moves()

    def call_on_loop(self, call: Callable[[], None]) -> None:
        """Call on the loop. Called from any thread."""
        assert self._loop is not None, "a version is registered"
        # The loop may have ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    async def on_plane(self, call: Callable[[], _Result]) -> _Result:
        """Call on the data plane's thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()

        def finish(result: _Result) -> None:
            # The caller may have been cancelled.
            if not done.done():
                done.set_result(result)

        def run() -> None:
            loop.call_soon_threadsafe(finish, call())

        self.plane.call_soon(run)
        return await done

    # For the metrics

    def resident_count(self) -> int:
        """Return the number of loaded versions. Called from any thread."""
        return sum(resident.stage is Stage.LOADED for resident in tuple(self._registered))

    @property
    def registered(self) -> int:
        return len(self._registered)

    # Moves

    def _is_pinned(self, content: ModelContent) -> bool:
        return content.definition.name in self._pinned or is_pinned(content.definition.config.parameters)

    def _run_moves(self) -> None:
        """Start the loads, unloads and refusals that are due, and schedule the next call."""
        now = time.monotonic()
        load, unload, refuse = self._room.moves(now)
        idle, again = self._room.idle(now)
        for resident in (*refuse, *load):
            admission = self._admissions[resident]
            if admission.done():
                # The load was stopped, and will give its room back soon.
                continue
            if resident in load:
                admission.set_result(None)
            else:
                needs = ", ".join(f"{amount >> 20} MiB {place}" for place, amount in resident.needs.items())
                text = f"there is no room for it next to the pinned models: {needs}"
                admission.set_exception(unavailable(text))
        for resident in (*unload, *idle):
            work = self._evict(resident, for_room=resident not in idle)
            resident.eviction = self._background.start(work, f"unload of {resident.name} {resident.number}")
        if any(resident.stage is Stage.WAITING for resident in self._admissions):
            # Nothing reports the end of a request.
            again = now + 0.01
        if self._timer is not None:
            self._timer.cancel()
        if again < math.inf:
            self._timer = asyncio.get_running_loop().call_later(again - now, self._run_moves)

    async def _evict(self, resident: Resident, for_room: bool) -> None:
        # Checked again on the thread that takes requests: one may have arrived since.
        is_idle = await self.on_plane(lambda: resident.is_idle(time.monotonic()))
        if is_idle and not resident.is_retired:
            self.counts.unloads_for_room += for_room
            self.counts.unloads_of_idle += not for_room
            await resident.evict()
            self._room.remove(resident)
            why = "to make room" if for_room else "because it was idle"
            fields = about(model=resident.name, version=resident.number)
            self.log.info("unloaded '%s' version %d %s", resident.name, resident.number, why, extra=fields)
            resident.review()
        else:
            self._room.loaded(resident, resident.needs)
        self._run_moves()


def _gpu(number: int) -> str:
    return f"memory of GPU {number}"


def _free_gpu_bytes() -> Mapping[int, int]:
    host = Host()
    gpus = map(host.gpu, host.gpus)
    found = {gpu.number: host.free_gpu_memory(gpu) for gpu in gpus if gpu is not None}
    return {number: memory.free_bytes for number, memory in found.items() if memory is not None}
