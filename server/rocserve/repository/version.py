"""One version of a model: the content that serves, the content that will replace it, and the version's index row."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterable

from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.serving import IndexEntry
from rocserve.observability.log_fields import about
from rocserve.repository.content import ModelContent
from rocserve.repository.context import RepositoryContext
from rocserve.repository.ensemble_members import FITS, MemberReview, Served
from rocserve.repository.interface_check import check_interface
from rocserve.repository.load_order import FilesChanged, LoadedVersion
from rocserve.repository.retries import Failure
from rocserve.repository.version_life import FILES_CHANGED, Phase, VersionLife


class VersionState(enum.Enum):
    """Triton's model states, and CHECKING, which is a part of Triton's LOADING."""

    UNKNOWN = "UNKNOWN"
    LOADING = "LOADING"
    CHECKING = "CHECKING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


UNLOADED = "unloaded"
"""Triton's reason for a version that was unloaded on purpose."""
_NEWER_FAILED = "newer content failed to load"
_NEWER_LOADS = "newer content is being loaded"
_SUSPICIOUS_DISCARDS = 3
"""Loads in a row that were discarded because the same file changed; so many changes are unlikely to be a copy."""
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


class ManagedVersion:
    """Swaps the lives of one version. All calls are made on the loop's thread; properties are thread-safe."""

    def __init__(
        self,
        name: str,
        number: int,
        context: RepositoryContext,
        *,
        is_added_later: bool,
        problem_of_model: Callable[[], str],
        on_end: Callable[[], None],
        on_change: Callable[[], None],
        publish: Callable[[], None],
    ) -> None:
        """`is_added_later`: it appeared while the model or server was ready, so the server stays ready if it fails.
        `problem_of_model`: why the model's content cannot be loaded. `on_end`: called after a load. `on_change`,
        `publish`: as in VersionLife."""
        self.name = name
        self.number = number
        self.is_added_later = is_added_later
        self.members: MemberReview = FITS
        """Whether the members of a served ensemble allow it to get requests."""
        self._goes_on = False
        """Whether the served ensemble goes on with its earlier members until its new content is served."""
        self._context = context
        self._problem_of_model = problem_of_model
        self._on_end = on_end
        self._on_change = on_change
        self._publish = publish
        self._current: VersionLife | None = None
        """The life that the serving table offers."""
        self._next: VersionLife | None = None
        """The latest content, if it is not served: it is being loaded, or has failed, or its files have changed."""
        self._leaving: dict[VersionLife, asyncio.Task[None] | None] = {}
        """Lives with their ends, which begin when the serving table no longer offers them."""
        self._problem: ServeError | None = None
        """Why newer content than the served one cannot be used; None = it can be used, or this is unknown."""
        self._retry: asyncio.Task[None] | None = None
        self._is_reload_asked = False
        self._reported_warnings: dict[str, set[str]] = {}
        """Key of the last content -> the warnings that its loads have logged."""
        self._was_served = False

    # State

    @property
    def served(self) -> LoadedVersion | None:
        current = self._current
        return None if current is None else current.offered

    @property
    def failure(self) -> Failure | None:
        """Why the latest content is not served."""
        newer = self._next
        return None if newer is None else newer.failure

    @property
    def is_loading(self) -> bool:
        """Whether a load of newer content runs, or waits for its files to settle."""
        newer = self._next
        return newer is not None and (newer.is_loading or newer.waits_for_files)

    @property
    def waits_for_files(self) -> bool:
        newer = self._next
        return newer is not None and newer.waits_for_files

    @property
    def has_failed(self) -> bool:
        """Whether the latest load of newer content that ended has failed; also while its retry runs."""
        newer = self._next
        return newer is not None and newer.has_failed

    @property
    def task(self) -> asyncio.Task[ServeError | None] | None:
        """The load of newer content."""
        return None if self._next is None else self._next.task

    @property
    def unloads(self) -> Iterable[asyncio.Task[None]]:
        """The running unloads of retired lives."""
        return filter(None, self._leaving.values())

    @property
    def is_serving(self) -> bool:
        return self.served is not None and self.members.problem is None

    @property
    def is_forgettable(self) -> bool:
        """Whether the repository index has nothing to show of the version."""
        return self.state is VersionState.UNKNOWN

    @property
    def is_unloaded(self) -> bool:
        """Whether the version was unloaded on purpose."""
        return self.state is VersionState.UNAVAILABLE and self._current is None and not self.has_failed

    @property
    def state(self) -> VersionState:
        current, newer = self._current, self._next
        if current is not None:
            is_ready = current.is_available and self.members.problem is None
            return VersionState.READY if is_ready else VersionState.UNAVAILABLE
        if newer is not None and (newer.is_loading or newer.waits_for_files):
            return VersionState.CHECKING if newer.phase is Phase.CHECKING else VersionState.LOADING
        if self._leaving:
            return VersionState.UNLOADING
        return VersionState.UNAVAILABLE if self.has_failed or self._was_served else VersionState.UNKNOWN

    @property
    def reason(self) -> str:
        """Return why the version is in its state, for the index."""
        current, newer, failure = self._current, self._next, self.failure
        if current is not None:
            loading = "" if newer is None else _of_newer(newer)
            parts = [self.members.text, _of_served(current), loading]
            if self.state is VersionState.READY and (problem := self._problem_of_model()):
                if not self._goes_on:
                    parts.append(f"{_NEWER_FAILED}: {problem}")
                elif not loading:
                    # The problem is that the current members do not fit: new content for them is being made.
                    parts.append(_NEWER_LOADS)
        elif newer is not None and newer.is_loading:
            took = time.monotonic() - newer.began_at
            # Only if the load reports no progress.
            slowness = f"loading for {took:.0f} s" if took > self._context.load_slots.patience_seconds else ""
            parts = [newer.doing or slowness, "" if failure is None else f"failed before: {failure.error.text}"]
        elif self.state is VersionState.UNLOADING:
            parts = []
        else:
            parts = [UNLOADED if self.is_unloaded else "" if failure is None else failure.text]
        return "; ".join(filter(None, parts))

    def serves(self, content: ModelContent) -> bool:
        """Whether the served version was loaded from this content and has not ended because its files changed."""
        current = self._current
        return current is not None and not current.is_stale and current.is_of(content)

    @property
    def served_change_ns(self) -> int:
        """The last change of the files that the served version was loaded from, since the epoch; 0 = nothing is
        served."""
        current = self._current
        return 0 if current is None else current.content.scan.changed_ns

    def entry(self) -> IndexEntry:
        reason, failure = self.reason, self.failure
        if failure is not None and self.has_failed and reason == failure.text:
            reason = f"{status_name(failure.error)}: {reason}"
        return IndexEntry(self.name, str(self.number), self.state.value, reason, self.served)

    # Members

    def note_members(self, found: MemberReview, served_models: Served, is_replaced_soon: bool) -> None:
        """Note whether the served models fit the served ensemble. If they do not, the ensemble goes on with its earlier
        members if it is replaced soon."""
        served = self.served
        assert served is not None, "an ensemble is served"
        goes_on = is_replaced_soon and self.is_serving and served.keeps_members
        self._goes_on = found.problem is not None and goes_on
        if not self._goes_on:
            self.members = found
        if found.problem is None:
            served.follow_members(served_models, found.is_decoupled)

    # Changes

    def want(self, content: ModelContent) -> None:
        """Serve this content: load it unless it is served or being loaded, or has failed and its retry is not due."""
        current, newer = self._current, self._next
        is_asked, self._is_reload_asked = self._is_reload_asked, False
        is_same = newer is not None and not newer.is_stale and newer.is_of(content)
        if current is not None and self.serves(content):
            current.content = content
            # The served and the loading life have the same content only after a request to reload.
            if not (is_asked or is_same):
                self.reject(None)
                return
        failure = None if newer is None else newer.failure
        if newer is not None and newer.waits_for_files:
            if newer.content.scan is content.scan:
                return
        elif newer is not None and is_same and (newer.is_loading or (failure is not None and not failure.is_due())):
            return
        previous = failure if is_same and self.has_failed else None
        self._drop_next()
        life = VersionLife(
            self.name,
            self.number,
            content,
            failure,
            self._context,
            reported_warnings=self._warnings_of(content),
            check=self._check,
            on_load_ended=self._load_ended,
            on_change=self._on_change,
            publish=self._publish,
        )
        # A loaded version must keep serving if the new one fails, so the new one cannot wait for a request.
        if (current is None or current.is_cold) and self._context.residents.registers(content, self.number):
            life.failure = None
            life.register()
            self._swap(life)
            return
        self._next = life
        life.begin_load(previous)

    def reject(self, problem: ServeError | None) -> None:
        """Note that the current content cannot be used; the served version stays. `problem`: None = it is served, or
        not wanted."""
        self._drop_next()
        self._note_problem(problem)

    def ask_for_reload(self) -> None:
        """Let the next call of `want` load again, although the same content is served or has just failed."""
        self._is_reload_asked = True
        self.forget_failure()

    def forget_failure(self) -> None:
        """Let the next call of `want` load again, although a load has just failed."""
        if self._next is not None and self.has_failed:
            self._next.failure = None

    def stop_loading(self) -> None:
        """Cancel the load of newer content, and its retry. If it waits for its files, it has failed."""
        self._cancel_retry()
        if self._next is not None and self.is_loading:
            self._next.stop_load()
            self._next.is_stale = True

    def retire(self) -> None:
        """Stop serving; `unload_retired` unloads the version."""
        self._drop_next()
        self.members = FITS
        self._retire_current()

    def unload_retired(self) -> None:
        """Unload the lives that the serving table no longer offers. An ensemble that it does not offer leaves its
        members."""
        if self._current is not None:
            self._current.hand_over()
        if self.served is not None and not self.is_serving:
            self.served.leave_members()
        for life, task in self._leaving.items():
            if task is None:
                work = self._end(life)
                self._leaving[life] = self._context.background.start(work, f"unload of {self.name} {self.number}")

    async def _end(self, life: VersionLife) -> None:
        log, level = self._context.log, self._context.load_level
        fields = about(model=self.name, version=self.number)
        log.log(level, "unloading: %s:%d", self.name, self.number, extra=fields)
        try:
            await life.end()
        finally:
            del self._leaving[life]
        log.log(level, "successfully unloaded '%s' version %d", self.name, self.number, extra=fields)
        if self._current is None:
            self._on_change()

    # Loads

    def _warnings_of(self, content: ModelContent) -> set[str]:
        """Return the set of warnings that loads of this content have logged, and to which they add."""
        key = content.key(self.number)
        reported = self._reported_warnings.get(key, set())
        self._reported_warnings = {key: reported}
        return reported

    def _check(self, life: VersionLife, loaded: LoadedVersion) -> None:
        """Raises ServeError if the loaded version must not replace the served one."""
        current = self._current
        if current is not None and current is not life and current.offered is not None:
            config = current.offered.config
            check_interface(self.number, config, current.content, loaded.config, life.content)

    def _load_ended(self, life: VersionLife, problem: ServeError | None) -> None:
        """`problem`: why the load has failed; None = it has not."""
        if life is self._current:
            self._request_load_ended(life, problem)
            return
        if problem is None:
            self._next = None
            self._swap(life)
        elif isinstance(problem, FilesChanged):
            self._note_discard(life, problem)
        else:
            self._note_failure(life, problem)
        self._on_end()

    def _request_load_ended(self, life: VersionLife, problem: ServeError | None) -> None:
        """If the files have changed, the requests wait for the settled new content unless it is known to be unusable.
        Under explicit control the model must be loaded by name."""
        if problem is None:
            self._publish()
            return
        if isinstance(problem, FilesChanged):
            life.is_stale = True
            reason = self._problem if problem.is_followed else unavailable(FILES_CHANGED)
            life.failure = None if reason is None else Failure(reason)
        else:
            took = time.monotonic() - life.began_at
            life.failure = self._context.residents.retries.next_failure(problem, life.failure, took)
            text = life.failure.text
            self._context.log.error(
                "failed to load '%s' version %d: %s",
                self.name,
                self.number,
                text,
                extra=about(model=self.name, version=self.number, code=problem.code.name, duration_ms=took * 1000),
            )
        life.refuse_waiting()

    def _note_problem(self, problem: ServeError | None) -> None:
        """Note why newer content cannot be used; None = it can. Requests do not wait for unusable content."""
        self._problem = problem
        current = self._current
        if current is not None and current.is_stale and problem is not None:
            current.failure = Failure(problem)
            current.refuse_waiting()

    def _note_discard(self, life: VersionLife, error: FilesChanged) -> None:
        log, before = self._context.log, life.failure
        fields = about(model=self.name, version=self.number)
        log.info("load of %s:%d discarded: %s", self.name, self.number, error.text, extra=fields)
        is_again = before is not None and isinstance(before.error, FilesChanged) and before.error.file == error.file
        life.failure = Failure(error, before.attempts + 1 if before is not None and is_again else 1)
        if life.failure.attempts == _SUSPICIOUS_DISCARDS:
            log.warning(
                "'%s' of model '%s' has changed during each of %d loads, and changing files are never served; if the"
                " model itself writes there, let it write elsewhere, such as into the temporary folder",
                error.file,
                self.name,
                _SUSPICIOUS_DISCARDS,
                extra=fields,
            )

    def _note_failure(self, life: VersionLife, problem: ServeError) -> None:
        """Note a failed load and plan its retry."""
        error = life.content.scan.advised(problem)
        took = time.monotonic() - life.began_at
        failure = self._context.retries.next_failure(error, life.previous, took)
        life.failure = failure
        self._note_problem(error)
        kept = "; the version loaded before keeps serving" if self.served is not None else ""
        self._context.log.error(
            "failed to load '%s' version %d: %s%s",
            self.name,
            self.number,
            failure.text,
            kept,
            extra=about(model=self.name, version=self.number, code=problem.code.name, duration_ms=took * 1000),
        )
        self._retry = self._context.retries.schedule(failure, self._on_end)

    def _cancel_retry(self) -> None:
        retry, self._retry = self._retry, None
        if retry is not None:
            retry.cancel()

    def _swap(self, life: VersionLife) -> None:
        self._retire_current()
        self._current, self._was_served, self._problem = life, True, None
        if not life.is_cold:
            level = self._context.load_level
            took = time.monotonic() - life.began_at
            fields = about(model=self.name, version=self.number, duration_ms=took * 1000)
            self._context.log.log(level, "successfully loaded '%s' version %d", self.name, self.number, extra=fields)

    def _retire_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.retire()
            self._leaving[current] = None

    def _drop_next(self) -> None:
        self._cancel_retry()
        newer, self._next = self._next, None
        if newer is not None:
            newer.retire()


def _of_served(life: VersionLife) -> str:
    offered = life.offered
    if offered is None or not offered.is_cold:
        return "" if offered is None else offered.status_reason
    failure = life.failure
    if life.is_loading:
        return (life.doing or "is being loaded") + ("" if failure is None else f"; failed before: {failure.error.text}")
    if failure is None:
        return "not loaded: its first request loads it"
    return f"{failure.error.text} (its next request loads it again)" if failure.is_due() else failure.text


def _of_newer(life: VersionLife) -> str:
    if life.failure is not None and life.has_failed:
        return f"{_NEWER_FAILED}: {life.failure.text}"
    if life.is_loading or life.waits_for_files:
        return _NEWER_LOADS + (f": {life.doing}" if life.doing else "")
    return ""
