"""The life of a version with one content, from its registration until it is gone. `PHASES` has the legal changes,
README.md the diagram."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractAsyncContextManager
from typing import Any

from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.statistics import ModelStatistics
from rocserve.observability.log_fields import about
from rocserve.repository.content import ModelContent
from rocserve.repository.context import RepositoryContext
from rocserve.repository.load_order import FilesChanged, LoadedVersion, LoadOrder
from rocserve.repository.residency.cold_version import ColdVersion
from rocserve.repository.residency.resident_models import Resident
from rocserve.repository.residency.room import Stage
from rocserve.repository.retries import Failure


class Phase(enum.Enum):
    REGISTERED = "no load runs and nothing is in memory; if it is offered, its first request loads it"
    LOADING = "a load runs, or waits for its slot or for room"
    CHECKING = "a load tries the version before it is served"
    READY = "it is loaded"
    DRAINING = "the loaded version answers its last requests"
    GONE = "nothing is left"


PHASES: Mapping[Phase, Set[Phase]] = {
    Phase.REGISTERED: {Phase.LOADING, Phase.DRAINING, Phase.GONE},
    Phase.LOADING: {Phase.CHECKING, Phase.READY, Phase.REGISTERED},
    Phase.CHECKING: {Phase.LOADING, Phase.READY, Phase.REGISTERED},
    Phase.READY: {Phase.DRAINING},
    Phase.DRAINING: {Phase.REGISTERED, Phase.GONE},
    Phase.GONE: set(),
}
"""Phase -> the phases that may follow it."""

FILES_CHANGED = (
    "its files have changed since it was registered; load it again, or restart the server if it has"
    " --model-control-mode=none"
)


class VersionLife:
    """Loads and unloads a content. All calls are made on the loop's thread; properties are thread-safe."""

    def __init__(
        self,
        name: str,
        number: int,
        content: ModelContent,
        failure: Failure | None,
        context: RepositoryContext,
        *,
        reported_warnings: set[str],
        check: Callable[[VersionLife, LoadedVersion], None],
        on_load_ended: Callable[[VersionLife, ServeError | None], None],
        on_change: Callable[[], None],
        publish: Callable[[], None],
    ) -> None:
        """`failure`: of the load before. `reported_warnings`: those that loads of this content have logged. `check`:
        raises ServeError if the loaded version must not be served. `on_load_ended`: gets the reason if the load has
        failed. `on_change`: reports, from any thread, that the index changes; `publish` updates the serving table
        now."""
        self.name = name
        self.number = number
        self.content = content
        self.phase = Phase.REGISTERED
        self.offered: LoadedVersion | None = None
        """The version that requests get: loaded or cold; None = not yet, or no longer."""
        self.failure = failure
        """Why the latest load that ended did not succeed; also while the next one runs."""
        self.previous: Failure | None = None
        """How the previous load of this content failed."""
        self.began_at = 0.0
        """time.monotonic() when the load got its slot, before that when it was queued."""
        self.is_stale = False
        """Never loaded again: its files have changed since it was registered, or its load was given up."""
        self.task: asyncio.Task[ServeError | None] | None = None
        """The running load, with the reason if it fails."""
        self._context = context
        self._reported_warnings = reported_warnings
        self._check = check
        self._on_load_ended = on_load_ended
        self._on_change = on_change
        self._publish = publish
        self._progress = ""
        """The load's current work; "" = nothing to report."""
        self._stopped: asyncio.Task[ServeError | None] | None = None
        """A load that was cancelled and may not have ended."""
        self._callers = 0
        """The number of callers that wait for the load without a request."""
        self._replaced: ColdVersion | None = None
        """The cold version whose requests the loaded one gets as soon as it is published."""
        self._resident: Resident | None = None
        """None = the version is never unloaded for room or idleness."""

    # State

    @property
    def is_loading(self) -> bool:
        return self.phase in (Phase.LOADING, Phase.CHECKING)

    @property
    def has_failed(self) -> bool:
        """Whether the latest load that ended has failed; also while its retry runs."""
        failure = self.failure
        return failure is not None and (self.is_stale or not isinstance(failure.error, FilesChanged))

    @property
    def waits_for_files(self) -> bool:
        """Whether its files have changed during the load, so only a newer content can be loaded."""
        return self.failure is not None and not self.has_failed and self.phase is Phase.REGISTERED

    @property
    def is_cold(self) -> bool:
        """Whether it is offered but not in memory; a request loads it."""
        offered = self.offered
        return offered is not None and offered.is_cold

    @property
    def is_available(self) -> bool:
        offered = self.offered
        return offered is not None and (self.failure is None if offered.is_cold else offered.available)

    def _in_flight(self) -> int:
        """See Resident. A load is about to give the version its requests."""
        offered = self.offered
        return (self.task is not None) + (0 if offered is None else offered.in_flight)

    @property
    def _is_retired(self) -> bool:
        """Only of a version that requests may load."""
        return self._resident is None or self._resident.is_retired

    @property
    def doing(self) -> str:
        """The load's current work; "" = nothing to report."""
        return "waits for room" if self._waits_for_room else self._progress

    @property
    def _waits_for_room(self) -> bool:
        resident = self._resident
        return resident is not None and resident.stage is Stage.WAITING

    def is_of(self, content: ModelContent) -> bool:
        return self.content.key(self.number) == content.key(self.number)

    def change(self, phase: Phase) -> None:
        if phase not in PHASES[self.phase]:
            raise RuntimeError(f"'{self.name}' version {self.number}: {phase.name} cannot follow {self.phase.name}")
        self.phase = phase

    # Loading

    def begin_load(self, previous: Failure | None) -> None:
        """Start the load. `previous`: how the last load of this content failed."""
        self.change(Phase.LOADING)
        self.previous, self.began_at, self._progress = previous, time.monotonic(), ""
        self.task = self._context.background.start(self._load(), f"load of {self.name} {self.number}")

    def stop_load(self) -> None:
        """Cancel the running load."""
        if self.task is not None:
            self.task.cancel()
            self._stopped, self.task = self.task, None
            self.change(Phase.REGISTERED)

    async def _load(self) -> ServeError | None:
        log = self._context.log
        # Retries, and loads for a request, always log their result.
        level = logging.DEBUG if self.previous is not None or self.is_cold else self._context.load_level
        fields = about(model=self.name, version=self.number)
        log.log(level, "loading: %s:%d", self.name, self.number, extra=fields)
        loaded: LoadedVersion | None = None
        problem: ServeError | None = None
        try:
            await _end_of(self._stopped)
            loaded = await self._load_in_turn()
        except ServeError as error:
            # The traceback would keep all objects of the load alive, this frame among them.
            problem = error.with_traceback(None)
        except Exception as error:
            if self.previous is None:
                log.exception("load of %s:%d failed unexpectedly", self.name, self.number, extra=fields)
            problem = internal(f"{type(error).__name__}: {error}")
        if self.task is not asyncio.current_task():
            # The load was stopped, but the loader ignored it.
            if loaded is not None:
                self._discard(loaded)
            return None
        self.task = None
        if loaded is None:
            self.change(Phase.REGISTERED)
        else:
            self.change(Phase.READY)
            self.failure = None
            self._replaced = self.offered if isinstance(self.offered, ColdVersion) else None
            self.offered = loaded
        self._on_load_ended(self, problem)
        return problem

    async def _load_in_turn(self) -> LoadedVersion:
        """Load when there is a slot, and room if the version may be unloaded again."""
        content, residents = self.content, self._context.residents
        if refusal := content.scan.versions[self.number].refusal:
            raise invalid_argument(refusal)
        if content.definition.refusal is not None:
            raise content.definition.refusal
        if self._resident is None and residents.manages(content):
            self._resident = self._admit()
        if self._resident is not None:
            return await residents.load(self._resident, self._load_checked)
        backend, slots = content.definition.backend, self._context.load_slots
        # An ensemble starts no workers, so it needs no slot.
        slot: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if backend is not None:
            compiles = any(engine.needs_migraphx for engine in backend.engines)
            slot = slots.acquire(compiles, self.previous is not None)
            self._progress = "waits for another model's load" if slots.is_full else ""
        async with slot:
            return await self._load_checked()

    async def _load_checked(self) -> LoadedVersion:
        """Load the version from files that stay unchanged meanwhile. Raises: FilesChanged, which replaces the loader's
        error because it may have read a mix of old and new files; ServeError."""
        self._progress = ""
        self.began_at = time.monotonic()
        content, context = self.content, self._context
        # Weakly: the loaded version keeps the order, and files that a client has sent live as long as `content`.
        note = weakref.WeakMethod(self._note_progress)

        def on_progress(text: str, is_check: bool) -> None:
            if (call := note()) is not None:
                call(text, is_check)

        folder, reported = content.scan.version_folder(self.number), self._reported_warnings
        order = LoadOrder(content.definition, self.number, folder, self._on_change, on_progress, reported)
        try:
            loaded = await context.load(order)
        except ServeError:
            await context.check_unchanged(content.scan, self.number)
            raise
        try:
            await context.check_unchanged(content.scan, self.number)
            self._check(self, loaded)
            if self._resident is not None:
                loaded.watch_use(self._resident.use)
            if isinstance(self.offered, ColdVersion):
                give = functools.partial(self.offered.give_statistics, loaded.statistics)
                await context.residents.on_plane(give)
        except BaseException:
            self._discard(loaded)
            raise
        return loaded

    def _note_progress(self, text: str, is_check: bool) -> None:
        if self.is_loading:
            self._progress = text
            phase = Phase.CHECKING if is_check else Phase.LOADING
            if phase is not self.phase:
                self.change(phase)

    def _discard(self, loaded: LoadedVersion) -> None:
        self._context.background.start(loaded.unload(), f"unload of unwanted {self.name} {self.number}")

    # Waiting for the first request

    def register(self) -> None:
        """Offer the version cold: its first request loads it."""
        self._resident = self._admit()
        definition = self.content.definition
        self.offered = self._cold(self._resident, definition.config, definition.serialized, None)

    def _admit(self) -> Resident:
        batching = self.content.definition.config.sequence_batching
        resident = Resident(
            name=self.name,
            number=self.number,
            hold_seconds=0.0 if batching is None else batching.max_sequence_idle_microseconds / 1e6,
            count_in_flight=self._in_flight,
            wake=self._wake,
            review=self._review,
            ensure_loaded=self._ensure_loaded,
            evict=self._evict,
        )
        self._context.residents.admit(resident, self.content)
        return resident

    def _cold(
        self, resident: Resident, config: ModelConfig, config_message: bytes, statistics: ModelStatistics | None
    ) -> ColdVersion:
        residents, failure, backend = self._context.residents, lambda: self.failure, self.content.definition.backend
        assert backend is not None, "an ensemble stays"
        sees_requests = backend.answers_requests
        return ColdVersion(resident, residents, config, config_message, statistics, sees_requests, failure)

    def _wake(self) -> None:
        """Load the version, because a request waits for it, unless it must not be loaded now."""
        is_wanted = self.phase is Phase.REGISTERED and not self._is_retired and not self.is_stale
        if is_wanted and (self.failure is None or self.failure.is_due()):
            self.begin_load(self.failure)

    def _review(self) -> None:
        """Load the version if somebody waits for it. If nobody does, stop a load that waits for room."""
        offered = self.offered
        if self._callers or (offered is not None and offered.is_cold and offered.in_flight):
            self._wake()
        elif self._waits_for_room and self.is_cold:
            self.stop_load()

    async def _ensure_loaded(self) -> None:
        """Load the version and wait for it. Raises ServeError if the load fails."""
        self.failure = None
        self._callers += 1
        try:
            while self.is_cold and not self._is_retired:
                if self.is_stale:
                    raise unavailable(f"model '{self.name}' version {self.number}: {FILES_CHANGED}")
                self._wake()
                task = self.task
                await _end_of(self._eviction if task is None else task)
                if task is not None and not task.cancelled() and (problem := task.result()) is not None:
                    raise problem
        finally:
            self._callers -= 1
        if self._is_retired:
            raise unavailable(f"model '{self.name}' was unloaded before it was loaded")

    def refuse_waiting(self) -> None:
        """Refuse the requests that wait, if the version cannot be loaded now."""
        if isinstance(self.offered, ColdVersion):
            self._context.residents.plane.call_soon(self.offered.refuse_waiting)
        self._on_change()

    # The end

    def hand_over(self) -> None:
        """Give the requests that waited for the load to the loaded version, which the serving table offers now."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            self._context.background.start(replaced.unload(), f"hand-over of {self.name} {self.number}")

    @property
    def _eviction(self) -> asyncio.Task[None] | None:
        return None if self._resident is None else self._resident.eviction

    async def _evict(self) -> None:
        """Unload the version, and offer it cold."""
        loaded, resident = self.offered, self._resident
        assert loaded is not None and resident is not None, "it is loaded, and not retired"
        self.change(Phase.DRAINING)
        self.offered = self._cold(resident, loaded.config, loaded.config_message, loaded.statistics)
        self._publish()
        # The room may be for a model that a running request to an ensemble needs.
        await loaded.unload(at_once=True)
        if not self._is_retired:
            self.change(Phase.REGISTERED)

    def retire(self) -> None:
        """Stop the load, and be offered no longer. `end` must follow when the serving table does not offer it."""
        if self._resident is not None:
            self._resident.is_retired = True
        self.stop_load()
        if self.phase is not Phase.DRAINING:
            self.change(Phase.DRAINING if self.offered is not None else Phase.GONE)
        if self.phase is Phase.GONE:
            self._leave()

    async def end(self) -> None:
        """Answer the last requests, and end the workers."""
        self.hand_over()
        offered, self.offered = self.offered, None
        if offered is not None:
            await offered.unload()
        await _end_of(self._stopped)
        await _end_of(self._eviction)
        self._leave()
        self.change(Phase.GONE)

    def _leave(self) -> None:
        """Give back the room. The resident refers to this object; dropping it leaves no cycle for the collector."""
        resident, self._resident = self._resident, None
        if resident is not None:
            self._context.residents.leave(resident)


async def _end_of(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        await asyncio.wait((task,))
