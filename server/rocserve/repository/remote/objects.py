"""Objects of a remote repository, the units that they form, and the interface of a store."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rocserve.config.model_folder import is_version_name
from rocserve.core.printable import printable_name
from rocserve.repository.scan import CONFIG_FILENAMES, is_temporary

WHOLE = ""
"""The name of the unit of objects that lie in no folder, and of a repository that is itself one model."""


class StoreError(Exception):
    """A store fails to provide something. The text has the expectation, the fact and the remedy."""


class ObjectChanged(StoreError):
    """The object is no longer the listed one: it was replaced or removed meanwhile."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """A file in a remote store."""

    key: str
    size: int
    tag: str
    """Changes with the content: an etag, a generation or a digest."""
    changed: float = 0.0
    """Time of the last change by the store's clock, in seconds since the epoch; 0 = unknown."""


Fingerprint = tuple[tuple[str, int, str], ...]


@dataclass(slots=True)
class Unit:
    """A model's folder in a store. It settles and is copied as a whole."""

    name: str
    objects: dict[str, RemoteObject] = field(default_factory=dict)
    refusal: str = ""
    """Why nothing of the unit is copied; "" = it may be."""

    @property
    def fingerprint(self) -> Fingerprint:
        return tuple(sorted((one.key, one.size, one.tag) for one in self.objects.values()))


def arrange(objects: Iterable[RemoteObject]) -> dict[str, Unit]:
    """Sort the objects of a listing into units by name. Temporary names are left out as on a disk, except empty files,
    because such a file may keep the version folder of an ensemble."""
    meant = []
    for one in objects:
        *above, last = ("" if part == ".." else part for part in one.key.split("/"))
        if not any(map(is_temporary, above)) and not (one.size and is_temporary(last)):
            meant.append(one)
    is_one = any("/" not in one.key and one.key in CONFIG_FILENAMES for one in meant) or any(
        is_version_name(one.key.split("/")[0]) for one in meant if "/" in one.key
    )
    folders: set[str] = set()
    for one in meant:
        folder = one.key.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    units: dict[str, Unit] = {}
    for one in meant:
        if one.key in folders and not one.size:
            continue  # Consoles create such an object for a folder.
        name = WHOLE if is_one or "/" not in one.key else one.key.split("/")[0]
        refusal = path_refusal(one.key)
        if one.key in folders:
            refusal = f"'{one.key}' is both an object and a folder, which a disk cannot hold; remove one of them"
        if refusal and name in ("", ".", ".."):
            name = printable_name(one.key)
        unit = units.setdefault(name, Unit(name))
        unit.refusal = unit.refusal or refusal
        unit.objects[one.key] = one
    return units


def path_refusal(key: str) -> str:
    """Return why an object of this name cannot become a file in the copy; "" = it can."""
    shown = printable_name(key)
    for part in key.split("/"):
        # Linux's file systems allow 255 bytes.
        if part in ("", ".", "..") or "\0" in part or len(part.encode(errors="surrogateescape")) > 255:
            return f"the object's name '{shown}' is not a path within a folder; rename or remove it"
    return ""


Note = Callable[[int], None]
"""Called with the number of received bytes."""
Result = TypeVar("Result")


class Source(abc.ABC):
    @abc.abstractmethod
    async def listing(self, folder: str = "") -> Sequence[RemoteObject]:
        """List all objects, or those of a folder. Raises StoreError."""

    @abc.abstractmethod
    async def fetch(self, item: RemoteObject, file: Path, note: Note) -> None:
        """Write an object's content to a file. Raises StoreError; ObjectChanged if the object was replaced."""

    async def is_gone(self, key: str) -> bool:
        """Whether an object that a listing lacks is really gone; True if listings are complete. Raises StoreError."""
        return True


async def run_all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run the work concurrently. Returns all results, or cancels the rest at the first error and raises it."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work in a daemon thread; a thread of asyncio.to_thread would keep the process from ending."""
    done: concurrent.futures.Future[Result] = concurrent.futures.Future()
    # The caller may be cancelled while the thread goes on.
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="remote repository", daemon=True).start()
    return await asyncio.wrap_future(done)
