"""Hot reload: serves changes of the repositories as soon as they have settled.

A notification or the poll interval makes `scan` scan the folders that may have changed. The debounce finds the folders
that have settled. Reader threads read them. The table gives each model its new content, and the model loads its
versions next to the serving ones and swaps them (model.py, version.py).

With notifications, and after each poll interval, only the folders of the notifications and the unsettled folders are
scanned. All folders are scanned as often as that costs little, to find changes that came without a notification.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.core.errors import ServeError, internal, not_found
from rocserve.core.model_names import ModelKey
from rocserve.repository.content import ModelContent
from rocserve.repository.context import RepositoryContext
from rocserve.repository.retries import Failure
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScan
from rocserve.repository.table import ModelTable
from rocserve.repository.watch import UNWATCHED_POLL_SECONDS

_BATCH_SECONDS = 0.02
"""A thread hands over its results after this time, and they are published together."""


@dataclass(slots=True, eq=False)
class _FolderReading:
    """A settled folder, and whether its reading is queued or has failed."""

    scan: ModelScan
    is_queued: bool = False
    """The folder is queued for reading, or is being read."""
    failure: Failure | None = None
    retry: asyncio.Task[None] | None = None


class HotReload:
    """Scans the repositories when something in them has changed or may have changed. In polling mode, reads the folders
    that have settled, and retries unreadable folders with growing pauses. All calls are made on the loop's thread."""

    def __init__(self, context: RepositoryContext, table: ModelTable) -> None:
        self._context = context
        self._debounce = context.debounce
        self._table = table
        self._scan_seconds = 0.0
        self._full_scan_at = 0.0
        self._readings: dict[ModelKey, _FolderReading] = {}
        self._queue: deque[_FolderReading] = deque()
        self._readers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        clock, watch = asyncio.get_running_loop().time, self._context.watch
        while True:
            try:
                await watch.renew()
                due = await self.scan()
                woken = await watch.wait(max(0.0, due - clock()))
            except Exception:
                self._context.log.exception("scanning the model repositories failed")
                self._full_scan_at = 0.0
                await asyncio.sleep(1.0)
                continue
            if woken:
                # Notifications come in bursts. Scans take at most a fifth of the time.
                await asyncio.sleep(max(0.05, 4.0 * self._scan_seconds))

    async def scan(self) -> float:
        """Scan once. Returns the time at which the next scan is due at the latest."""
        clock, scanner = asyncio.get_running_loop().time, self._context.scanner
        changed = self._context.watch.take_changed()
        began = clock()
        if began >= self._full_scan_at:
            changed = None
        if changed is not None:
            models = scanner.latest.models
            folders = [models[key].folder for key in self._debounce.unsettled if key in models]
            changed.update(folders, (folder.parent for folder in folders))
        scan = await scanner.run(changed)
        ended = clock()
        self._scan_seconds = ended - began
        poll_seconds = self._context.settings.poll_seconds
        # Full scans may take 0.5 % of a CPU: thousands of folders are scanned less often than the poll interval asks.
        # An idle server of 10,000 models uses 1.3 % of a CPU without full scans, and must stay below 2 %.
        poll_at = ended + max(poll_seconds, scanner.cpu_seconds / 0.005)
        if scan.unreadable:
            self._full_scan_at = ended + min(poll_seconds, UNWATCHED_POLL_SECONDS)
        elif changed is None:
            self._full_scan_at = poll_at
        # Under explicit control scans only keep the repository index current.
        due = self._take_settled(scan, began, ended) if self._context.is_polling else math.inf
        return min(poll_at, self._full_scan_at, due)

    def _take_settled(self, scan: RepositoryScan, began: float, ended: float) -> float:
        """Take over the settled folders. Returns the time at which the unsettled ones must be scanned next."""
        settle_seconds = self._context.settings.settle_seconds
        # Files that had not changed for two seconds before the server started are complete.
        old_ns = time.time_ns() - int(max(2.0, settle_seconds) * 1e9)
        fingerprints = {name: model.fingerprint for name, model in scan.models.items()}
        settled = self._debounce.observe(
            began, ended, fingerprints, lambda name: 0 < scan.models[name].changed_ns < old_ns
        )
        with self._table.one_publication():
            for name in sorted(settled):
                self._take_folder(name, scan.models.get(name))
        due = self._debounce.due()
        # Notifications may be late (watchdog holds back half of a rename). A folder that keeps disappearing and
        # reappearing must not count as gone because two scans happened to miss it.
        return math.inf if due is None else min(due, ended + settle_seconds / 5)

    def is_reading(self, folder: ModelKey) -> bool:
        reading = self._readings.get(folder)
        return reading is not None and reading.is_queued

    def read_again(self, folder: ModelKey) -> None:
        """Read a folder in the state of the latest scan, although it has not changed. Raises ServeError (NOT_FOUND) if
        there is no such folder with a model."""
        scan = self._context.scanner.latest.models.get(folder)
        if scan is None or not (scan.looks_like_model or scan.refusal):
            raise not_found(f"there is no folder '{folder}' with a model in the model repositories")
        self._take_folder(folder, scan)

    async def wait(self) -> None:
        """Return when all settled folders are read."""
        while self._readers:
            await asyncio.wait(set(self._readers))

    def stop(self) -> None:
        self._queue.clear()
        for task in (*self._readers, *(reading.retry for reading in self._readings.values())):
            if task is not None:
                task.cancel()

    def _take_folder(self, folder: ModelKey, scan: ModelScan | None) -> None:
        """Queue a settled folder for reading. `scan`: None = the folder is gone."""
        previous = self._readings.pop(folder, None)
        if previous is not None and previous.retry is not None:
            previous.retry.cancel()
        for text in () if scan is None else scan.advice:
            self._context.log.warning("%s", text)
        if scan is None or (not scan.looks_like_model and not scan.refusal):
            self._table.drop(folder)
            return
        reading = self._readings[folder] = _FolderReading(scan)
        self._queue_reading(reading)

    def _queue_reading(self, reading: _FolderReading) -> None:
        if reading.retry is not None:
            reading.retry.cancel()
        reading.is_queued = True
        self._queue.append(reading)
        # A folder whose files are checksummed takes long and must not delay the others. More than four threads would
        # only wait for the interpreter's lock.
        if len(self._readers) < 4:
            task = self._context.background.start(self._read_queue(), "reading of model folders")
            self._readers.add(task)
            # A callback, because a task that is cancelled before it begins never runs its own code.
            task.add_done_callback(self._readers.discard)

    async def _read_queue(self) -> None:
        while self._queue:
            outcomes = await asyncio.to_thread(self._read_batch)
            with self._table.one_publication():
                for reading, outcome in outcomes:
                    # The folder may have changed again meanwhile.
                    if self._readings.get(reading.scan.key) is reading:
                        self._apply(reading, outcome)
        # Reset before this task ends: a folder queued from now on needs a new reader.
        self._readers.difference_update(filter(None, (asyncio.current_task(),)))

    def _read_batch(self) -> list[tuple[_FolderReading, Sequence[ModelContent] | Exception]]:
        """Read queued folders for a short time. Runs in a thread; blocks on the disk."""
        outcomes: list[tuple[_FolderReading, Sequence[ModelContent] | Exception]] = []
        until = time.monotonic() + _BATCH_SECONDS
        while time.monotonic() < until:
            try:
                reading = self._queue.popleft()
            except IndexError:
                break  # Another thread took the last one.
            try:
                outcomes.append((reading, self._context.reader.read(reading.scan)))
            except Exception as error:
                outcomes.append((reading, error))
        return outcomes

    def _apply(self, reading: _FolderReading, outcome: Sequence[ModelContent] | Exception) -> None:
        reading.is_queued = False
        read_again = functools.partial(self._queue_reading, reading)
        try:
            if isinstance(outcome, Exception):
                raise outcome
            # A folder that is refused because of its model's name is read as soon as the name is free.
            self._table.apply(reading.scan.key, outcome, on_freed=read_again)
        except Exception as error:
            # The traceback would keep all objects of the reading alive.
            foreseen = error.with_traceback(None) if isinstance(error, ServeError) else None
            foreseen = foreseen or internal(f"{type(error).__name__}: {error}")
            reading.failure = self._context.retries.next_failure(foreseen, reading.failure)
            self._table.reject(reading.scan.key, reading.failure)
            reading.retry = self._context.retries.schedule(reading.failure, read_again)
