"""Hot reload: changes of the repositories are served once they have settled.

A change goes this way: a notification or the poll interval makes `scan` scan the folders that may have changed. The
debounce finds those that have settled; they are read in a thread. The table lets their models become what they say:
each loads its versions beside those that serve, and swaps them (model.py, version.py).

With notifications only the folders that they name are scanned, and those that are young or have not settled; the same
after each poll interval. All folders are scanned as often as that costs little, for changes without a notification.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rocserve.core.errors import ServeError, internal
from rocserve.core.model_names import ModelKey
from rocserve.repository.content import ModelContent
from rocserve.repository.lifecycle import Failure, LifecycleContext
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScan
from rocserve.repository.table import ModelTable, NameTaken
from rocserve.repository.watch import UNWATCHED_POLL_SECONDS

_SPACING_SECONDS = 0.05
_SHARE_OF_TIME = 4.0
"""A scan is followed by a pause this many times as long, however much is being written."""
_POLLS_SHARE = 0.005
"""Of a CPU's time: with thousands of folders scans of all of them are further apart than they were asked to be. An idle
server of 10,000 models takes 1.3 % without them, and is to stay below 2."""
_PAUSE_AFTER_ERROR_SECONDS = 1.0
_OLD_SECONDS = 2.0
"""Files that have not changed for this long before the server started are not being copied."""
_SCANS_WHILE_UNSETTLED = 5
"""How often, within the settle time, to scan what has not settled."""
_READERS = 4
"""Threads that read folders: one that takes long, as files with checksums may, keeps none of the others waiting. They
share one interpreter, so more would only make each other wait."""
_READING_SECONDS = 0.02
"""What a thread reads in this time is taken at once, and published once."""


@dataclass(slots=True, eq=False)
class _Reading:
    """The last scan of a folder, and what became of it."""

    scan: ModelScan
    is_due: bool = False
    """It is being read, or is to be."""
    failure: Failure | None = None
    retry: asyncio.Task[None] | None = None


class HotReload:
    """Scans the repositories whenever something in them changed, or may have. Where changes are taken up by themselves,
    reads the folders that have settled; one that cannot be read is tried again, later and later. All calls are made on
    the loop's thread."""

    def __init__(self, context: LifecycleContext, table: ModelTable) -> None:
        self._context = context
        self._debounce = context.debounce
        self._table = table
        self._scan_seconds = 0.0
        self._scan_all_at = 0.0
        self._readings: dict[ModelKey, _Reading] = {}
        """By the folder's key."""
        self._due: deque[_Reading] = deque()
        self._readers: set[asyncio.Task[None]] = set()
        self._blocked: dict[_Reading, ModelKey] = {}
        """By another folder's model, which has the name of one of theirs."""
        self._unsubscribe = table.subscribe(self._retry_blocked)

    async def run(self) -> None:
        """Scan until cancelled."""
        clock, watch = asyncio.get_running_loop().time, self._context.watch
        while True:
            try:
                await watch.renew()
                due = await self.scan()
                woken = await watch.wait(max(0.0, due - clock()))
            except Exception:
                self._context.log.exception("scanning the model repositories failed")
                self._scan_all_at = 0.0
                await asyncio.sleep(_PAUSE_AFTER_ERROR_SECONDS)
                continue
            if woken:
                # Notifications come in bursts.
                await asyncio.sleep(max(_SPACING_SECONDS, _SHARE_OF_TIME * self._scan_seconds))

    async def scan(self) -> float:
        """One scan; returns when the next is due at the latest."""
        clock, scanner = asyncio.get_running_loop().time, self._context.scanner
        changed = self._context.watch.take()
        began = clock()
        if began >= self._scan_all_at:
            changed = None
        if changed is not None:
            models = scanner.latest.models
            folders = [models[key].folder for key in self._debounce.unsettled if key in models]
            changed.update(folders, (folder.parent for folder in folders))
        scan = await scanner.run(changed)
        ended = clock()
        self._scan_seconds = ended - began
        poll_seconds = self._context.settings.poll_seconds
        poll_at = ended + max(poll_seconds, scanner.cpu_seconds / _POLLS_SHARE)
        if scan.unreadable:
            self._scan_all_at = ended + min(poll_seconds, UNWATCHED_POLL_SECONDS)
        elif changed is None:
            self._scan_all_at = poll_at
        # In explicit mode scans serve the index alone.
        due = self._settle(scan, began, ended) if self._context.is_polling else math.inf
        return min(poll_at, self._scan_all_at, due)

    def _settle(self, scan: RepositoryScan, began: float, ended: float) -> float:
        """Take up what has settled; returns when the next scan is due for what has not."""
        settle_seconds = self._context.settings.settle_seconds
        old_ns = time.time_ns() - int(max(_OLD_SECONDS, settle_seconds) * 1e9)
        fingerprints = {name: model.fingerprint for name, model in scan.models.items()}
        settled = self._debounce.observe(
            began, ended, fingerprints, lambda name: 0 < scan.models[name].changed_ns < old_ns
        )
        with self._table.one_publication():
            for name in sorted(settled):
                self._follow(name, scan.models.get(name))
        due = self._debounce.due()
        # Notifications may come late (watchdog holds back half of a rename), and what goes and comes back again and
        # again must not be taken for gone because two scans happened to miss it.
        return math.inf if due is None else min(due, ended + settle_seconds / _SCANS_WHILE_UNSETTLED)

    def is_reading(self, folder: ModelKey) -> bool:
        reading = self._readings.get(folder)
        return reading is not None and reading.is_due

    async def wait(self) -> None:
        """Return when all that has settled is read."""
        while self._readers:
            await asyncio.wait(set(self._readers))

    def stop(self) -> None:
        self._unsubscribe()
        self._due.clear()
        for task in (*self._readers, *(reading.retry for reading in self._readings.values())):
            if task is not None:
                task.cancel()

    def _follow(self, folder: ModelKey, scan: ModelScan | None) -> None:
        """The folder has settled as this; None: it is gone."""
        previous = self._readings.pop(folder, None)
        if previous is not None:
            self._blocked.pop(previous, None)
            if previous.retry is not None:
                previous.retry.cancel()
        for text in () if scan is None else scan.advice:
            self._context.log.warning("%s", text)
        if scan is None or (not scan.looks_like_model and not scan.refusal):
            self._table.drop(folder)
            return
        reading = self._readings[folder] = _Reading(scan)
        self._read_soon(reading)

    def _retry_blocked(self, changed: Collection[ModelKey]) -> None:
        """Read again at once what was refused for the name of a model that is gone."""
        for reading, name in tuple(self._blocked.items()):
            if name in changed and self._table.folder_of(name) is None:
                self._blocked.pop(reading)
                if reading.retry is not None:
                    reading.retry.cancel()
                self._read_soon(reading)

    def _read_soon(self, reading: _Reading) -> None:
        reading.is_due = True
        self._due.append(reading)
        if len(self._readers) < _READERS:
            task = self._context.background.start(self._read(), "reading of model folders")
            self._readers.add(task)
            # Also of one that is cancelled before it begins.
            task.add_done_callback(self._readers.discard)

    async def _read(self) -> None:
        while self._due:
            outcomes = await asyncio.to_thread(self._read_some)
            with self._table.one_publication():
                for reading, outcome in outcomes:
                    # The folder may have changed again meanwhile.
                    if self._readings.get(reading.scan.key) is reading:
                        self._take(reading, outcome)
        # At once: what is due from now on needs another reader.
        self._readers.difference_update(filter(None, (asyncio.current_task(),)))

    def _read_some(self) -> list[tuple[_Reading, Sequence[ModelContent] | Exception]]:
        """Blocks on the disk."""
        outcomes: list[tuple[_Reading, Sequence[ModelContent] | Exception]] = []
        until = time.monotonic() + _READING_SECONDS
        while time.monotonic() < until:
            try:
                reading = self._due.popleft()
            except IndexError:
                break  # Another thread has taken the last.
            try:
                outcomes.append((reading, self._context.reader.read(reading.scan)))
            except Exception as error:
                outcomes.append((reading, error))
        return outcomes

    def _take(self, reading: _Reading, outcome: Sequence[ModelContent] | Exception) -> None:
        reading.is_due = False
        self._blocked.pop(reading, None)
        try:
            if isinstance(outcome, Exception):
                raise outcome
            self._table.take(reading.scan.key, outcome)
        except Exception as error:
            # Its traceback holds all objects of the reading.
            foreseen = error.with_traceback(None) if isinstance(error, ServeError) else None
            foreseen = foreseen or internal(f"{type(error).__name__}: {error}")
            if isinstance(error, NameTaken):
                self._blocked[reading] = error.key
            reading.failure = self._context.retry.next_failure(foreseen, "", reading.failure)
            self._table.reject(reading.scan.key, reading.failure)
            retry_soon = functools.partial(self._read_soon, reading)
            reading.retry = self._context.retries.add(reading.failure, retry_soon)
