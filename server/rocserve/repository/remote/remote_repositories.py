"""All repositories elsewhere. A thread with a loop of its own takes them: neither long listings nor files may hold up
the server's loop."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from io import TextIOWrapper
from typing import Any

from rocserve.cache.private_folder import check_private
from rocserve.core.errors import ServeError
from rocserve.core.remote_places import RemotePlace, StoreKind
from rocserve.core.serving import IndexEntry
from rocserve.repository.remote.archive import ArchiveSource
from rocserve.repository.remote.copy import Room, use
from rocserve.repository.remote.hub import HubSource
from rocserve.repository.remote.object_store import BucketSource
from rocserve.repository.remote.objects import WHOLE, Source, StoreError, beside
from rocserve.repository.remote.remote_repository import RemoteRepository
from rocserve.repository.version import VersionState
from rocserve.settings import ControlMode, RepositorySettings

_END_SECONDS = 1.0
"""The thread is left behind then: what it writes has a temporary name."""


class RemoteRepositories:
    """Calls return at once, or are awaited on the server's loop. Without repositories elsewhere there is no thread."""

    def __init__(self, settings: RepositorySettings, log: logging.Logger) -> None:
        self._settings = settings
        self._log = log
        self._repositories: list[RemoteRepository] = []
        self._broken: dict[str, str] = {}
        """Those that cannot be opened, with the reason."""
        self._in_use: list[TextIOWrapper] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._followers: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="remote repositories", daemon=True)

    async def open(self) -> None:
        """Find the copies; their models can be served."""
        if self._settings.remotes:
            self._loop = asyncio.new_event_loop()
            self._thread.start()
            await self._there(self._open_all())

    async def start(self, names: Collection[str] | None) -> None:
        """Take the models of these names (None = all); then follow the stores. Without names nothing waits
        for a store."""
        if self._loop is not None:
            await self._there(self._start(names))

    async def take(self, names: Collection[str]) -> bool:
        """Take the models of these names as they are now, where a store has them; returns whether there are stores."""
        if self._loop is None:
            return False
        await self._there(beside(each.take(names) for each in self._repositories))
        return True

    def stop(self) -> None:
        """Blocks a moment."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_SECONDS)
        for file in self._in_use:
            file.close()

    def lacking(self) -> dict[str, str]:
        """Those of which nothing can be served, since they could never be listed, with the reason."""
        never = {each.place.url: each.failure for each in self._repositories if not (each.has_listed or each.has_copy)}
        return {url: text for url, text in (never | self._broken).items() if text}

    def rows(self, rows: Sequence[IndexEntry]) -> list[IndexEntry]:
        """The rows of the index, with the state of repositories elsewhere and their models."""
        if self._loop is None:
            return list(rows)
        unavailable = VersionState.UNAVAILABLE.value
        failures = {each.place.url: each.failure for each in self._repositories if each.failure} | self._broken
        notes: dict[str, str] = {}
        known: dict[str, None] = {}
        for each in self._repositories:
            notes |= {name or each.place.name: text for name, text in each.notes().items()}
            if self._settings.control_mode is ControlMode.EXPLICIT:
                known |= dict.fromkeys(sorted(each.known - {WHOLE}))
        there = {row.name for row in rows}
        return [
            *(replace(row, reason=row.reason or notes.get(row.name, "")) for row in rows),
            *(IndexEntry(name, "", unavailable, text) for name, text in notes.items() if name not in there),
            *(IndexEntry(name) for name in known if name not in there and name not in notes),
            *(IndexEntry(url, "", unavailable, text) for url, text in failures.items()),
        ]

    async def _there(self, work: Coroutine[Any, Any, object]) -> None:
        """Run in the thread of repositories elsewhere."""
        assert self._loop is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open_all(self) -> None:
        room = Room(self._settings.remotes[0].home.parent, self._settings.remote_cache_bytes)
        for place in self._settings.remotes:
            try:
                self._open(place, room)
            except (StoreError, ServeError, OSError) as error:
                self._broken[place.url] = text = f"{place.url}: {error}"
                self._log.error("%s", text)

    async def _start(self, names: Collection[str] | None) -> None:
        settings = self._settings
        if settings.control_mode is ControlMode.POLL:
            await beside(self._look_twice(each) for each in self._repositories)
        elif names != ():
            await beside(each.scan(takes=False) for each in self._repositories)
            await beside(each.take(names) for each in self._repositories)
        if settings.control_mode is not ControlMode.NONE:
            self._followers = [asyncio.ensure_future(self._follow(each)) for each in self._repositories]

    def _open(self, place: RemotePlace, room: Room) -> None:
        """Raises: StoreError, ServeError, OSError."""
        folder = place.home.parent
        # Workers of another user read models here; who may not list the folder above finds no compiled program there.
        folder.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        folder.mkdir(mode=0o755, exist_ok=True)
        for each in (folder.parent, folder):
            check_private(each)
        self._in_use.append(use(place.home))
        source = open_source(place, os.environ, room)
        repository = RemoteRepository(place, source, self._settings.settle_seconds, room, self._log)
        repository.open_copy()
        self._repositories.append(repository)

    async def _look_twice(self, repository: RemoteRepository) -> None:
        """What was still young at the first scan is taken at the second."""
        await repository.scan(takes=True)
        if not repository.failure and repository.has_unsettled:
            await asyncio.sleep(self._settings.settle_seconds)
            await repository.scan(takes=True)

    async def _follow(self, repository: RemoteRepository) -> None:
        takes = self._settings.control_mode is ControlMode.POLL
        while True:
            if repository.has_listed or repository.failure:
                await asyncio.sleep(self._settings.poll_seconds)
            try:
                await repository.scan(takes=takes)
            except Exception:
                self._log.exception("following %s failed", repository.place.url)


def open_source(place: RemotePlace, environment: Mapping[str, str], room: Room) -> Source:
    """What a URL names. Raises: StoreError: what it needs is not installed, or its credentials cannot be read."""
    if importlib.util.find_spec("obstore") is None:
        raise StoreError("expected the package obstore, which is not installed: pip install 'rocserve[remote]'")
    if place.kind is StoreKind.HUGGING_FACE:
        return HubSource(place, environment)
    if place.kind is StoreKind.ARCHIVE:
        return ArchiveSource(place, room)
    return BucketSource(place, environment)
