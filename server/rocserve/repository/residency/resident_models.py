"""Resident models: registers versions, loads them when they are asked for, and unloads them as room.py says."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rocserve.backends.host import Host
from rocserve.config.model_limits import idle_unload_seconds, is_pinned
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, internal, unavailable
from rocserve.core.model_config import InstanceKind
from rocserve.core.serving import ServedVersion
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.content import ModelContent
from rocserve.repository.lifecycle import BackgroundTasks, LoadedVersion, ModelFiles
from rocserve.repository.load_slots import LoadSlots
from rocserve.repository.membership import find_member
from rocserve.repository.residency.lazy_version import Keeper, LazyVersion, Load, ResidencyCounts
from rocserve.repository.residency.room import MODELS, Room, Stage, Tenant
from rocserve.repository.retry import Failure, RetryPolicy, next_failure
from rocserve.scheduling.ensemble.run import EnsembleVersion
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
        self._keeper = Keeper(
            settings, most_waiting, plane, dispatcher, self.counts, self._want_soon, self._withdraw_soon, self.unload
        )
        self._plane = plane
        self._pinned = frozenset(pinned)
        self._slots = LoadSlots(concurrent_loads, _PATIENCE_SECONDS)
        self._log = log
        self._background = BackgroundTasks(log)
        self._retry = RetryPolicy(1.0, 60.0)
        limits = {MODELS: settings.max_models, _HOST: settings.max_host_bytes}
        limits |= {_gpu(number): settings.max_gpu_bytes for number in Host().gpus}
        self._limits = {place: most for place, most in limits.items() if most is not None}
        self._room = Room(self._limits)
        self._versions: dict[Tenant, LazyVersion] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._again: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    # For the repository

    def manages(self, content: ModelContent) -> bool:
        """Whether versions of the model come and go. Ensembles have no workers, and stay."""
        definition = content.definition
        if definition.is_ensemble:
            return False
        return bool(self._limits) or idle_unload_seconds(definition.config.parameters) < math.inf

    def registers(self, content: ModelContent, served: LoadedVersion | None) -> bool:
        """Whether a version need not be loaded now: it is not pinned, its configuration says what clients want to know,
        and it takes the place of none that is loaded, which serves on where the new one fails."""
        message = content.definition.message
        is_known = bool(message.input and message.output)
        is_used = served is not None and not (isinstance(served, LazyVersion) and not served.is_loaded)
        return self.manages(content) and is_known and not is_used and not self._is_pinned(content)

    def register(
        self, content: ModelContent, number: int, load: Load, on_change: Callable[[], None], files: ModelFiles
    ) -> LazyVersion:
        """A version that is loaded when it is asked for."""
        parameters = content.definition.config.parameters
        self._loop = asyncio.get_running_loop()
        tenant = Tenant(_estimate(content, number), self._is_pinned(content), idle_unload_seconds(parameters))
        version = LazyVersion(content, number, tenant, load, on_change, files, self._keeper)
        self._versions[tenant] = version
        return version

    async def bring(self, version: ServedVersion) -> None:
        """Have it loaded, and an ensemble's members: a client says so, or there is no waiting for requests. Raises:
        ServeError: why it cannot be loaded."""
        if isinstance(version, EnsembleVersion):
            for member in self._members(version):
                if member is not None:
                    await self.bring(member)
        elif isinstance(version, LazyVersion) and not version.is_loaded:
            if version.is_over:
                raise unavailable(f"model '{version.name}' version {version.version}: {_FILES_CHANGED}")
            done = asyncio.get_running_loop().create_future()
            version.brought.append(done)
            version.failure = None
            version.tenant.note_use(time.monotonic())
            self._want(version)
            await done

    def bring_members(self, ensemble: EnsembleVersion) -> None:
        """Load all that a request to an ensemble will come to, beside each other. On the data plane's thread."""
        for member in self._members(ensemble):
            if isinstance(member, LazyVersion):
                member.want()

    async def unload(self, version: LazyVersion) -> None:
        """For good."""
        version.is_over = True
        self._room.withdraw(version.tenant)
        if version.task is not None and version.tenant.stage is Stage.LOADING:
            version.task.cancel()
        await _end_of(version.task)
        for done in version.take_brought():
            done.set_exception(unavailable(f"model '{version.name}' was unloaded before it was loaded"))
        loaded = await self._on_plane(version.close)
        if loaded is not None:
            await loaded.unload()
        # It may have been about to make room.
        await _end_of(version.task)
        self._versions.pop(version.tenant, None)
        self._room.left(version.tenant)
        self._move()

    # For the metrics

    def resident(self) -> int:
        """How many versions are loaded; from any thread."""
        return sum(tenant.stage is Stage.LOADED for tenant in tuple(self._versions))

    @property
    def registered(self) -> int:
        return len(self._versions)

    def _is_pinned(self, content: ModelContent) -> bool:
        return content.definition.name in self._pinned or is_pinned(content.definition.config.parameters)

    def _members(self, ensemble: EnsembleVersion) -> Iterable[ServedVersion | None]:
        table = ensemble.dispatcher.tables.table.models
        return dict.fromkeys(find_member(step, table) for step in ensemble.config.ensemble_steps)

    def _want_soon(self, version: LazyVersion) -> None:
        """From any thread."""
        self._soon(functools.partial(self._want, version))

    def _withdraw_soon(self, version: LazyVersion) -> None:
        """From any thread."""
        self._soon(lambda: None if version.has_waiting else self._room.withdraw(version.tenant))

    def _want(self, version: LazyVersion) -> None:
        if not version.is_over:
            self._room.want(version.tenant)
            self._move()

    def _move(self) -> None:
        moves = self._room.moves(time.monotonic())
        for tenant in moves.refuse:
            needs = ", ".join(f"{amount >> 20} MiB {place}" for place, amount in tenant.needs.items())
            self._failed(self._versions[tenant], unavailable(f"there is no room for it beside what is pinned: {needs}"))
        for tenant in moves.unload:
            self._release(self._versions[tenant])
        for tenant in moves.load:
            version = self._versions[tenant]
            version.task = self._background.start(self._load(version), f"load of {version.name} {version.version}")
        if self._room.has_waiting and self._again is None:
            self._again = asyncio.get_running_loop().call_later(_RESCAN_SECONDS, self._rescan)

    def _rescan(self) -> None:
        self._again = None
        self._move()

    def _release(self, version: LazyVersion, for_room: bool = True) -> None:
        work = self._unload(version, for_room)
        version.task = self._background.start(work, f"unload of {version.name} {version.version}")

    async def _unload(self, version: LazyVersion, for_room: bool) -> None:
        loaded = await self._on_plane(version.release)
        if loaded is None:
            self._room.stays(version.tenant)
            return
        self.counts.unloads_for_room += for_room
        self.counts.unloads_of_idle += not for_room
        version.on_change()
        await loaded.unload()
        self._room.left(version.tenant)
        why = "to make room" if for_room else "since nobody asked for it"
        self._log.info("unloaded '%s' version %d %s", version.name, version.version, why)
        if version.has_waiting:
            self._want(version)
        self._move()

    async def _load(self, version: LazyVersion) -> None:
        began = time.monotonic()
        try:
            async with self._slots.taken(compiles=False):
                free = _free_gpu_bytes()
                loaded = await version.load(functools.partial(setattr, version, "progress"))
                needs = _measure(loaded, free) if self._limits.keys() - {MODELS} else version.tenant.needs
            is_right = await self._is_right(version, loaded)
        except asyncio.CancelledError:
            self._room.left(version.tenant)
            raise
        except Exception as error:
            failure = error if isinstance(error, ServeError) else internal(f"{type(error).__name__}: {error}")
            self._failed(version, failure, time.monotonic() - began)
            return
        if not is_right:
            self._found_changed(version)
            return
        self.counts.loads += 1
        self._room.loaded(version.tenant, needs)
        await self._on_plane(functools.partial(version.open, loaded))
        for done in version.take_brought():
            done.set_result(None)
        self._log.info("loaded '%s' version %d in %.3f s", version.name, version.version, time.monotonic() - began)
        version.on_change()
        self._look_for_idle()
        self._move()

    async def _is_right(self, version: LazyVersion, loaded: LoadedVersion) -> bool:
        """Whether the loaded files are those that were registered; else, and when called off, the version is unloaded.
        Where `bring` loads it, its caller checks that."""
        is_right = False
        try:
            is_right = bool(version.brought) or await version.is_unchanged()
        finally:
            if not is_right:
                await asyncio.shield(loaded.unload())
        return is_right

    def _failed(self, version: LazyVersion, error: ServeError, took_seconds: float = 0.0) -> None:
        self.counts.failed_loads += 1
        self._room.left(version.tenant)
        version.failure = next_failure(error, "", version.failure, self._retry, took_seconds)
        self._log.error("failed to load '%s' version %d: %s", version.name, version.version, version.failure.text)
        for done in version.take_brought():
            done.set_exception(error)
        refusal = version.cold_refusal() or error
        self._plane.call_soon(functools.partial(version.refuse, refusal))
        version.on_change()
        self._rescan()

    def _found_changed(self, version: LazyVersion) -> None:
        """Waiting requests go to the version of the new files when those have settled; where changes are not followed,
        the model has to be loaded by name."""
        version.is_over = True
        self._room.left(version.tenant)
        version.files.changed(version.content.scan)
        if not version.files.are_followed:
            version.failure = Failure(unavailable(_FILES_CHANGED), "", 1, None)
            refusal = version.cold_refusal() or unavailable(_FILES_CHANGED)
            self._plane.call_soon(functools.partial(version.refuse, refusal))
        version.on_change()
        self._move()

    def _look_for_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        now = time.monotonic()
        going, again = self._room.idle(now)
        for tenant in going:
            self._release(self._versions[tenant], for_room=False)
        if again < math.inf:
            self._idle_timer = asyncio.get_running_loop().call_later(again - now, self._look_for_idle)

    def _soon(self, call: Callable[[], None]) -> None:
        assert self._loop is not None, "a version is registered"
        # The loop may have ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    async def _on_plane(self, call: Callable[[], LoadedVersion | None]) -> LoadedVersion | None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[LoadedVersion | None] = loop.create_future()

        def run() -> None:
            loop.call_soon_threadsafe(done.set_result, call())

        self._plane.call_soon(run)
        return await done


async def _end_of(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await asyncio.wait((task,))


def _gpu(number: int) -> str:
    return f"memory of GPU {number}"


def _estimate(content: ModelContent, number: int) -> Mapping[str, int]:
    """Before it has been loaded: by its files, and the instances that are asked for."""
    groups = content.definition.config.instance_groups
    needs = Counter({_HOST: 0})
    file_bytes = content.scan.versions[number].files.total_bytes
    for group in groups:
        needs[_HOST] += group.count * (_WORKER_BYTES + file_bytes)
        if group.kind is not InstanceKind.CPU:
            needs.update({_gpu(gpu): group.count * file_bytes for gpu in group.gpus or Host().gpus})
    return needs


def _free_gpu_bytes() -> Mapping[int, int]:
    host = Host()
    gpus = map(host.gpu, host.gpus)
    found = {gpu.number: host.free_gpu_memory(gpu) for gpu in gpus if gpu is not None}
    return {number: memory.free_bytes for number, memory in found.items() if memory is not None}


def _measure(loaded: LoadedVersion, before: Mapping[int, int]) -> Mapping[str, int]:
    """What its workers take; of one that is shared an equal part. What a GPU has lost since `before` is counted whole,
    though others may load meanwhile."""
    taken = {_gpu(number): max(before.get(number, 0) - free, 0) for number, free in _free_gpu_bytes().items()}
    return {_HOST: sum(share_bytes(pid) // models for pid, models in loaded.worker_pids.items()), **taken}
