"""What the lives of models and versions are made of: loaded versions, what loads them and when, what has failed and is
tried again, and their tasks."""

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
"""Loads that may go on without their slot, for each slot: what hangs must not keep others from loading, and what takes
long for want of memory or of CPUs must not be joined by ever more."""
_RETRIES_A_SECOND = 1.0
_BURST = 8
"""Retries that may come at once after a time without any."""


class LoadedVersion(ServedVersion, Protocol):
    """A version that is loaded, warmed and answers requests until `unload`."""

    @property
    def available(self) -> bool:
        """Whether it can answer now; False while all its workers are being restarted."""

    @property
    def status_reason(self) -> str:
        """What is wrong with it, or goes on beside it, for the repository index ("restarting: worker killed by signal
        9"); "" = nothing."""

    def follow_members(self, is_decoupled: bool) -> None:
        """Of an ensemble: whether a member makes it decoupled. Called on the loop, before it is published."""

    async def unload(self) -> None:
        """Take no more requests, finish those that are queued or running, then end the workers."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One version to load."""

    definition: ModelDefinition
    version: int
    folder: Path
    """The version's."""
    content: str = ""
    """Two loads with the same one load the same; "" = nothing else loads it."""
    on_change: Callable[[], None] = lambda: None
    """Called, from any thread, whenever `available` changes, or `status_reason` because something is wrong or no longer
    is."""
    on_progress: Callable[[str], None] = lambda _: None
    """Called on the loop while the load lasts, with what it is at in one line ("" = nothing worth telling); later
    `status_reason` says what still goes on beside the version."""
    told: set[str] = field(default_factory=set)
    """What the log has been warned of already, by another load of the same."""

    @property
    def name(self) -> str:
        return f"model '{self.definition.name}' version {self.version}"


LoadVersion = Callable[[LoadOrder], Awaitable[LoadedVersion]]
"""Loads one version and warms it up. Cancelling the call ends the load and frees all that it took.

Raises ServeError where the version cannot be served; its text is the reason in the repository index."""


class FilesChanged(ServeError):
    """The files are not what they were when the load began. `is_followed`: new ones are taken up by themselves; `file`:
    the last that changed, "" = it is not known."""

    def __init__(self, is_followed: bool, file: str = "") -> None:
        which = f" ('{printable_name(file)}' last)" if file else ""
        then = "it is" if is_followed else "it can be"
        text = f"its files changed while it was loading{which}; {then} loaded again when they have settled"
        super().__init__(StatusCode.UNAVAILABLE, text)
        self.is_followed = is_followed
        self.file = printable_name(file)


class BackgroundTasks:
    """Runs tasks beside their starter, and loses none."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Run `work`; an unforeseen exception goes to the log."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Return when none is running, those counted that were started meanwhile."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ServeError):
            # Foreseen: its text says all, and the task's starter has it.
            self._log.info("%s failed: %s", task.get_name(), error.text)
        elif error is not None:
            self._log.error("%s failed: %r", task.get_name(), error, exc_info=error)


class LoadSlots:
    """Bounds how many models load beside each other, without letting those that take long, or fail again and again,
    keep the others waiting."""

    def __init__(self, count: int, patience_seconds: float) -> None:
        """`patience_seconds`: after these a load lets the next begin beside it."""
        self._free = count
        self._first: deque[asyncio.Future[None]] = deque()
        self._later: deque[asyncio.Future[None]] = deque()
        """What has failed before waits for a slot behind what is new."""
        self.patience_seconds = patience_seconds
        self._places = asyncio.Semaphore(count * OVERDUE_PER_SLOT)
        """Of loads that have handed their slots on; without one an overdue load keeps its slot."""

    @property
    def all_taken(self) -> bool:
        return not self._free

    @contextlib.asynccontextmanager
    async def taken(self, compiles: bool, is_retry: bool = False) -> AsyncIterator[None]:
        """Wait for a slot and have it. `compiles`: a program is compiled first, mostly by a process of low priority and
        within bounds of its own; any number of such loads hand their slots on. `is_retry`: the same has failed before;
        what is new goes first."""
        if self._free:
            self._free -= 1
        else:
            waiter = asyncio.get_running_loop().create_future()
            (self._later if is_retry else self._first).append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    # It came together with the cancellation.
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
        """Let the next begin beside a load that is overdue."""
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
    """The key of the content that failed."""
    attempts: int = 1
    retry_at: float | None = None
    """time.monotonic() of the next try; None = only when the files change."""

    @property
    def text(self) -> str:
        """The reason as the index shows it."""
        if self.retry_at is None:
            return self.error.text
        seconds = math.ceil(max(0.0, self.retry_at - time.monotonic()))
        tries = "once" if self.attempts == 1 else f"{self.attempts} times"
        return f"{self.error.text} (failed {tries}, next try in {seconds} s)"

    def is_due(self) -> bool:
        return self.retry_at is not None and time.monotonic() >= self.retry_at


@dataclass(slots=True)
class RetryPolicy:
    """Pauses that double from `first_seconds` up to `longest_seconds`; switched on and off for all who have it."""

    first_seconds: float
    longest_seconds: float
    enabled: bool = True

    def pause(self, attempts: int, took_seconds: float = 0.0) -> float | None:
        """Seconds until the next try after this many failed ones; None = it is not tried again by itself. Never less
        than the last try took: what fails after an hour of compiling is not to be at it all the time."""
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
        """Record a failure; attempts count on only while the content stays the same. `can_pass`: it may succeed another
        time."""
        attempts = previous.attempts + 1 if previous is not None and previous.content == content else 1
        pause = self.pause(attempts, took_seconds) if can_pass else None
        return Failure(error, content, attempts, None if pause is None else time.monotonic() + pause)


class Retries:
    """Bounds how many failed models are tried again in a time, over the whole server: a thousand broken folders must
    not keep it from the good ones."""

    def __init__(self, a_second: float = _RETRIES_A_SECOND, burst: int = _BURST) -> None:
        self._pause_seconds = 1 / a_second
        self._allowance = Allowance(burst, a_second)
        self._turn = asyncio.Lock()

    def add(self, failure: Failure, callback: Callable[[], None]) -> asyncio.Task[None] | None:
        """Call back when the next try is due, as soon as the retries that were due before allow it; unless it is
        cancelled. None: there is no next try."""
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
    """What the models of a repository and their versions share."""

    def __init__(
        self,
        settings: RepositorySettings,
        registry: BackendRegistry,
        load: LoadVersion,
        residents: ResidentModels | None,
        log: logging.Logger,
    ) -> None:
        """`residents`: None: all versions are loaded, and stay."""
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
        """Whether changes of files are taken up by themselves."""
        return self.settings.control_mode is ControlMode.POLL

    async def check_unchanged(self, scan: ModelScan, version: int) -> None:
        """After a load. Raises: FilesChanged: what it has read of is another by now; where changes are followed, it is
        read again when it has settled."""
        if await self.scanner.is_unchanged(scan, version):
            return
        # Nobody follows files that clients have named.
        is_followed = self.is_polling and any(scan.folder.is_relative_to(root) for root in self.scanner.roots)
        if is_followed:
            self.debounce.reopen(scan.key)
            self.watch.wake()
        raise FilesChanged(is_followed, await self.scanner.last_changed(scan))
