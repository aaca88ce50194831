"""One repository elsewhere: compares its listing with the copy and takes what differs and has settled."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rocserve.core.remote_places import RemotePlace
from rocserve.repository.debounce import Debounce
from rocserve.repository.remote.copy import Room, UnitCopy, recorded_units
from rocserve.repository.remote.objects import (
    WHOLE,
    ObjectChanged,
    RemoteObject,
    Source,
    StoreError,
    Unit,
    arrange,
    beside,
    in_thread,
)

_UNITS_AT_ONCE = 8
_ATTEMPTS = 5
"""How often a listing is repeated because objects change meanwhile."""
_OLD_SECONDS = 60.0
"""What has not changed for this long before the server started is not being uploaded. Clocks that are set differ
less."""
_PROGRESS_SECONDS = 10.0


@dataclass(slots=True)
class _Progress:
    total: int
    began: float
    logged: float
    done: int = 0

    @property
    def text(self) -> str:
        return f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB"


class RemoteRepository:
    """All calls but those of properties are made on the loop of the thread that takes repositories."""

    def __init__(
        self, place: RemotePlace, source: Source, settle_seconds: float, room: Room, log: logging.Logger
    ) -> None:
        self.place = place
        self.failure = ""
        """Why the store could not be listed the last time; "" = it could."""
        self.has_listed = False
        self._source = source
        self._room = room
        self._log = log
        self._debounce = Debounce(settle_seconds)
        self._units = asyncio.Semaphore(_UNITS_AT_ONCE)
        self._problems: dict[str, str] = {}
        self._progress: dict[str, _Progress] = {}
        self._known: frozenset[str] = frozenset()
        self._is_first = True
        self._copies: dict[str, UnitCopy] = {}

    @property
    def has_copy(self) -> bool:
        return any(copy.kept for copy in list(self._copies.values()))

    @property
    def known(self) -> frozenset[str]:
        """The names of what is in the store, as far as it was listed."""
        return self._known

    @property
    def has_unsettled(self) -> bool:
        return bool(self._debounce.unsettled)

    def notes(self) -> dict[str, str]:
        """Why units are not as in the store, or how far they have come, by their names."""
        taking = {
            name: f"being taken from {self.place.url}: {each.text}" for name, each in self._progress.copy().items()
        }
        waiting = dict.fromkeys(self._debounce.unsettled, f"waiting until its objects in {self.place.url} settle")
        return waiting | taking | self._problems.copy()

    def open_copy(self) -> None:
        """Find what was taken before. Raises: OSError."""
        self.place.root.mkdir(parents=True, exist_ok=True)
        self._copies.clear()
        for name in recorded_units(self.place.home):
            copy = self._copy(name)
            copy.read()
            self._debounce.accept(name, copy.fingerprint)

    async def scan(self, *, takes: bool) -> None:
        """List the store and, `takes`, take what has settled; what cannot be had stays as it is."""
        began = time.monotonic()
        units = await self._list()
        if units is None or not takes:
            return
        ended = time.monotonic()
        if self._is_first:
            self._is_first = False
            self._accept_old(units)
        self._debounce.observe(began, ended, {name: unit.fingerprint for name, unit in units.items()})
        unsettled = self._debounce.unsettled
        names = (units.keys() | self._copies.keys()) - unsettled
        self._problems = {name: text for name, text in self._problems.items() if name in names}
        await self._bring_all(units, names)

    async def take(self, names: Collection[str] | None) -> None:
        """Take these as they are now, or all; what cannot be had stays as it is."""
        for _ in range(_ATTEMPTS):
            if names is None or not self._known or WHOLE in self._known:
                units = await self._list()
                wanted = None if names is None else {*names, WHOLE}
            else:
                units, wanted = await self._list_folders(names), set(names)
            if units is None:
                return
            every = units.keys() | self._copies.keys()
            chosen = every if wanted is None else every & wanted
            if await self._bring_all(units, chosen):
                return

    async def _list(self) -> dict[str, Unit] | None:
        """None: it could not be listed; `failure` says why."""
        try:
            units = arrange(await self._source.listing())
            if not self.place.root.is_dir():
                # The cache was cleared.
                self.open_copy()
        except (StoreError, OSError) as error:
            self._failed(str(error))
            return None
        if self.failure:
            self._log.info("%s can be listed again", self.place.url)
        self.failure = ""
        self.has_listed = True
        self._known = frozenset(units)
        return units

    async def _list_folders(self, names: Collection[str]) -> dict[str, Unit] | None:
        try:
            listings = await beside(self._source.listing(name) for name in names)
        except StoreError as error:
            self._failed(str(error))
            return None
        return arrange(item for listing in listings for item in listing)

    def _failed(self, text: str) -> None:
        goes_on = "; what was taken before goes on being served" if self.has_copy else ""
        text = f"{self.place.url}: {text}{goes_on}"
        if text != self.failure:
            self._log.error("%s", text)
        self.failure = text

    def _accept_old(self, units: Mapping[str, Unit]) -> None:
        """By the store's clock and ours: where one is wrong, young objects wait, or half of an upload is taken and
        then the whole."""
        old = time.time() - _OLD_SECONDS
        for name, unit in units.items():
            if all(0 < item.changed < old for item in unit.objects.values()):
                self._debounce.accept(name, unit.fingerprint)

    async def _bring_all(self, units: Mapping[str, Unit], names: Collection[str]) -> bool:
        """As `_bring_quietly`, for those of these names that differ from their copy."""
        differing = []
        for unit in (units.get(name, Unit(name)) for name in sorted(names)):
            copy = self._copies.get(unit.name)
            if unit.refusal or copy is None or unit.fingerprint != copy.fingerprint:
                differing.append(unit)
            else:
                self._problems.pop(unit.name, None)
        return all(await beside(self._bring_quietly(unit) for unit in differing))

    async def _bring_quietly(self, unit: Unit) -> bool:
        """Let the copy become as the unit; False: the store's objects are others by now."""
        try:
            if unit.refusal:
                raise StoreError(unit.refusal)
            async with self._units:
                await self._bring(unit)
        except (StoreError, OSError) as error:
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

    async def _bring(self, unit: Unit) -> None:
        copy = self._copy(unit.name)
        async with copy.locked():
            lacking = [item for item in unit.objects.values() if not _has(copy, item)]
            gone = copy.kept.keys() - unit.objects.keys()
            if not lacking and not gone:
                return
            for key in gone:
                if not await self._source.is_gone(key):
                    raise StoreError(
                        f"expected '{key}' in the listing, as it is in the store, came a listing without it; the copy"
                        " stays as it is"
                    )
            what = f"'{unit.name}'" if unit.name else "its model"
            began = time.monotonic()
            size = sum(item.size for item in lacking)
            progress = self._progress[unit.name] = _Progress(size, began, began)
            self._room.make(size, what)
            if lacking:
                self._log.info("%s: taking %s: %d files, %.1f MB", self.place.url, what, len(lacking), size / 1e6)
            files = await beside(self._fetch(copy, item, progress, what) for item in lacking)
            fetched = {item.key: (item, file) for item, file in zip(lacking, files, strict=True)}
            await in_thread(lambda: copy.place(fetched, gone))
            self._log.info(
                "%s: %s is as in the store: %d files taken, %d removed, in %.1f s",
                self.place.url, what, len(files), len(gone), time.monotonic() - began,
            )  # fmt: skip

    async def _fetch(self, copy: UnitCopy, item: RemoteObject, progress: _Progress, what: str) -> Path:
        def note(count: int) -> None:
            progress.done += count
            if time.monotonic() - progress.logged >= _PROGRESS_SECONDS:
                progress.logged = time.monotonic()
                self._log.info("%s: taking %s: %s", self.place.url, what, progress.text)

        file = copy.incoming(item)
        if file.is_file():
            # Taken before the server, or another one, was interrupted.
            note(item.size)
            return file
        part = file.with_suffix(".part")
        await self._source.fetch(item, part, note)
        size = part.stat().st_size
        if size != item.size:
            raise ObjectChanged(f"expected {item.size} bytes of '{item.key}', came {size}; it is asked again")
        await in_thread(lambda: _keep(part))
        part.replace(file)
        return file

    def _copy(self, name: str) -> UnitCopy:
        if name not in self._copies:
            self._copies[name] = UnitCopy(self.place.home, self.place.root, name)
        return self._copies[name]


def _has(copy: UnitCopy, item: RemoteObject) -> bool:
    kept = copy.kept.get(item.key)
    return kept is not None and (kept.size, kept.tag) == (item.size, item.tag)


def _keep(file: Path) -> None:
    """So that the file is whole, if it is there, also after the machine died."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    file.chmod(0o644)
