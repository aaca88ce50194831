"""The life of one version: loads it next to its predecessor, swaps it in, retires it, and retries failed loads."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocserve.config.sources import REQUEST_SOURCE
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.serving import IndexEntry
from rocserve.repository.content import ModelContent
from rocserve.repository.loads import FilesChanged, LoadedVersion, LoadOrder
from rocserve.repository.residency.lazy_version import LazyVersion
from rocserve.repository.residency.resident_models import ResidentModels
from rocserve.repository.retries import Failure
from rocserve.repository.scan import ModelScan
from rocserve.scheduling.ensemble.version import EnsembleVersion

if TYPE_CHECKING:
    from rocserve.repository.model import ManagedModel


class VersionState(enum.Enum):
    """Triton's model states."""

    UNKNOWN = "UNKNOWN"
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


UNLOADED = "unloaded"
"""Triton's reason for a version that was unloaded on purpose."""
_SUSPICIOUS_DISCARDS = 3
"""Discarded loads in a row, by changes of one file, after which it is implausible that somebody still copies it."""
_WAITS_FOR_SLOT = "waits until another model has been loaded"
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


class InterfaceLost(ServeError):
    """A configuration lacks something that clients of the served version use."""

    def __init__(self, lost: str) -> None:
        text = (
            f"the configuration has lost {lost}, while the version's files are as they were: it looks cut short. Put it"
            " back; or, if it is meant, change the version's files too, or unload the model before"
        )
        super().__init__(StatusCode.INVALID_ARGUMENT, text)


@dataclass(slots=True, eq=False)
class _Load:
    """A load that is running or waits for its slot."""

    key: str
    """Key of the content that is loaded."""
    began_at: float
    """time.monotonic() when the load got its slot, before that when it was queued."""
    progress: str = ""
    """What the load is doing now, one line; "" = nothing to report."""
    task: asyncio.Task[None] | None = None


class ManagedVersion:
    """Loads, serves and retires one version. All calls are made on the loop's thread; properties are thread-safe."""

    def __init__(self, model: ManagedModel, number: int, *, is_added_later: bool) -> None:
        """`is_added_later`: it appeared while the model or server was ready, so the server stays ready if it fails."""
        self.name = model.name
        self.number = number
        self.is_added_later = is_added_later
        self.served: LoadedVersion | None = None
        self.suspension = ""
        """Why the loaded version gets no requests: its ensemble lacks a member. "" = not suspended."""
        self.failure: Failure | None = None
        self._context = model.context
        self._on_end = model.reconcile
        self._on_change = model.on_version_change
        self._served_content: ModelContent | None = None
        self._load: _Load | None = None
        self._reported_warnings: dict[str, set[str]] = {}
        """Key of the last content -> the warnings that its loads have logged."""
        self._outdated_scan: ModelScan | None = None
        """The scan whose files changed while they were loaded. The version waits for a newer scan."""
        self.last_discard: FilesChanged | None = None
        """Why the previous load was discarded: its files changed meanwhile."""
        self._discards_in_a_row = 0
        """Discarded loads in a row, by changes of the same file."""
        self._retry: asyncio.Task[None] | None = None
        self._retired: list[LoadedVersion] = []
        """Versions to unload as soon as the serving table no longer offers them."""
        self._unloading = 0
        self._was_served = False

    @property
    def is_loading(self) -> bool:
        """Whether a load runs, or waits for its files to settle."""
        return self._load is not None or self._outdated_scan is not None

    @property
    def task(self) -> asyncio.Task[None] | None:
        return None if self._load is None else self._load.task

    @property
    def waits_for_files(self) -> bool:
        """Whether the version's files changed during the load, so that only a newer content can be loaded."""
        return self._outdated_scan is not None

    @property
    def is_cold(self) -> bool:
        """Whether the version is registered but not in memory; a request loads it."""
        served = self.served
        return isinstance(served, LazyVersion) and not served.is_loaded

    @property
    def is_serving(self) -> bool:
        return self.served is not None and not self.suspension

    @property
    def is_forgettable(self) -> bool:
        """Whether the repository index has nothing to show of the version."""
        is_idle = self.served is None and not self.is_loading and not self._unloading
        return is_idle and self.failure is None and not self._was_served

    @property
    def is_unloaded(self) -> bool:
        return self.state is VersionState.UNAVAILABLE and self.reason == UNLOADED

    @property
    def state(self) -> VersionState:
        served = self.served
        if served is not None:
            return VersionState.READY if served.available and not self.suspension else VersionState.UNAVAILABLE
        if self.is_loading:
            return VersionState.LOADING
        if self._unloading:
            return VersionState.UNLOADING
        return VersionState.UNAVAILABLE if self.failure is not None or self._was_served else VersionState.UNKNOWN

    @property
    def reason(self) -> str:
        served, failure, load = self.served, self.failure, self._load
        discarded = self.last_discard.text if self.last_discard is not None else ""
        if served is not None:
            newer = ""
            if failure is not None:
                newer = f"newer content failed to load: {failure.text}"
            elif self.is_loading:
                newer = "newer content is being loaded" + (f": {load.progress}" if load and load.progress else "")
            return "; ".join(filter(None, (self.suspension, served.status_reason, newer)))
        if self._outdated_scan is not None:
            return discarded
        if load is not None:
            before = failure.error.text if failure is not None else discarded
            before = f"failed before: {before}" if before else ""
            took = time.monotonic() - load.began_at
            # Only if the load reports no progress.
            slowness = f"loading for {took:.0f} s" if took > self._context.load_slots.patience_seconds else ""
            return "; ".join(filter(None, (load.progress or slowness, before)))
        if self._unloading:
            return ""
        if failure is not None:
            return failure.text
        return UNLOADED if self._was_served else discarded

    def serves(self, content: ModelContent) -> bool:
        """Whether the served version was loaded from this content and has not ended because its files changed."""
        served, is_retired = self._served_content, isinstance(self.served, LazyVersion) and self.served.is_retired
        return served is not None and not is_retired and served.key(self.number) == content.key(self.number)

    def entry(self) -> IndexEntry:
        reason, failure = self.reason, self.failure
        if failure is not None and reason == failure.text:
            reason = f"{status_name(failure.error)}: {reason}"
        return IndexEntry(self.name, str(self.number), self.state.value, reason, self.served)

    def want(self, content: ModelContent) -> None:
        """Serve this content: load it unless it is served or being loaded, or has failed and its retry is not due."""
        key = content.key(self.number)
        if self.serves(content):
            self.reject(None)
            self._served_content = content
            return
        if self._outdated_scan is content.scan or (self._load is not None and self._load.key == key):
            return
        failure = self.failure
        if failure is not None and failure.content_key == key and not failure.is_due():
            return
        residents = self._context.residents
        can_load = content.definition.refusal is None and not content.scan.versions[self.number].refusal
        # A loaded version must go on serving if the new one fails, so the new one cannot wait for a request.
        can_wait = can_load and (self.served is None or self.is_cold)
        if can_wait and residents is not None and residents.registers(content):
            self.stop_loading()
            self._swap(self._register(residents, content), content)
        else:
            self.stop_loading()
            self._load = load = _Load(key, time.monotonic())
            load.task = self._context.background.start(self._run(load, content), f"load of {self.name} {self.number}")

    def reject(self, problem: ServeError | None) -> None:
        """Note that the current content cannot be used; the served version stays. `problem`: None = it is served."""
        self.stop_loading()
        self.failure = None
        self._note_newer_problem(problem)

    def _note_newer_problem(self, problem: ServeError | None) -> None:
        residents = self._context.residents
        if residents is not None and isinstance(self.served, LazyVersion):
            residents.note_newer_problem(self.served, problem)

    def stop_loading(self) -> None:
        """Cancel the running load and the retry."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self.task is not None:
            self.task.cancel()
        self._load = None
        self._outdated_scan = None

    def retire(self) -> None:
        """Stop serving; `unload_retired` unloads the version."""
        self.stop_loading()
        self.failure = self.last_discard = None
        self.suspension = ""
        self._retire_served()

    def unload_retired(self) -> None:
        """Unload the versions that the serving table no longer offers."""
        retired, self._retired = self._retired, []
        for version in retired:
            self._context.background.start(self._unload(version), f"unload of {self.name} {self.number}")

    async def _unload(self, version: LoadedVersion) -> None:
        self._context.log.info("unloading: %s:%d", self.name, self.number)
        try:
            await version.unload()
        finally:
            self._unloading -= 1
        self._context.log.info("successfully unloaded '%s' version %d", self.name, self.number)

    async def _run(self, load: _Load, content: ModelContent) -> None:
        log = self._context.log
        log.info("loading: %s:%d", self.name, self.number)
        loaded: LoadedVersion | None = None
        outcome: Exception | None = None
        try:
            loaded = await self._load_in_slot(load, content)
        except ServeError as error:
            # The traceback would keep all objects of the load alive, this frame among them.
            outcome = error.with_traceback(None)
        except Exception as error:
            outcome = error
        if self._load is not load:
            # The load was cancelled, but the loader ignored it.
            if loaded is not None:
                self._discard(loaded)
            return
        self._load = None
        if loaded is not None:
            self._swap(loaded, content)
        elif isinstance(outcome, FilesChanged):
            self._discard_changed(outcome)
            self._outdated_scan = content.scan
        elif isinstance(outcome, ServeError):
            can_pass = content.definition.refusal is None and not isinstance(outcome, InterfaceLost)
            self._record_failure(content.scan.advised(outcome), load, can_pass=can_pass)
        else:
            log.error("load of %s:%d failed unexpectedly", self.name, self.number, exc_info=outcome)
            self._record_failure(internal(f"{type(outcome).__name__}: {outcome}"), load, can_pass=True)
        self._on_end()

    async def _load_in_slot(self, load: _Load, content: ModelContent) -> LoadedVersion:
        if refusal := content.scan.versions[self.number].refusal:
            raise invalid_argument(refusal)
        if content.definition.refusal is not None:
            raise content.definition.refusal
        failure, backend, slots = self.failure, content.definition.backend, self._context.load_slots
        residents = self._context.residents
        # An ensemble starts no workers, so it needs no slot.
        slot: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if backend is not None:
            compiles = any(engine.needs_migraphx for engine in backend.engines)
            slot = slots.acquire(compiles, failure is not None and failure.content_key == load.key)
            load.progress = _WAITS_FOR_SLOT if slots.is_full else ""
        loaded: LoadedVersion | None = None
        try:
            async with slot:
                load.progress = ""
                load.began_at = time.monotonic()
                if residents is not None and residents.manages(content):
                    loaded = lazy = self._register(residents, content)
                    lazy.is_first_load = True
                    await residents.ensure_loaded(lazy)
                    lazy.is_first_load = False
                else:
                    loaded = await self._load_checked(content, functools.partial(setattr, load, "progress"))
            self._check_interface(loaded, content)
        except BaseException:
            if loaded is not None:
                self._discard(loaded)
            raise
        if residents is not None and isinstance(loaded, EnsembleVersion):
            loaded.on_request = residents.load_members
        return loaded

    def _check_interface(self, loaded: LoadedVersion, content: ModelContent) -> None:
        """Refuse the new version if only the configuration changed and lost something that clients use. The file may
        have been cut short; a deliberate change of the interface comes with new model files. Ensembles have no other
        files, so they are not checked. Raises InterfaceLost."""
        served, before = self.served, self._served_content
        if served is None or before is None or content.definition.is_ensemble:
            return
        # A configuration from a load request came whole.
        if REQUEST_SOURCE in (before.definition.source, content.definition.source):
            return
        if before.scan.versions[self.number] != content.scan.versions[self.number]:
            return
        was_written, is_written = (each.definition.message.max_batch_size > 0 for each in (before, content))
        lost = lost_interface(served.config, loaded.config, was_written and not is_written)
        if lost:
            raise InterfaceLost(lost)

    async def _load_checked(self, content: ModelContent, on_progress: Callable[[str], None]) -> LoadedVersion:
        """Load the version from files that stay unchanged meanwhile. Raises: FilesChanged, which replaces the loader's
        error because it may have read a mix of old and new files; ServeError."""
        folder, key = content.scan.version_folder(self.number), content.key(self.number)
        reported = self._reported_warnings.get(key, set())
        self._reported_warnings = {key: reported}
        order = LoadOrder(content.definition, self.number, folder, key, self._on_change, on_progress, reported)
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

    def _register(self, residents: ResidentModels, content: ModelContent) -> LazyVersion:
        load = functools.partial(self._load_checked, content)
        return residents.register(content, self.number, load, self._on_change)

    def _discard(self, loaded: LoadedVersion) -> None:
        self._context.background.start(loaded.unload(), f"unload of {self.name} {self.number}, which was not wanted")

    def _swap(self, loaded: LoadedVersion, content: ModelContent) -> None:
        self._retire_served()
        self.served = loaded
        self._served_content = content
        self._was_served = True
        self.failure = self.last_discard = None
        if not self.is_cold:
            self._context.log.info("successfully loaded '%s' version %d", self.name, self.number)

    def _discard_changed(self, error: FilesChanged) -> None:
        log = self._context.log
        log.info("load of %s:%d thrown away: %s", self.name, self.number, error.text)
        is_same = self.last_discard is not None and self.last_discard.file == error.file
        self._discards_in_a_row = self._discards_in_a_row + 1 if is_same else 1
        self.last_discard = error
        if self._discards_in_a_row == _SUSPICIOUS_DISCARDS:
            log.warning(
                "'%s' of model '%s' has changed during each of %d loads, and files that change are never served; if the"
                " model itself writes there, let it write elsewhere, into the temporary folder for example",
                error.file,
                self.name,
                _SUSPICIOUS_DISCARDS,
            )

    def _record_failure(self, error: ServeError, load: _Load, *, can_pass: bool) -> None:
        """Record a failed load and plan its retry. `can_pass`: the same files may load later."""
        took = time.monotonic() - load.began_at
        self.last_discard = None
        self.failure = self._context.retry.next_failure(error, load.key, self.failure, took, can_pass)
        self._note_newer_problem(error)
        kept = "; what was loaded before goes on serving" if self.served is not None else ""
        self._context.log.error("failed to load '%s' version %d: %s%s", self.name, self.number, self.failure.text, kept)
        self._retry = self._context.retries.schedule(self.failure, self._on_end)

    def _retire_served(self) -> None:
        if self.served is not None:
            self._unloading += 1
            self._retired.append(self.served)
        self.served = None
        self._served_content = None


def lost_interface(served: ModelConfig, new: ModelConfig, has_lost_batch_size: bool) -> str:
    """Return what the new configuration lacks and does not replace; "" = nothing. `new` has been completed from the
    model. `has_lost_batch_size`: max_batch_size was written for the served version and is not written now; the written
    value counts because a completed value may fall by itself, for example with less free memory."""
    parts = [
        *_lost_tensors("input", served.inputs, new.inputs),
        *_lost_tensors("output", served.outputs, new.outputs),
    ]
    has_same_dims = not _dims(served).isdisjoint(_dims(new))
    if has_lost_batch_size and new.max_batch_size < served.max_batch_size and has_same_dims:
        parts.append("max_batch_size")
    if served.sequence_batching is not None and new.sequence_batching is None:
        parts.append("sequence_batching")
    if served.decoupled and not new.decoupled:
        parts.append("model_transaction_policy.decoupled")
    labels = {output.name: len(output.labels) for output in new.outputs}
    parts += [
        f"{len(output.labels) - labels[output.name]} of the {len(output.labels)} labels of output '{output.name}'"
        for output in served.outputs
        if labels.get(output.name, len(output.labels)) < len(output.labels)
    ]
    return ", ".join(parts)


def _dims(config: ModelConfig) -> set[tuple[str, tuple[int, ...]]]:
    tensors: tuple[InputConfig | OutputConfig, ...] = (*config.inputs, *config.outputs)
    return {(tensor.name, tensor.dims) for tensor in tensors}


def _lost_tensors(
    what: str, served: Sequence[InputConfig | OutputConfig], new: Sequence[InputConfig | OutputConfig]
) -> list[str]:
    """Return the lost tensors; none if there is a new tensor, because the change is then deliberate."""
    before, after = {tensor.name for tensor in served}, {tensor.name for tensor in new}
    return [] if after - before else [f"{what} '{name}'" for name in sorted(before - after)]
