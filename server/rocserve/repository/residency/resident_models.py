"""Resident models: registers versions, loads them when they are requested, and unloads them as room.py decides."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rocserve.backends.host import Host
from rocserve.config.model_limits import idle_unload_seconds, is_pinned
from rocserve.core.backoff import Backoff
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, internal, unavailable
from rocserve.core.model_config import InstanceKind
from rocserve.core.serving import ServedVersion
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.content import ModelContent
from rocserve.repository.engine_plan import SMALL_MODEL_BYTES
from rocserve.repository.lifecycle import BackgroundTasks
from rocserve.repository.loads import FilesChanged, LoadedVersion, LoadSlots
from rocserve.repository.residency.lazy_version import LazyVersion, Load
from rocserve.repository.residency.room import MODELS, Room, Stage
from rocserve.repository.retries import Failure, RetryPolicy
from rocserve.scheduling.ensemble.graph import find_member
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.settings import ResidencySettings
from rocserve.workers.resource_watch import share_bytes

_HOST = "memory of the host"
_WORKER_BYTES = 12 << 20
"""Memory of a worker in addition to its model's files, until it is measured."""
_FILES_CHANGED = (
    "its files are not what they were when it was registered; load it again, or restart the server if it has"
    " --model-control-mode=none"
)
_PATIENCE_SECONDS = 10.0
"""After this time a load lets the next one begin."""
_RESCAN_SECONDS = 0.01
"""Pause between checks while a version waits for room, because nothing reports the end of a request."""


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


class ResidentModels:
    """Loads and unloads resident versions. Lives on the asyncio loop; some calls allow other threads."""

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
        """`pinned`: names of models that are never unloaded. `most_waiting`: requests that may wait for one load."""
        self.counts = ResidencyCounts()
        self.settings = settings
        self.most_waiting = most_waiting
        self.plane = plane
        self.dispatcher = dispatcher
        self._pinned = frozenset(pinned)
        self._slots = LoadSlots(concurrent_loads, _PATIENCE_SECONDS)
        self._log = log
        self._background = BackgroundTasks(log)
        self._retry = RetryPolicy(Backoff(1.0, 60.0))
        limits = {MODELS: settings.max_loaded_models, _HOST: settings.max_model_memory}
        limits |= {_gpu(number): settings.max_model_gpu_memory for number in Host().gpus}
        self._limits = {place: most for place, most in limits.items() if most is not None}
        self._room = Room[LazyVersion](self._limits)
        self._versions: set[LazyVersion] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    # For the repository

    def manages(self, content: ModelContent) -> bool:
        """Whether the model's versions may be unloaded; ensembles stay. Raises ServeError for a wrong parameter."""
        definition = content.definition
        if definition.is_ensemble:
            return False
        return idle_unload_seconds(definition.config.parameters) < math.inf or bool(self._limits)

    def registers(self, content: ModelContent) -> bool:
        """Whether a version can wait for a request: it may be unloaded, is not pinned, and has inputs and outputs."""
        message = content.definition.message
        # The load reports a wrong parameter.
        with contextlib.suppress(ServeError):
            return self.manages(content) and bool(message.input and message.output) and not self._is_pinned(content)
        return False

    def register(self, content: ModelContent, number: int, load: Load, on_change: Callable[[], None]) -> LazyVersion:
        """Register a version that its first request loads."""
        self._loop = asyncio.get_running_loop()
        definition = content.definition
        # The needs are estimated from the files and the configured instances until the first load.
        needs = Counter({_HOST: 0})
        file_bytes = content.scan.versions[number].total_bytes
        assert definition.backend is not None, "an ensemble is not registered"
        # The same rule as in plan_workers, for the backend's first engine.
        has_threads = definition.backend.engines[0].thread_safe and file_bytes > SMALL_MODEL_BYTES
        for group in definition.config.instance_groups:
            gpus = () if group.kind is InstanceKind.CPU else group.gpus or Host().gpus
            workers = 0 if group.passive else 1 if has_threads and not gpus else group.count
            needs[_HOST] += workers * (_WORKER_BYTES + file_bytes)
            needs.update({_gpu(gpu): workers * file_bytes for gpu in gpus})
        version = LazyVersion(definition, number, needs, self._is_pinned(content), load, on_change, self)
        self._versions.add(version)
        return version

    async def ensure_loaded(self, version: ServedVersion | None) -> None:
        """Load a version, and an ensemble's members, and wait for it. Raises ServeError if the load fails."""
        if isinstance(version, EnsembleVersion):
            for member in self._members(version):
                await self.ensure_loaded(member)
        elif isinstance(version, LazyVersion) and not version.is_loaded:
            if version.is_retired:
                raise unavailable(f"model '{version.name}' version {version.version}: {_FILES_CHANGED}")
            version.load_future = load_future = version.load_future or asyncio.get_running_loop().create_future()
            version.failure = None
            version.note_use(time.monotonic())
            self.want(version)
            # Others may wait for the same load.
            await asyncio.shield(load_future)

    def note_newer_problem(self, version: LazyVersion, problem: ServeError | None) -> None:
        """Note why the newer content cannot be used; None = it can. Requests do not wait for unusable content."""
        version.newer_problem = problem
        if version.is_retired and problem is not None:
            version.failure = Failure(problem)
            self._refuse_waiting(version)

    def load_members(self, ensemble: EnsembleVersion) -> None:
        """Load all members of an ensemble, at the same time. Called on the data plane's thread."""
        for member in self._members(ensemble):
            if isinstance(member, LazyVersion):
                member.want()

    async def unload(self, version: LazyVersion) -> None:
        """Unload a version for good."""
        version.is_retired = True
        self._room.withdraw(version)
        if version.task is not None and version.stage is Stage.LOADING:
            version.task.cancel()
        await _end_of(version.task)
        version.complete_load(unavailable(f"model '{version.name}' was unloaded before it was loaded"))
        loaded = await self._on_plane(version.close)
        if loaded is not None:
            await loaded.unload()
        # An unload for other versions may have begun.
        await _end_of(version.task)
        self._versions.discard(version)
        self._room.remove(version)
        self._run_moves()

    # For the metrics

    def resident(self) -> int:
        """Return the number of loaded versions. Called from any thread."""
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
        """Cancel the wait for room if no request waits; without effect during the load."""
        if not version.has_waiting:
            self._room.withdraw(version)

    def want(self, version: LazyVersion) -> None:
        if not version.is_retired:
            self._room.want(version)
            self._run_moves()

    def _run_moves(self) -> None:
        """Start the loads, unloads and refusals that are due, and schedule the next call."""
        now = time.monotonic()
        moves = self._room.moves(now)
        idle, again = self._room.idle(now)
        for version in moves.refuse:
            needs = ", ".join(f"{amount >> 20} MiB {place}" for place, amount in version.needs.items())
            self._failed(version, unavailable(f"there is no room for it next to the pinned models: {needs}"))
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
            self._timer = asyncio.get_running_loop().call_later(again - now, self._run_moves)

    async def _unload(self, version: LazyVersion, for_room: bool) -> None:
        loaded = await self._on_plane(version.release)
        if loaded is None:
            self._room.loaded(version, version.needs)
        else:
            self.counts.unloads_for_room += for_room
            self.counts.unloads_of_idle += not for_room
            version.on_change()
            await loaded.unload()
            self._room.remove(version)
            why = "to make room" if for_room else "since nobody asked for it"
            self._log.info("unloaded '%s' version %d %s", version.name, version.version, why)
            if version.has_waiting:
                self.want(version)
        self._run_moves()

    async def _load(self, version: LazyVersion) -> None:
        began = time.monotonic()
        try:
            async with self._slots.acquire(compiles=False):
                free = _free_gpu_bytes()
                loaded = await version.load(functools.partial(setattr, version, "progress"))
        except asyncio.CancelledError:
            self._room.remove(version)
            raise
        except Exception as error:
            failure = error if isinstance(error, ServeError) else internal(f"{type(error).__name__}: {error}")
            self._failed(version, failure, time.monotonic() - began)
            self._run_moves()
            return
        needs = version.needs
        if self._limits.keys() - {MODELS}:
            # A shared worker's memory is divided equally among its models. Memory that a GPU lost is counted fully,
            # even if other versions load meanwhile.
            host = sum(share_bytes(pid) // models for pid, models in loaded.worker_pids.items())
            left = _free_gpu_bytes().items()
            needs = {_HOST: host, **{_gpu(gpu): max(free.get(gpu, 0) - now, 0) for gpu, now in left}}
        self.counts.loads += 1
        self._room.loaded(version, needs)
        await self._on_plane(functools.partial(version.open, loaded))
        version.complete_load()
        self._log.info("loaded '%s' version %d in %.3f s", version.name, version.version, time.monotonic() - began)
        version.on_change()
        self._run_moves()

    def _failed(self, version: LazyVersion, error: ServeError, took_seconds: float = 0.0) -> None:
        """Note a failed load, and refuse the waiting requests. If the files changed, the requests wait for the settled
        new version unless it is known to be unusable. Under explicit control the model must be loaded by name."""
        self._room.remove(version)
        if isinstance(error, FilesChanged):
            version.is_retired = True
            problem = version.newer_problem if error.is_followed else unavailable(_FILES_CHANGED)
            version.failure = None if problem is None else Failure(problem)
        else:
            self.counts.failed_loads += 1
            version.failure = self._retry.next_failure(error, version.failure, took_seconds)
            if not version.is_first_load:
                text = version.failure.text
                self._log.error("failed to load '%s' version %d: %s", version.name, version.version, text)
        version.complete_load(error)
        self._refuse_waiting(version)

    def _refuse_waiting(self, version: LazyVersion) -> None:
        if (refusal := version.cold_refusal()) is not None:
            self.plane.call_soon(functools.partial(version.refuse, refusal))
        version.on_change()

    def call_on_loop(self, call: Callable[[LazyVersion], None], version: LazyVersion) -> None:
        """Call on the loop. Called from any thread."""
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
