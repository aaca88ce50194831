"""Resident models: registers versions, loads them when they are asked for, and unloads them as room.py says. Requests
that find a version cold wait until it is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rocserve.backends.host import Host
from rocserve.config.definition import ModelDefinition
from rocserve.config.model_limits import idle_unload_seconds, is_pinned
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, StatusCode, deadline_exceeded, internal, unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.requests import Answer, InferRequest
from rocserve.core.serving import ForwardingResponder, Responder, ServedVersion
from rocserve.core.statistics import ModelStatistics
from rocserve.plane.heap import SharedHeap
from rocserve.plane.loop import PlaneLoop, TimerHandle
from rocserve.repository.content import ModelContent
from rocserve.repository.lifecycle import (
    BackgroundTasks,
    Failure,
    FilesChanged,
    LoadedVersion,
    LoadSlots,
    RetryPolicy,
)
from rocserve.repository.membership import find_member
from rocserve.repository.residency.room import MODELS, Room, Stage, Tenant
from rocserve.scheduling.ensemble.run import EnsembleVersion
from rocserve.scheduling.scheduler import cancelled
from rocserve.scheduling.served_version import ScheduledVersion
from rocserve.settings import ResidencySettings
from rocserve.workers.resource_watch import share_bytes

_HOST = "memory of the host"
_WORKER_BYTES = 12 << 20
"""What a worker takes beside its model's files, before it has been measured."""
_FILES_CHANGED = "its files are not what they were when it was registered; load it anew"
_PATIENCE_SECONDS = 10.0
"""After these a load lets the next begin beside it."""
_RESCAN_SECONDS = 0.01
"""While a version waits for room: the end of a request is not reported."""
_NOT_LOADED = "not loaded: its first request loads it"

Load = Callable[[Callable[[str], None]], Awaitable[LoadedVersion]]
"""Loads the version, calling back with its progress. Raises: ServeError; FilesChanged."""


@dataclass(slots=True)
class ResidencyCounts:
    """From the server's start."""

    loads: int = 0
    failed_loads: int = 0
    unloads_for_room: int = 0
    unloads_of_idle: int = 0
    cold_requests: int = 0
    """That waited until their model was loaded."""
    cold_seconds: float = 0.0


class ResidentModels:
    """Lives on the asyncio loop; what says otherwise may be called from elsewhere."""

    def __init__(
        self,
        settings: ResidencySettings,
        plane: PlaneLoop,
        dispatcher: Dispatcher,
        *,
        pinned: Sequence[str],
        most_waiting: int,
        concurrent_loads: int,
        log: logging.Logger,
    ) -> None:
        """`pinned`: the names of models that are never unloaded. `most_waiting`: requests, for a version's load."""
        self.counts = ResidencyCounts()
        self.settings = settings
        self.most_waiting = most_waiting
        self.plane = plane
        self.dispatcher = dispatcher
        self._pinned = frozenset(pinned)
        self._slots = LoadSlots(concurrent_loads, _PATIENCE_SECONDS)
        self._log = log
        self._background = BackgroundTasks(log)
        self._retry = RetryPolicy(1.0, 60.0)
        limits = {MODELS: settings.max_loaded_models, _HOST: settings.max_model_memory}
        limits |= {_gpu(number): settings.max_model_gpu_memory for number in Host().gpus}
        self._limits = {place: most for place, most in limits.items() if most is not None}
        self._room = Room[LazyVersion](self._limits)
        self._versions: set[LazyVersion] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    # For the repository

    def manages(self, content: ModelContent) -> bool:
        """Whether versions of the model come and go. Ensembles have no workers, and stay."""
        definition = content.definition
        if definition.is_ensemble:
            return False
        return bool(self._limits) or idle_unload_seconds(definition.config.parameters) < math.inf

    def registers(self, content: ModelContent) -> bool:
        """Whether a version need not be loaded now: it is not pinned, and its configuration says what clients want to
        know."""
        message = content.definition.message
        return self.manages(content) and bool(message.input and message.output) and not self._is_pinned(content)

    def register(self, content: ModelContent, number: int, load: Load, on_change: Callable[[], None]) -> LazyVersion:
        """A version that is loaded when it is asked for."""
        self._loop = asyncio.get_running_loop()
        definition = content.definition
        # Before it has been loaded: by its files, and the instances that are asked for.
        needs = Counter({_HOST: 0})
        file_bytes = content.scan.versions[number].total_bytes
        for group in definition.config.instance_groups:
            needs[_HOST] += group.count * (_WORKER_BYTES + file_bytes)
            if group.kind is not InstanceKind.CPU:
                needs.update({_gpu(gpu): group.count * file_bytes for gpu in group.gpus or Host().gpus})
        version = LazyVersion(definition, number, needs, self._is_pinned(content), load, on_change, self)
        self._versions.add(version)
        return version

    async def bring(self, version: ServedVersion | None) -> None:
        """Have it loaded, and an ensemble's members: a client says so, or there is no waiting for requests. Raises:
        ServeError: why it cannot be loaded."""
        if isinstance(version, EnsembleVersion):
            for member in self._members(version):
                await self.bring(member)
        elif isinstance(version, LazyVersion) and not version.is_loaded:
            if version.is_over:
                raise unavailable(f"model '{version.name}' version {version.version}: {_FILES_CHANGED}")
            version.brought = brought = version.brought or asyncio.get_running_loop().create_future()
            version.failure = None
            version.note_use(time.monotonic())
            self.want(version)
            # Others may wait for it as well.
            await asyncio.shield(brought)

    def bring_members(self, ensemble: EnsembleVersion) -> None:
        """Load all that a request to an ensemble will come to, beside each other. On the data plane's thread."""
        for member in self._members(ensemble):
            if isinstance(member, LazyVersion):
                member.want()

    async def unload(self, version: LazyVersion) -> None:
        """For good."""
        version.is_over = True
        self._room.withdraw(version)
        if version.task is not None and version.stage is Stage.LOADING:
            version.task.cancel()
        await _end_of(version.task)
        version.answer_brought(unavailable(f"model '{version.name}' was unloaded before it was loaded"))
        loaded = await self._on_plane(version.close)
        if loaded is not None:
            await loaded.unload()
        # It may have been about to make room.
        await _end_of(version.task)
        self._versions.discard(version)
        self._room.left(version)
        self._move()

    # For the metrics

    def resident(self) -> int:
        """How many versions are loaded; from any thread."""
        return sum(version.stage is Stage.LOADED for version in tuple(self._versions))

    @property
    def registered(self) -> int:
        return len(self._versions)

    def _is_pinned(self, content: ModelContent) -> bool:
        return content.definition.name in self._pinned or is_pinned(content.definition.config.parameters)

    def _members(self, ensemble: EnsembleVersion) -> Iterable[ServedVersion | None]:
        table = ensemble.dispatcher.tables.table.models
        return dict.fromkeys(find_member(step, table) for step in ensemble.config.ensemble_steps)

    def withdraw(self, version: LazyVersion) -> None:
        """It is asked for no more; without effect when it is being loaded."""
        if not version.has_waiting:
            self._room.withdraw(version)

    def want(self, version: LazyVersion) -> None:
        """Load it: it is asked for."""
        if not version.is_over:
            self._room.want(version)
            self._move()

    def _move(self) -> None:
        """Load, unload and refuse what is due, now and from time to time."""
        now = time.monotonic()
        moves = self._room.moves(now)
        idle, again = self._room.idle(now)
        for version in moves.refuse:
            needs = ", ".join(f"{amount >> 20} MiB {place}" for place, amount in version.needs.items())
            self._failed(version, unavailable(f"there is no room for it beside what is pinned: {needs}"))
        for version in (*moves.unload, *idle):
            work = self._unload(version, for_room=version not in idle)
            version.task = self._background.start(work, f"unload of {version.name} {version.version}")
        for version in moves.load:
            version.task = self._background.start(self._load(version), f"load of {version.name} {version.version}")
        if self._room.has_waiting:
            again = now + _RESCAN_SECONDS
        if self._timer is not None:
            self._timer.cancel()
        if again < math.inf:
            self._timer = asyncio.get_running_loop().call_later(again - now, self._move)

    async def _unload(self, version: LazyVersion, for_room: bool) -> None:
        loaded = await self._on_plane(version.release)
        if loaded is None:
            self._room.stays(version)
        else:
            self.counts.unloads_for_room += for_room
            self.counts.unloads_of_idle += not for_room
            version.on_change()
            await loaded.unload()
            self._room.left(version)
            why = "to make room" if for_room else "since nobody asked for it"
            self._log.info("unloaded '%s' version %d %s", version.name, version.version, why)
            if version.has_waiting:
                self.want(version)
        self._move()

    async def _load(self, version: LazyVersion) -> None:
        began = time.monotonic()
        try:
            async with self._slots.taken(compiles=False):
                free = _free_gpu_bytes()
                loaded = await version.load(functools.partial(setattr, version, "progress"))
        except asyncio.CancelledError:
            self._room.left(version)
            raise
        except Exception as error:
            failure = error if isinstance(error, ServeError) else internal(f"{type(error).__name__}: {error}")
            self._failed(version, failure, time.monotonic() - began)
            self._move()
            return
        needs = version.needs
        if self._limits.keys() - {MODELS}:
            # Of workers that are shared an equal part. What a GPU has lost is counted whole, though others may load
            # meanwhile.
            host = sum(share_bytes(pid) // models for pid, models in loaded.worker_pids.items())
            left = _free_gpu_bytes().items()
            needs = {_HOST: host, **{_gpu(gpu): max(free.get(gpu, 0) - now, 0) for gpu, now in left}}
        self.counts.loads += 1
        self._room.loaded(version, needs)
        await self._on_plane(functools.partial(version.open, loaded))
        version.answer_brought()
        self._log.info("loaded '%s' version %d in %.3f s", version.name, version.version, time.monotonic() - began)
        version.on_change()
        self._move()

    def _failed(self, version: LazyVersion, error: ServeError, took_seconds: float = 0.0) -> None:
        """Waiting requests are refused. Where its files have changed, they go to the version of the new ones when those
        have settled; where changes are not followed, the model has to be loaded by name."""
        self._room.left(version)
        if isinstance(error, FilesChanged):
            version.is_over = True
            version.failure = None if error.is_followed else Failure(unavailable(_FILES_CHANGED))
        else:
            self.counts.failed_loads += 1
            version.failure = self._retry.next_failure(error, "", version.failure, took_seconds)
            self._log.error("failed to load '%s' version %d: %s", version.name, version.version, version.failure.text)
        version.answer_brought(error)
        if (refusal := version.cold_refusal()) is not None:
            self.plane.call_soon(functools.partial(version.refuse, refusal))
        version.on_change()

    def soon(self, call: Callable[[LazyVersion], None], version: LazyVersion) -> None:
        """Call on the loop; from any thread."""
        assert self._loop is not None, "a version is registered"
        # The loop may have ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, version)

    async def _on_plane(self, call: Callable[[], LoadedVersion | None]) -> LoadedVersion | None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[LoadedVersion | None] = loop.create_future()

        def run() -> None:
            loop.call_soon_threadsafe(done.set_result, call())

        self.plane.call_soon(run)
        return await done


class LazyVersion(Tenant):
    """Implements repository.lifecycle.LoadedVersion. What has to do with requests is called on the data plane's thread,
    all else on the asyncio loop, but that properties may be read from any."""

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
        """As the last load has completed it."""
        self.config_message = definition.serialized
        self.load = load
        self.on_change = on_change
        self.failure: Failure | None = None
        """Of the last load; the next is not tried before that may be."""
        self.progress = ""
        """What the load that runs is at."""
        self.is_over = False
        """It is not loaded any more: its files are not what they were when it was registered, or it is to go."""
        self.task: asyncio.Task[None] | None = None
        """The load, or the unloading."""
        self.brought: asyncio.Future[None] | None = None
        """What those await who wait for the load without a request."""
        self._residents = residents
        self._loaded: LoadedVersion | None = None
        self._statistics: ModelStatistics | None = None
        self._waiting: dict[_Counted, None] = {}
        batching = self.config.sequence_batching
        self._hold_seconds = batching.max_sequence_idle_microseconds / 1e6 if batching is not None else 0.0

    # Requests

    def infer(self, request: InferRequest, responder: Responder) -> None:
        now = time.monotonic()
        self.note_use(now)
        if self._hold_seconds:
            self.held_until = now + self._hold_seconds
        counted = _Counted(self, responder)
        if self._loaded is not None:
            self._loaded.infer(request, counted)
        else:
            self._infer_cold(request, counted, now)

    def want(self) -> None:
        """Load it: a request of an ensemble will come to it."""
        if self._loaded is None and self.cold_refusal() is None:
            self.note_use(time.monotonic())
            self._residents.soon(self._residents.want, self)

    def cold_refusal(self) -> ServeError | None:
        """Why it is not loaded for a request now."""
        failure = self.failure
        if failure is None or failure.is_due():
            return None
        return unavailable(f"model '{self.name}' version {self.version} could not be loaded: {failure.text}")

    def open(self, loaded: LoadedVersion) -> None:
        """It is loaded: those that wait are run, in the order in which they came."""
        if self._statistics is not None:
            loaded.statistics.go_on_from(self._statistics)
        self.config, self.config_message, self._statistics = loaded.config, loaded.config_message, loaded.statistics
        self._loaded, self.failure = loaded, None
        now = time.monotonic()
        for waiting in self._take_waiting():
            self._residents.counts.cold_requests += 1
            self._residents.counts.cold_seconds += now - waiting.since
            loaded.infer(waiting.request, waiting)

    def refuse(self, error: ServeError) -> None:
        """It cannot be loaded."""
        for waiting in self._take_waiting():
            self._fail(waiting, ServeError(error.code, error.text))

    def release(self) -> LoadedVersion | None:
        """The version to unload; None: it is in use."""
        if not self.is_idle(time.monotonic()):
            return None
        loaded, self._loaded = self._loaded, None
        return loaded

    def close(self) -> LoadedVersion | None:
        """It serves no more: waiting requests go to the version in its place. Returns the version to unload."""
        loaded, self._loaded = self._loaded, None
        for waiting in self._take_waiting():
            self._residents.dispatcher.dispatch(waiting.request, waiting)
        return loaded

    def _infer_cold(self, request: InferRequest, waiting: _Counted, now: float) -> None:
        waiting.request, waiting.since = request, now
        refusal = self.cold_refusal()
        if refusal is None:
            if not self.is_over:
                self._residents.soon(self._residents.want, self)
            if not self._residents.settings.wait_for_model:
                refusal = unavailable(f"model '{self.name}' is being loaded; ask again in a second")
                refusal.retry_seconds = 1.0
            elif len(self._waiting) >= self._residents.most_waiting:
                refusal = unavailable(f"Exceeds maximum queue size: model '{self.name}' is being loaded")
        if refusal is not None:
            self._fail(waiting, refusal)
            return
        limit = now + self._residents.settings.model_wait_seconds
        until = limit if request.deadline is None else min(limit, request.deadline)
        waiting.timer = self._residents.plane.call_at(until, functools.partial(self._expire, waiting, until < limit))
        self._waiting[waiting] = None
        waiting.watch_cancellation(functools.partial(self._drop, waiting, cancelled()))

    def _expire(self, waiting: _Counted, is_deadline: bool) -> None:
        text = f"model '{self.name}' was not loaded within {self._residents.settings.model_wait_seconds:g} s; ask again"
        self._drop(waiting, deadline_exceeded() if is_deadline else unavailable(text))

    def _drop(self, waiting: _Counted, error: ServeError) -> None:
        if waiting in self._waiting:
            del self._waiting[waiting]
            waiting.timer.cancel()
            self._fail(waiting, error)
            if not self._waiting:
                self._residents.soon(self._residents.withdraw, self)

    def _fail(self, waiting: _Counted, error: ServeError) -> None:
        began, now = int(waiting.since * 1e9), time.monotonic_ns()
        if error.code is StatusCode.CANCELLED:
            self._own_statistics().record_cancellation(began, now)
        else:
            self._own_statistics().record_rejection(began, now)
            self._own_statistics().note_failure(error.text)
        waiting.send(error)

    def _take_waiting(self) -> Sequence[_Counted]:
        waiting, self._waiting = tuple(self._waiting), {}
        for one in waiting:
            one.timer.cancel()
        return waiting

    def _own_statistics(self) -> ModelStatistics:
        if self._statistics is None:
            self._statistics = ModelStatistics()
        return self._statistics

    def answer_brought(self, error: ServeError | None = None) -> None:
        """On the loop."""
        brought, self.brought = self.brought, None
        if brought is not None and error is not None:
            brought.set_exception(error)
        elif brought is not None:
            brought.set_result(None)

    # State

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    @property
    def was_asked(self) -> bool:
        """Whether there is anything to count of it."""
        return self._statistics is not None

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting or self.brought)

    @property
    def inputs(self) -> SharedHeap | None:
        """Where its workers read inputs of requests."""
        loaded = self._loaded
        return loaded.inputs if isinstance(loaded, ScheduledVersion) else None

    @property
    def statistics(self) -> ModelStatistics:
        """Over all its loads."""
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
        shown = {Stage.WAITING: "waits for room", Stage.LOADING: self.progress or "is being loaded"}
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
    def worker_pids(self) -> Mapping[int, int]:
        return {} if (loaded := self._loaded) is None else loaded.worker_pids

    @property
    def worker_restarts(self) -> int:
        return 0 if (loaded := self._loaded) is None else loaded.worker_restarts

    def follow_members(self, is_decoupled: bool) -> None:
        """See repository.lifecycle.LoadedVersion; it has none."""

    async def unload(self) -> None:
        await self._residents.unload(self)


class _Counted(ForwardingResponder):
    """Counts its request as in flight until it is answered. Its client's leaving is reported to the last that watches
    for it: first to the wait for the load, then to the version."""

    __slots__ = ("_has_left", "_on_left", "_tenant", "request", "since", "timer")

    request: InferRequest
    """With `since` and `timer`, of one that waits for a load."""
    since: float
    timer: TimerHandle

    def __init__(self, tenant: Tenant, responder: Responder) -> None:
        super().__init__(responder)
        self._tenant = tenant
        self._on_left: Callable[[], None] | None = None
        self._has_left = False
        tenant.in_flight += 1

    def send(self, answer: Answer, final: bool = True) -> None:
        self._tenant.in_flight -= final
        self._responder.send(answer, final)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        is_first, self._on_left = self._on_left is None, callback
        if self._has_left:
            callback()
        elif is_first:
            self._responder.watch_cancellation(self._left)

    def _left(self) -> None:
        self._has_left = True
        if self._on_left is not None:
            self._on_left()


async def _end_of(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await asyncio.wait((task,))


def _gpu(number: int) -> str:
    return f"memory of GPU {number}"


def _free_gpu_bytes() -> Mapping[int, int]:
    host = Host()
    gpus = map(host.gpu, host.gpus)
    found = {gpu.number: host.free_gpu_memory(gpu) for gpu in gpus if gpu is not None}
    return {number: memory.free_bytes for number, memory in found.items() if memory is not None}
