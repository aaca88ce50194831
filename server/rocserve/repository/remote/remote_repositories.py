"""Follows remote repositories: compares each listing with its copy, and fetches the units that differ and have settled.
A separate thread with its own event loop does so, because long listings and files must not delay the server's loop."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import os
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from rocserve.cache.folders import check_private, make_folder
from rocserve.core.errors import ServeError
from rocserve.core.extras import install_command
from rocserve.core.remote_places import RemotePlace, StoreKind
from rocserve.core.serving import IndexEntry
from rocserve.repository.debounce import Debounce
from rocserve.repository.remote.copy import READABLE, CopyRoom, UnitCopy, mark_used, recorded_units
from rocserve.repository.remote.object_store import BucketSource
from rocserve.repository.remote.objects import (
    WHOLE,
    ObjectChanged,
    RemoteObject,
    Source,
    StoreError,
    Unit,
    arrange,
    in_thread,
    run_all,
)
from rocserve.repository.remote.web_sources import ArchiveSource, HubSource
from rocserve.repository.version import VersionState
from rocserve.settings import ControlMode, RepositorySettings


@dataclass(slots=True)
class _Progress:
    """How much of a download is done."""

    total: int
    logged: float
    done: int = 0

    @property
    def text(self) -> str:
        return f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB"


class RemoteRepository:
    """Keeps the copy of one remote repository current. Only `has_copy` and `notes` may be called outside the thread."""

    def __init__(
        self, place: RemotePlace, source: Source, settle_seconds: float, room: CopyRoom, log: logging.Logger
    ) -> None:
        self.place = place
        self.failure = ""
        """Why the last listing failed; "" = it succeeded."""
        self._source = source
        self._room = room
        self._log = log
        self._settle_seconds = settle_seconds
        self._debounce = Debounce[str](settle_seconds)
        self._units = asyncio.Semaphore(8)
        self._problems: dict[str, str] = {}
        self._progress: dict[str, _Progress] = {}
        self.known: frozenset[str] | None = None
        """Names of the units in the store; None = never listed."""
        self._copies: dict[str, UnitCopy] = {}

    @property
    def has_copy(self) -> bool:
        return any(copy.kept for copy in list(self._copies.values()))

    def notes(self) -> dict[str, tuple[VersionState, str]]:
        """Return (state, reason) of each unit that differs from the store: LOADING while it waits or is copied,
        UNAVAILABLE if its copy has failed."""
        texts = dict.fromkeys(self._debounce.unsettled, f"waiting until its objects in {self.place.url} settle")
        for name, one in self._progress.copy().items():
            texts[name] = f"being copied from {self.place.url}: {one.text}"
        problems = self._problems.copy()
        loading = {name: (VersionState.LOADING, text) for name, text in texts.items()}
        return loading | {name: (VersionState.UNAVAILABLE, text) for name, text in problems.items()}

    def open_copy(self) -> None:
        """Read the copies that earlier servers left. Raises OSError."""
        make_folder(self.place.root, READABLE)
        self._copies.clear()
        for name in recorded_units(self.place.home):
            copy = self._copies[name] = UnitCopy(self.place.home, self.place.root, name)
            copy.open()
            self._debounce.accept(name, copy.fingerprint)

    async def scan(self, *, takes: bool) -> None:
        """List the store and, if `takes`, copy the settled units. Units that cannot be fetched keep their copies."""
        began = time.monotonic()
        units = await self._list()
        if units is None or not takes:
            return
        ended = time.monotonic()
        # This compares the store's clock with ours. If either is wrong, old objects wait as if they were new, or half
        # an upload is copied first, and the complete one later.
        # Objects unchanged for a minute before the start are not being uploaded. Synchronised clocks differ by less.
        old = time.time() - 60.0
        self._debounce.observe(
            began,
            ended,
            {name: unit.fingerprint for name, unit in units.items()},
            lambda name: all(0 < item.changed < old for item in units[name].objects.values()),
        )
        unsettled = self._debounce.unsettled
        names = (units.keys() | self._copies.keys()) - unsettled
        self._problems = {name: text for name, text in self._problems.items() if name in names}
        await self._copy_units(units, names)

    async def scan_twice(self) -> None:
        """Scan, and scan again after the settle time if a unit was too young."""
        await self.scan(takes=True)
        if not self.failure and self._debounce.unsettled:
            await asyncio.sleep(self._settle_seconds)
            await self.scan(takes=True)

    async def take(self, names: Collection[str] | None) -> None:
        """Copy the present state of these units (None = all). Units that cannot be fetched keep their copies."""
        for _ in range(5):
            # Only a full listing shows objects that lie in no folder.
            is_whole = names is None or not self.known or WHOLE in self.known
            units = await self._list(() if is_whole else names or ())
            if units is None:
                return
            chosen = units.keys() | self._copies.keys()
            if names is not None:
                chosen &= {*names, WHOLE} if is_whole else set(names)
            if await self._copy_units(units, chosen):
                return

    async def _list(self, folders: Collection[str] = ()) -> dict[str, Unit] | None:
        """List all units or those of the folders. None = failed; `failure` says why."""
        try:
            listings = await run_all(self._source.listing(folder) for folder in folders or (WHOLE,))
            units = arrange(itertools.chain.from_iterable(listings))
            if not self.place.root.is_dir():
                # The cache was cleared meanwhile.
                self.open_copy()
        except (StoreError, OSError) as error:
            goes_on = "; the earlier copy stays served" if self.has_copy else ""
            text = f"{error}{goes_on}"
            if text != self.failure:
                self._log.error("%s: %s", self.place.url, text)
            self.failure = text
            return None
        if not folders:
            if self.failure:
                self._log.info("%s can be listed again", self.place.url)
            self.failure = ""
            self.known = frozenset(units)
        return units

    async def _copy_units(self, units: Mapping[str, Unit], names: Collection[str]) -> bool:
        """Copy the named units that differ from their copies. False = an object changed meanwhile."""
        differing = []
        for unit in (units.get(name, Unit(name)) for name in sorted(names)):
            copy = self._copies.get(unit.name)
            if unit.refusal or copy is None or unit.fingerprint != copy.fingerprint:
                differing.append(unit)
            else:
                self._problems.pop(unit.name, None)
        return all(await run_all(self._copy_logged(unit) for unit in differing))

    async def _copy_logged(self, unit: Unit) -> bool:
        """Copy one unit; failures are logged. False = an object changed meanwhile."""
        try:
            if unit.refusal:
                raise StoreError(unit.refusal)
            async with self._units:
                await self._copy_unit(unit)
        except (StoreError, ServeError, OSError) as error:
            text = f"{self.place.url}: '{unit.name}': {error}" if unit.name else f"{self.place.url}: {error}"
            if self._problems.get(unit.name) != text:
                self._log.error("%s", text)
            self._problems[unit.name] = text
            return not isinstance(error, ObjectChanged)
        finally:
            self._progress.pop(unit.name, None)
            if unit.name in self._copies and not self._copies[unit.name].kept:
                del self._copies[unit.name]
        self._problems.pop(unit.name, None)
        return True

    async def _copy_unit(self, unit: Unit) -> None:
        copy = self._copies.setdefault(unit.name, UnitCopy(self.place.home, self.place.root, unit.name))
        async with copy.locked():
            known = set(copy.fingerprint)
            lacking = [item for item in unit.objects.values() if (item.key, item.size, item.tag) not in known]
            gone = copy.kept.keys() - unit.objects.keys()
            if not lacking and not gone:
                return
            for key in gone:
                if not await self._source.is_gone(key):
                    raise StoreError(f"the listing lacks '{key}', which is in the store; the copy stays unchanged")
            what = f"'{unit.name}'" if unit.name else "its model"
            began = time.monotonic()
            size = sum(item.size for item in lacking)
            progress = self._progress[unit.name] = _Progress(size, began)
            self._room.make(size, what)
            if lacking:
                self._log.info("%s: copying %s: %.1f MB, files: %d", self.place.url, what, size / 1e6, len(lacking))
            await run_all(self._fetch(copy, item, progress, what) for item in lacking)
            await in_thread(lambda: copy.place(lacking, gone))
            self._log.info(
                "%s: copied %s: files fetched: %d, removed: %d, in %.1f s",
                self.place.url, what, len(lacking), len(gone), time.monotonic() - began,
            )  # fmt: skip

    async def _fetch(self, copy: UnitCopy, item: RemoteObject, progress: _Progress, what: str) -> None:
        def note(count: int) -> None:
            progress.done += count
            if time.monotonic() - progress.logged >= 10.0:
                progress.logged = time.monotonic()
                self._log.info("%s: copying %s: %s", self.place.url, what, progress.text)

        file = copy.incoming(item)
        if file.is_file():
            # An interrupted server has already fetched it.
            note(item.size)
            return
        part = file.with_suffix(".part")
        await self._source.fetch(item, part, note)
        size = part.stat().st_size
        if size != item.size:
            raise ObjectChanged(f"expected {item.size} bytes of '{item.key}', got {size}; the server will retry")
        await in_thread(lambda: _finish(part))
        part.replace(file)


def _finish(file: Path) -> None:
    """Let all users read the file, and flush it to the disk, so that even after a crash of the machine a file with its
    final name is complete."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    file.chmod(0o644)


class RemoteRepositories:
    """Runs the remote repositories' thread. Calls return immediately or are awaited on the server's loop. Without
    remote repositories no thread exists."""

    def __init__(self, settings: RepositorySettings, log: logging.Logger) -> None:
        self._settings = settings
        self._log = log
        self._repositories: list[RemoteRepository] = []
        self._broken: dict[str, str] = {}
        """Repositories that cannot be opened, with the reason."""
        self._in_use: list[BinaryIO] = []
        self._followers: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        """Open the copies; their models can then be served."""
        if self._settings.remotes:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="remote repositories", daemon=True)
            self._thread.start()
            await self._run_in_thread(self._open_all())

    async def start(self, names: Collection[str] | None) -> None:
        """Copy the models of these names (None = all), then follow the stores. Empty: without waiting for a store."""
        if self._loop is not None:
            await self._run_in_thread(self._start(names))

    async def take(self, names: Collection[str]) -> bool:
        """Copy the present state of these models if a store has them. Returns whether there are stores."""
        if self._loop is None:
            return False
        await self._run_in_thread(run_all(repository.take(names) for repository in self._repositories))
        return True

    def stop(self) -> None:
        """Stop the thread. Blocks for a moment."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            # Then the thread is abandoned; the file that it writes has a temporary name.
            self._thread.join(1.0)
        for file in self._in_use:
            file.close()

    def lacking(self) -> dict[str, str]:
        """Return the repositories with neither a listing nor a copy, with the reason."""
        never = {one.place.url: one.failure for one in self._repositories if one.known is None and not one.has_copy}
        return {url: text for url, text in (never | self._broken).items() if text}

    def rows(self, rows: Sequence[IndexEntry]) -> list[IndexEntry]:
        """Return the index rows, with the state of remote repositories and their models added."""
        if self._loop is None:
            return list(rows)
        unavailable = VersionState.UNAVAILABLE.value
        failures = {one.place.url: one.failure for one in self._repositories if one.failure} | self._broken
        notes: dict[str, tuple[VersionState, str]] = {}
        known: dict[str, None] = {}
        for repository in self._repositories:
            notes |= {name or repository.place.name: note for name, note in repository.notes().items()}
            if self._settings.control_mode is ControlMode.EXPLICIT:
                known |= dict.fromkeys(sorted((repository.known or frozenset()) - {WHOLE}))
        shown = {row.name for row in rows}
        return [
            *(replace(row, reason=row.reason or notes[row.name][1]) if row.name in notes else row for row in rows),
            *(IndexEntry(name, "", state.value, text) for name, (state, text) in notes.items() if name not in shown),
            *(IndexEntry(name) for name in known if name not in shown and name not in notes),
            *(IndexEntry(url, "", unavailable, text) for url, text in failures.items()),
        ]

    async def _run_in_thread(self, work: Coroutine[Any, Any, object]) -> None:
        assert self._loop is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _open_all(self) -> None:
        room = CopyRoom(self._settings.remotes[0].home.parent, self._settings.remote_cache_size_bytes)
        for place in self._settings.remotes:
            folder = place.home.parent
            try:
                # Workers of another user read models here. The parent folder holds compiled programs, so those users
                # may not list it.
                make_folder(folder.parent, 0o711)
                make_folder(folder, READABLE)
                for one in (folder.parent, folder):
                    check_private(one)
                self._in_use.append(mark_used(place.home))
                source = open_source(place, os.environ, room)
                repository = RemoteRepository(place, source, self._settings.settle_seconds, room, self._log)
                repository.open_copy()
                self._repositories.append(repository)
            except (StoreError, ServeError, OSError) as error:
                self._broken[place.url] = str(error)
                self._log.error("%s: %s", place.url, error)

    async def _start(self, names: Collection[str] | None) -> None:
        settings = self._settings
        if settings.control_mode is ControlMode.POLL:
            await run_all(repository.scan_twice() for repository in self._repositories)
        elif names != ():
            await run_all(repository.scan(takes=False) for repository in self._repositories)
            await run_all(repository.take(names) for repository in self._repositories)
        if settings.control_mode is not ControlMode.NONE:
            self._followers = [asyncio.ensure_future(self._follow(repository)) for repository in self._repositories]

    async def _follow(self, repository: RemoteRepository) -> None:
        takes = self._settings.control_mode is ControlMode.POLL
        is_asked = repository.known is not None or bool(repository.failure)
        while True:
            if is_asked:
                await asyncio.sleep(self._settings.poll_seconds)
            is_asked = True
            try:
                await repository.scan(takes=takes)
            except Exception:
                self._log.exception("following %s failed", repository.place.url)


def open_source(place: RemotePlace, environment: Mapping[str, str], room: CopyRoom) -> Source:
    """Open the store of a URL. Raises StoreError if a package is not installed or credentials cannot be read."""
    if importlib.util.find_spec("obstore") is None:
        raise StoreError(f"the package obstore is not installed; run: {install_command('remote')}")
    if place.kind is StoreKind.HUGGING_FACE:
        return HubSource(place, environment)
    if place.kind is StoreKind.ARCHIVE:
        return ArchiveSource(place, room)
    return BucketSource(place, environment)
