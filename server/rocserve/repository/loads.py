"""Loads of versions: what a load gets, returns and raises, and the slots that bound concurrent loads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rocserve.config.definition import ModelDefinition
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.printable import printable_name
from rocserve.core.serving import ServedVersion

OVERDUE_PER_SLOT = 4
"""Loads that may run on without their slot, for each slot. More than 0, because a hanging load must not block the
others. Bounded, because loads that are slow for lack of memory or CPUs must not become ever more."""


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
        """Note whether a member makes this ensemble decoupled. Called on the loop, before the publication."""

    async def unload(self) -> None:
        """Refuse new requests, finish queued and running ones, then end the workers."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """What a load is doing now."""

    text: str = ""
    """One line; "" = nothing to report."""
    is_check: bool = False
    """The version is tried before it is served (core/load_check.py)."""


NOTHING_TO_REPORT = LoadProgress()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    definition: ModelDefinition
    version: int
    folder: Path
    on_change: Callable[[], None] = lambda: None
    """Called from any thread when `available` changes, and when a problem of `status_reason` appears or ends."""
    on_progress: Callable[[LoadProgress], None] = lambda _: None
    """Called on the loop during the load with its progress."""
    reported_warnings: set[str] = field(default_factory=set)
    """Warnings, and places of tracebacks, that loads of the same content have logged."""

    @property
    def name(self) -> str:
        return f"model '{self.definition.name}' version {self.version}"


LoadVersion = Callable[[LoadOrder], Awaitable[LoadedVersion]]
"""Loads one version and warms it up. Cancelling the call ends the load and frees all its resources. Raises ServeError
if the version cannot be served; its text is the reason in the repository index."""


class FilesChanged(ServeError):
    """A version's files changed during its load. `is_followed`: the server loads new files itself. `file`: the file
    that changed last; "" = unknown."""

    def __init__(self, is_followed: bool, file: str = "") -> None:
        which = f" ('{printable_name(file)}' last)" if file else ""
        then = "it is" if is_followed else "it can be"
        text = f"its files changed while it was loading{which}; {then} loaded again when they have settled"
        super().__init__(StatusCode.UNAVAILABLE, text)
        self.is_followed = is_followed
        self.file = printable_name(file)


class LoadSlots:
    """Bounds how many models load at the same time. Loads that take long or fail repeatedly do not block the others."""

    def __init__(self, count: int, patience_seconds: float) -> None:
        """`patience_seconds`: after this time a load passes its slot on to the next one."""
        self._free = count
        self._first_loads: deque[asyncio.Future[None]] = deque()
        self._retries: deque[asyncio.Future[None]] = deque()
        """Retries wait for a slot behind first loads."""
        self.patience_seconds = patience_seconds
        self._overdue_permits = asyncio.Semaphore(count * OVERDUE_PER_SLOT)
        """Permits of overdue loads that have passed their slots on. Without a permit an overdue load keeps its slot."""

    @property
    def is_full(self) -> bool:
        return not self._free

    @contextlib.asynccontextmanager
    async def acquire(self, compiles: bool, is_retry: bool = False) -> AsyncIterator[None]:
        """Wait for a slot and hold it. `compiles`: the load compiles a program first, usually in a bounded process
        of low priority; such loads pass their slots on without a permit. `is_retry`: the same content has failed
        before."""
        if self._free:
            self._free -= 1
        else:
            waiter = asyncio.get_running_loop().create_future()
            (self._retries if is_retry else self._first_loads).append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    # The slot came together with the cancellation.
                    self._release()
                raise
        passing_on = asyncio.ensure_future(self._pass_slot_on(compiles))
        try:
            yield
        finally:
            if passing_on.cancel():
                self._release()
            elif not compiles:
                self._overdue_permits.release()

    async def _pass_slot_on(self, compiles: bool) -> None:
        await asyncio.sleep(self.patience_seconds)
        if not compiles:
            await self._overdue_permits.acquire()
        self._release()

    def _release(self) -> None:
        for queue in (self._first_loads, self._retries):
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self._free += 1
