"""The life of one version: loads it next to its predecessor, swaps it in, retires it, and retries failed loads."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument
from rocserve.core.serving import IndexEntry
from rocserve.repository.content import ModelContent
from rocserve.repository.interface_check import check_interface
from rocserve.repository.loads import NOTHING_TO_REPORT, FilesChanged, LoadedVersion, LoadOrder, LoadProgress
from rocserve.repository.membership import FITS, MemberReview
from rocserve.repository.residency.lazy_version import LazyVersion
from rocserve.repository.retries import Failure
from rocserve.scheduling.ensemble.version import EnsembleVersion

if TYPE_CHECKING:
    from rocserve.repository.model import ManagedModel


class VersionState(enum.Enum):
    """Triton's model states, and CHECKING, which is a part of Triton's LOADING."""

    UNKNOWN = "UNKNOWN"
    LOADING = "LOADING"
    CHECKING = "CHECKING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Phase(enum.Enum):
    """What happens to a version apart from serving, and the state that Triton's clients see if it is not served."""

    NONE = "nothing was ever served, and nothing is loaded", VersionState.UNKNOWN
    LOADING = "a load runs, or waits for its slot", VersionState.LOADING
    CHECKING = "a load tries the version before it is served", VersionState.CHECKING
    DISCARDED = "its files changed during the load, so only a newer content can be loaded", VersionState.LOADING
    UNLOADING = "what was served is being unloaded", VersionState.UNLOADING
    FAILED = "the latest load has failed", VersionState.UNAVAILABLE
    UNLOADED = "it was unloaded on purpose", VersionState.UNAVAILABLE

    @property
    def state(self) -> VersionState:
        return self.value[1]


UNLOADED = "unloaded"
"""Triton's reason for a version that was unloaded on purpose."""
_SUSPICIOUS_DISCARDS = 3
"""Discarded loads in a row, by changes of one file, after which it is implausible that somebody still copies it."""
_WAITS_FOR_SLOT = LoadProgress("waits until another model has been loaded")
_STATUS_NAMES = {
    StatusCode.INVALID_ARGUMENT: "Invalid argument",
    StatusCode.NOT_FOUND: "Not found",
    StatusCode.UNAVAILABLE: "Unavailable",
    StatusCode.UNIMPLEMENTED: "Unsupported",
    StatusCode.ALREADY_EXISTS: "Already exists",
    StatusCode.UNKNOWN: "Unknown",
}


def status_name(error: ServeError) -> str:
    """Return a status as Triton writes it before the reason of a version's failure."""
    return _STATUS_NAMES.get(error.code, "Internal")


@dataclass(slots=True, eq=False)
class _Load:
    """A load that is running or waits for its slot. The loaded version refers to it, so it holds no content."""

    previous: Failure | None
    """How the previous load of the same content failed."""
    began_at: float
    """time.monotonic() when the load got its slot, before that when it was queued."""
    progress: LoadProgress = NOTHING_TO_REPORT
    lazy: LazyVersion | None = None
    """The version that makes the load, if it may be unloaded later."""
    task: asyncio.Task[None] | None = None

    @property
    def doing(self) -> LoadProgress:
        return self.progress if self.lazy is None else self.lazy.progress


class ManagedVersion:
    """Loads, serves and retires one version. All calls are made on the loop's thread; properties are thread-safe."""

    def __init__(self, model: ManagedModel, number: int, *, is_added_later: bool) -> None:
        """`is_added_later`: it appeared while the model or server was ready, so the server stays ready if it fails."""
        self.name = model.name
        self.number = number
        self.is_added_later = is_added_later
        self.served: LoadedVersion | None = None
        self.members: MemberReview = FITS
        """Whether the members of a served ensemble allow it to get requests."""
        self.setback: Failure | None = None
        """Why the latest load that ended did not succeed: it failed, or its files changed meanwhile (FilesChanged)."""
        self._context = model.context
        self._on_end = model.reconcile
        self._on_change = model.on_version_change
        self._served_content: ModelContent | None = None
        self._wanted_content: ModelContent | None = None
        """The content of the latest load, until it is served, rejected or the load is stopped."""
        self._load: _Load | None = None
        self._retry: asyncio.Task[None] | None = None
        self._reported_warnings: dict[str, set[str]] = {}
        """Key of the last content -> the warnings that its loads have logged."""
        self._retired: dict[LoadedVersion, asyncio.Task[None] | None] = {}
        """Versions with their unloads, which begin when the serving table no longer offers them."""
        self._was_served = False

    @property
    def phase(self) -> Phase:
        if self._load is not None:
            return Phase.CHECKING if self._load.doing.is_check else Phase.LOADING
        setback = self.setback
        is_discarded = setback is not None and isinstance(setback.error, FilesChanged)
        if is_discarded and self._wanted_content is not None:
            return Phase.DISCARDED
        if self._retired:
            return Phase.UNLOADING
        if setback is not None and not is_discarded:
            return Phase.FAILED
        return Phase.UNLOADED if self._was_served else Phase.NONE

    @property
    def is_loading(self) -> bool:
        """Whether a load runs, or waits for its files to settle."""
        return self._load is not None or self.phase is Phase.DISCARDED

    @property
    def has_failed(self) -> bool:
        """Whether the latest load that ended has failed; also while its retry runs."""
        setback = self.setback
        return setback is not None and not isinstance(setback.error, FilesChanged)

    @property
    def task(self) -> asyncio.Task[None] | None:
        return None if self._load is None else self._load.task

    @property
    def is_cold(self) -> bool:
        """Whether the version is registered but not in memory; a request loads it."""
        served = self.served
        return isinstance(served, LazyVersion) and not served.is_loaded

    @property
    def is_serving(self) -> bool:
        return self.served is not None and self.members.problem is None

    @property
    def is_forgettable(self) -> bool:
        """Whether the repository index has nothing to show of the version."""
        return self.served is None and self.phase is Phase.NONE

    @property
    def is_unloaded(self) -> bool:
        """Whether the version was unloaded on purpose."""
        return self.served is None and self.phase is Phase.UNLOADED

    @property
    def state(self) -> VersionState:
        served = self.served
        if served is None:
            return self.phase.state
        return VersionState.READY if served.available and self.members.problem is None else VersionState.UNAVAILABLE

    @property
    def reason(self) -> str:
        served, setback, load, phase = self.served, self.setback, self._load, self.phase
        if served is not None:
            newer = ""
            if setback is not None and self.has_failed:
                newer = f"newer content failed to load: {setback.text}"
            elif load is not None or phase is Phase.DISCARDED:
                doing = load.doing.text if load is not None else ""
                newer = "newer content is being loaded" + (f": {doing}" if doing else "")
            return "; ".join(filter(None, (self.members.text, served.status_reason, newer)))
        if load is not None:
            before = f"failed before: {setback.error.text}" if setback is not None else ""
            took = time.monotonic() - load.began_at
            # Only if the load reports no progress.
            slowness = f"loading for {took:.0f} s" if took > self._context.load_slots.patience_seconds else ""
            return "; ".join(filter(None, (load.doing.text or slowness, before)))
        if phase in (Phase.UNLOADING, Phase.UNLOADED):
            return UNLOADED if phase is Phase.UNLOADED else ""
        return setback.text if setback is not None else ""

    def serves(self, content: ModelContent) -> bool:
        """Whether the served version was loaded from this content and has not ended because its files changed."""
        served, is_retired = self._served_content, isinstance(self.served, LazyVersion) and self.served.is_retired
        return served is not None and not is_retired and served.key(self.number) == content.key(self.number)

    def entry(self) -> IndexEntry:
        reason, setback = self.reason, self.setback
        if setback is not None and self.has_failed and reason == setback.text:
            reason = f"{status_name(setback.error)}: {reason}"
        return IndexEntry(self.name, str(self.number), self.state.value, reason, self.served)

    def want(self, content: ModelContent) -> None:
        """Serve this content: load it unless it is served or being loaded, or has failed and its retry is not due."""
        if self.serves(content):
            self.reject(None)
            self._served_content = content
            return
        wanted, setback, phase = self._wanted_content, self.setback, self.phase
        is_same = wanted is not None and wanted.key(self.number) == content.key(self.number)
        if phase is Phase.DISCARDED:
            if wanted is not None and wanted.scan is content.scan:
                return
        elif is_same and (self._load is not None or (setback is not None and not setback.is_due())):
            return
        self.stop_loading()
        residents = self._context.residents
        can_load = content.definition.refusal is None and not content.scan.versions[self.number].refusal
        # A loaded version must go on serving if the new one fails, so the new one cannot wait for a request.
        if can_load and (self.served is None or self.is_cold) and residents.registers(content):
            self._swap(self._register(content), content)
            return
        self._wanted_content = content
        self._load = load = _Load(setback if is_same and self.has_failed else None, time.monotonic())
        load.task = self._context.background.start(self._run(load, content), f"load of {self.name} {self.number}")

    def reject(self, problem: ServeError | None) -> None:
        """Note that the current content cannot be used; the served version stays. `problem`: None = it is served, or
        not wanted."""
        self.stop_loading()
        self.setback = self._wanted_content = None
        self._note_newer_problem(problem)

    def _note_newer_problem(self, problem: ServeError | None) -> None:
        if isinstance(self.served, LazyVersion):
            self._context.residents.note_newer_problem(self.served, problem)

    def stop_loading(self) -> None:
        """Cancel the running load and the retry."""
        if self.is_loading:
            self._wanted_content = None
        for task in (self._retry, self.task):
            if task is not None:
                task.cancel()
        self._retry = self._load = None

    def retire(self) -> None:
        """Stop serving; `unload_retired` unloads the version."""
        self.stop_loading()
        self.setback = self._wanted_content = None
        self.members = FITS
        self._retire_served()

    def unload_retired(self) -> None:
        """Unload the versions that the serving table no longer offers."""
        for version, task in self._retired.items():
            if task is None:
                work = self._unload(version)
                self._retired[version] = self._context.background.start(work, f"unload of {self.name} {self.number}")

    async def _unload(self, version: LoadedVersion) -> None:
        log, level = self._context.log, self._context.load_level
        log.log(level, "unloading: %s:%d", self.name, self.number)
        try:
            await version.unload()
        finally:
            del self._retired[version]
        log.log(level, "successfully unloaded '%s' version %d", self.name, self.number)

    async def _run(self, load: _Load, content: ModelContent) -> None:
        log = self._context.log
        # A retry ends in a line, whatever its result.
        level = logging.DEBUG if load.previous is not None else self._context.load_level
        log.log(level, "loading: %s:%d", self.name, self.number)
        loaded: LoadedVersion | None = None
        problem = internal("")
        try:
            loaded = await self._load_in_slot(load, content)
        except ServeError as error:
            # The traceback would keep all objects of the load alive, this frame among them.
            problem = error.with_traceback(None)
        except Exception as error:
            if load.previous is None:
                log.exception("load of %s:%d failed unexpectedly", self.name, self.number)
            problem = internal(f"{type(error).__name__}: {error}")
        if self._load is not load:
            # The load was cancelled, but the loader ignored it.
            if loaded is not None:
                self._discard(loaded)
            return
        self._load = None
        if loaded is not None:
            self._swap(loaded, content)
        elif isinstance(problem, FilesChanged):
            self._note_discard(problem)
        else:
            self._note_failure(problem, load, content)
        self._on_end()

    async def _load_in_slot(self, load: _Load, content: ModelContent) -> LoadedVersion:
        if refusal := content.scan.versions[self.number].refusal:
            raise invalid_argument(refusal)
        if content.definition.refusal is not None:
            raise content.definition.refusal
        backend, slots, residents = content.definition.backend, self._context.load_slots, self._context.residents
        # An ensemble starts no workers, so it needs no slot.
        slot: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if backend is not None:
            compiles = any(engine.needs_migraphx for engine in backend.engines)
            slot = slots.acquire(compiles, load.previous is not None)
            load.progress = _WAITS_FOR_SLOT if slots.is_full else NOTHING_TO_REPORT
        loaded: LoadedVersion | None = None
        try:
            async with slot:
                load.progress = NOTHING_TO_REPORT
                load.began_at = time.monotonic()
                if residents.manages(content):
                    loaded = lazy = load.lazy = self._register(content)
                    lazy.is_first_load = True
                    await residents.ensure_loaded(lazy)
                    lazy.is_first_load = False
                else:
                    loaded = await self._load_checked(content, functools.partial(setattr, load, "progress"))
            if self.served is not None and self._served_content is not None:
                check_interface(self.number, self.served.config, self._served_content, loaded.config, content)
        except BaseException:
            if loaded is not None:
                self._discard(loaded)
            raise
        if isinstance(loaded, EnsembleVersion):
            loaded.on_request = residents.load_members
        return loaded

    async def _load_checked(self, content: ModelContent, on_progress: Callable[[LoadProgress], None]) -> LoadedVersion:
        """Load the version from files that stay unchanged meanwhile. Raises: FilesChanged, which replaces the loader's
        error because it may have read a mix of old and new files; ServeError."""
        folder, key = content.scan.version_folder(self.number), content.key(self.number)
        reported = self._reported_warnings.get(key, set())
        self._reported_warnings = {key: reported}
        order = LoadOrder(content.definition, self.number, folder, self._on_change, on_progress, reported)
        try:
            loaded = await self._context.load(order)
        except ServeError:
            await self._context.check_unchanged(content.scan, self.number)
            raise
        try:
            await self._context.check_unchanged(content.scan, self.number)
        except BaseException:
            self._discard(loaded)
            raise
        return loaded

    def _register(self, content: ModelContent) -> LazyVersion:
        load = functools.partial(self._load_checked, content)
        return self._context.residents.register(content, self.number, load, self._on_change)

    def _discard(self, loaded: LoadedVersion) -> None:
        self._context.background.start(loaded.unload(), f"unload of {self.name} {self.number}, which was not wanted")

    def _swap(self, loaded: LoadedVersion, content: ModelContent) -> None:
        self._retire_served()
        self.served, self._served_content, self._was_served = loaded, content, True
        self.setback = self._wanted_content = None
        if not self.is_cold:
            level = self._context.load_level
            self._context.log.log(level, "successfully loaded '%s' version %d", self.name, self.number)

    def _note_discard(self, error: FilesChanged) -> None:
        log, before = self._context.log, self.setback
        log.info("load of %s:%d thrown away: %s", self.name, self.number, error.text)
        is_again = before is not None and isinstance(before.error, FilesChanged) and before.error.file == error.file
        self.setback = Failure(error, before.attempts + 1 if before is not None and is_again else 1)
        if self.setback.attempts == _SUSPICIOUS_DISCARDS:
            log.warning(
                "'%s' of model '%s' has changed during each of %d loads, and files that change are never served; if the"
                " model itself writes there, let it write elsewhere, into the temporary folder for example",
                error.file,
                self.name,
                _SUSPICIOUS_DISCARDS,
            )

    def _note_failure(self, problem: ServeError, load: _Load, content: ModelContent) -> None:
        """Note a failed load and plan its retry."""
        error = content.scan.advised(problem)
        took = time.monotonic() - load.began_at
        self.setback = self._context.retry.next_failure(error, load.previous, took)
        self._note_newer_problem(error)
        kept = "; what was loaded before goes on serving" if self.served is not None else ""
        self._context.log.error("failed to load '%s' version %d: %s%s", self.name, self.number, self.setback.text, kept)
        self._retry = self._context.retries.schedule(self.setback, self._on_end)

    def _retire_served(self) -> None:
        if self.served is not None:
            self._retired[self.served] = None
        self.served = self._served_content = None
