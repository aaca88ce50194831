"""Parts that models and versions of a repository share: load slots, retries of failures, background tasks, and the
context that holds them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import ModelDefinition
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_names import ModelKey
from rocserve.core.printable import printable_name
from rocserve.core.serving import ServedVersion
from rocserve.observability.failures import Allowance
from rocserve.repository.content import ContentReader
from rocserve.repository.debounce import Debounce
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScanner
from rocserve.repository.watch import RepositoryWatch
from rocserve.settings import ControlMode, RepositorySettings
from rocserve.settings.repository import WhatKind

if TYPE_CHECKING:
    from rocserve.repository.residency.resident_models import ResidentModels

Result = TypeVar("Result")

OVERDUE_PER_SLOT = 4
"""Loads that may run on without their slot, for each slot. More than 0, because a hanging load must not block the
others. Bounded, because loads that are slow for lack of memory or CPUs must not become ever more."""
_RETRIES_A_SECOND = 1.0
_BURST = 8
"""Retries that may run in a row after a time without any."""


class LoadedVersion(ServedVersion, Protocol):
    """A version that is loaded, warmed up and answers requests until `unload`."""

    @property
    def available(self) -> bool:
        """Whether the version can answer now; False while all its workers are restarting."""

    @property
    def status_reason(self) -> str:
        """What is wrong with the version, or still runs in the background, for the repository index ("restarting:
        worker killed by signal 9"); "" = nothing."""

    def follow_members(self, is_decoupled: bool) -> None:
        """Of an ensemble: note whether a member makes it decoupled. Called on the loop, before the version is
        published."""

    async def unload(self) -> None:
        """Refuse new requests, finish queued and running ones, then end the workers."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    definition: ModelDefinition
    version: int
    folder: Path
    """The version's folder."""
    content: str = ""
    """Key of what is loaded: two loads of one key load the same files. "" = no other load loads these files."""
    on_change: Callable[[], None] = lambda: None
    """Called from any thread when `available` changes, and when a problem of `status_reason` appears or ends."""
    on_progress: Callable[[str], None] = lambda _: None
    """Called on the loop during the load with what the load is doing, one line; "" = nothing to report. After the load
    `status_reason` reports what still runs."""
    told: set[str] = field(default_factory=set)
    """Warnings that loads of the same content have logged."""

    @property
    def name(self) -> str:
        return f"model '{self.definition.name}' version {self.version}"


LoadVersion = Callable[[LoadOrder], Awaitable[LoadedVersion]]
"""Loads one version and warms it up. Cancelling the call ends the load and frees all its resources.

Raises ServeError if the version cannot be served; its text is the reason in the repository index.
"""


class FilesChanged(ServeError):
    """A version's files changed during its load. `is_followed`: the server loads the new files by itself. `file`: the
    file that changed last; "" = unknown."""

    def __init__(self, is_followed: bool, file: str = "") -> None:
        which = f" ('{printable_name(file)}' last)" if file else ""
        then = "it is" if is_followed else "it can be"
        text = f"its files changed while it was loading{which}; {then} loaded again when they have settled"
        super().__init__(StatusCode.UNAVAILABLE, text)
        self.is_followed = is_followed
        self.file = printable_name(file)


class BackgroundTasks:
    """Runs tasks next to their starter and logs their failures."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Run `work` as a task; an unexpected exception is logged."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Return when no task runs, including tasks started meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ServeError):
            # Expected: the text says all, and the task's starter gets the error.
            self._log.info("%s failed: %s", task.get_name(), error.text)
        elif error is not None:
            self._log.error("%s failed: %r", task.get_name(), error, exc_info=error)


class LoadSlots:
    """Bounds how many models load at the same time. Loads that take long or fail repeatedly do not block the others."""

    def __init__(self, count: int, patience_seconds: float) -> None:
        """`patience_seconds`: after this time a load lets the next one begin next to it."""
        self._free = count
        self._first: deque[asyncio.Future[None]] = deque()
        self._later: deque[asyncio.Future[None]] = deque()
        """Retries wait for a slot behind first loads."""
        self.patience_seconds = patience_seconds
        self._places = asyncio.Semaphore(count * OVERDUE_PER_SLOT)
        """Permits of overdue loads that have passed their slots on. Without a permit an overdue load keeps its slot."""

    @property
    def all_taken(self) -> bool:
        return not self._free

    @contextlib.asynccontextmanager
    async def taken(self, compiles: bool, is_retry: bool = False) -> AsyncIterator[None]:
        """Wait for a slot and hold it. `compiles`: the load compiles a program first, usually in a bounded process of
        low priority; such loads need no permit to pass their slots on. `is_retry`: the same content has failed before;
        first loads go first."""
        if self._free:
            self._free -= 1
        else:
            waiter = asyncio.get_running_loop().create_future()
            (self._later if is_retry else self._first).append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    # The slot came together with the cancellation.
                    self._release()
                raise
        handing_on = asyncio.ensure_future(self._hand_on(compiles))
        try:
            yield
        finally:
            if handing_on.cancel():
                self._release()
            elif not compiles:
                self._places.release()

    async def _hand_on(self, compiles: bool) -> None:
        """Let the next load begin while this one is overdue."""
        await asyncio.sleep(self.patience_seconds)
        if not compiles:
            await self._places.acquire()
        self._release()

    def _release(self) -> None:
        for queue in (self._first, self._later):
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self._free += 1


@dataclass(frozen=True, slots=True)
class Failure:
    error: ServeError
    content: str = ""
    """Key of the content that failed."""
    attempts: int = 1
    retry_at: float | None = None
    """time.monotonic() of the next try; None = not before the files change."""

    @property
    def text(self) -> str:
        """Return the reason as the repository index shows it."""
        if self.retry_at is None:
            return self.error.text
        seconds = math.ceil(max(0.0, self.retry_at - time.monotonic()))
        tries = "once" if self.attempts == 1 else f"{self.attempts} times"
        return f"{self.error.text} (failed {tries}, next try in {seconds} s)"

    def is_due(self) -> bool:
        return self.retry_at is not None and time.monotonic() >= self.retry_at


@dataclass(slots=True)
class RetryPolicy:
    """Doubles the pauses between retries from `first_seconds` up to `longest_seconds`. The server switches it on after
    the start."""

    first_seconds: float
    longest_seconds: float
    enabled: bool = True

    def pause(self, attempts: int, took_seconds: float = 0.0) -> float | None:
        """Return the seconds until the next try after failed ones; None = no retry. Never less than the last try took:
        a load that fails after an hour of compiling must not compile all the time."""
        if not self.enabled:
            return None
        pause = min(self.longest_seconds, self.first_seconds * 2.0 ** min(attempts - 1, 60))
        return float(max(pause, took_seconds))

    def next_failure(
        self,
        error: ServeError,
        content: str = "",
        previous: Failure | None = None,
        took_seconds: float = 0.0,
        can_pass: bool = True,
    ) -> Failure:
        """Record a failure. Attempts count as long as the content stays the same. `can_pass`: a later try may
        succeed."""
        attempts = previous.attempts + 1 if previous is not None and previous.content == content else 1
        pause = self.pause(attempts, took_seconds) if can_pass else None
        return Failure(error, content, attempts, None if pause is None else time.monotonic() + pause)


class Retries:
    """Bounds the rate of retries of the whole server: a thousand broken folders must not delay the good ones."""

    def __init__(self, a_second: float = _RETRIES_A_SECOND, burst: int = _BURST) -> None:
        self._pause_seconds = 1 / a_second
        self._allowance = Allowance(burst, a_second)
        self._turn = asyncio.Lock()

    def add(self, failure: Failure, callback: Callable[[], None]) -> asyncio.Task[None] | None:
        """Call back when the next try is due and earlier due retries have run. Cancelling the task prevents the call.
        Returns None if there is no next try."""
        if failure.retry_at is None:
            return None
        work = self._run(failure.retry_at - time.monotonic(), callback)
        return asyncio.get_running_loop().create_task(work, name="retry")

    async def _run(self, pause_seconds: float, callback: Callable[[], None]) -> None:
        await asyncio.sleep(pause_seconds)
        async with self._turn:
            while not self._allowance.take():  # noqa: ASYNC110 - it notifies nobody
                await asyncio.sleep(self._pause_seconds)
        callback()


class LifecycleContext:
    """Shares the parts of a repository among its models and versions."""

    def __init__(
        self,
        settings: RepositorySettings,
        registry: BackendRegistry,
        load: LoadVersion,
        residents: ResidentModels | None,
        log: logging.Logger,
    ) -> None:
        """`residents`: None = every version is loaded and stays loaded."""
        self.settings = settings
        self.load = load
        self.residents = residents
        self.log = log
        self.reader = ContentReader(registry, settings)
        self.scanner = RepositoryScanner(settings, registry, log)
        is_file = settings.single is not None and settings.single.kind is WhatKind.FILE
        self.watch = RepositoryWatch(self.scanner.roots, log, recursive=not is_file)
        self.debounce = Debounce[ModelKey](settings.settle_seconds)
        self.load_slots = LoadSlots(settings.concurrent_loads, settings.long_load_seconds)
        self.retry = RetryPolicy(settings.retry_seconds, settings.longest_retry_seconds, enabled=False)
        self.retries = Retries()
        self.background = BackgroundTasks(log)

    @property
    def is_polling(self) -> bool:
        """Whether the server loads changed files by itself."""
        return self.settings.control_mode is ControlMode.POLL

    async def check_unchanged(self, scan: ModelScan, version: int) -> None:
        """Check after a load that the files are still the scanned ones. In polling mode changed files are loaded again
        after they have settled. Raises: FilesChanged."""
        if await self.scanner.is_unchanged(scan, version):
            return
        # Nobody watches files outside the repositories, which a client's load request may name.
        is_followed = self.is_polling and any(scan.folder.is_relative_to(root) for root in self.scanner.roots)
        if is_followed:
            self.debounce.reopen(scan.key)
            self.watch.wake()
        raise FilesChanged(is_followed, await self.scanner.last_changed(scan))
