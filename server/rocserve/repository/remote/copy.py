"""The local copy of one unit of a remote repository: its files, and the record of their objects. Each change is
recorded first. If a server is killed before the change is complete, the next one completes it without the network."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from rocserve.cache.digests import file_digest
from rocserve.cache.folders import lock_file, make_folder, still_names
from rocserve.core.errors import ServeError
from rocserve.repository.remote.objects import Fingerprint, RemoteObject, StoreError
from rocserve.repository.scan import is_temporary

_RECORDS = "records"
_INCOMING = "incoming"
_WHOLE_FILE = "%"
"""The file name of the unit WHOLE; no quoted name equals it."""
READABLE = 0o755
"""Mode of the models' folders: workers of another user read; only the server writes, because files are executed."""
_LOCK_POLL_SECONDS = 0.05
"""Interval of checks whether another server has released the lock: flock(2) would block."""


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """An object's file as it was put into the copy."""

    size: int
    tag: str
    sha256: str
    mtime_ns: int


class UnitCopy:
    """Reads and changes the copy of one unit. Blocks on the disk. Only the wait for the lock is async."""

    def __init__(self, home: Path, root: Path, name: str) -> None:
        self._root = root
        file = quote(name, safe="") or _WHOLE_FILE
        self._record = home / _RECORDS / f"{file}.json"
        self._pending = home / _RECORDS / f"{file}.pending"
        self._lock = home / _RECORDS / f"{file}.lock"
        self._incoming = home / _INCOMING / file
        self.kept: dict[str, CopiedFile] = {}
        self.fingerprint: Fingerprint = ()

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Hold the lock against other servers of this machine, with `kept` read again."""
        with self._lock.open("ab") as file:
            while not lock_file(file, shared=False):  # noqa: ASYNC110 - a lock notifies nobody
                await asyncio.sleep(_LOCK_POLL_SECONDS)
            self.read()
            yield

    def open(self) -> None:
        """Read the record at the server's start. Completes a killed server's change, unless another server holds the
        lock and completes it."""
        with self._lock.open("ab") as file:
            self.read(completes=lock_file(file, shared=False))

    def read(self, completes: bool = True) -> None:
        """Read the record, and complete a killed server's change, which needs the lock. A file that has changed in the
        copy is left out of `kept` unless its content is the same."""
        if completes:
            with contextlib.suppress(FileNotFoundError):
                self._apply(json.loads(self._pending.read_bytes()))
        self.kept = {key: kept for key, kept in self._recorded().items() if self._is_whole(key, kept)}
        self.fingerprint = tuple(sorted((key, kept.size, kept.tag) for key, kept in self.kept.items()))

    def incoming(self, item: RemoteObject) -> Path:
        """Return the path to write an object to. A file of this name is always complete."""
        make_folder(self._incoming, 0o700)
        return self._incoming / hashlib.sha256(f"{item.key}\0{item.size}\0{item.tag}".encode()).hexdigest()[:32]

    def place(self, fetched: Iterable[RemoteObject], gone: Iterable[str]) -> None:
        """Move the files of fetched objects into the copy and remove the `gone` ones, all or nothing."""
        files = {item: self.incoming(item) for item in fetched}
        kept = {
            item.key: asdict(CopiedFile(item.size, item.tag, file_digest(file), file.stat().st_mtime_ns))
            for item, file in files.items()
        }
        names = {item.key: file.name for item, file in files.items()}
        _write(self._pending, {"kept": kept, "files": names, "gone": sorted(gone)})
        self.read()
        shutil.rmtree(self._incoming, ignore_errors=True)

    def _recorded(self) -> dict[str, CopiedFile]:
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
            return {key: CopiedFile(**fields) for key, fields in json.loads(self._record.read_bytes()).items()}
        return {}

    def _apply(self, pending: Mapping[str, Mapping[str, object]]) -> None:
        kept: dict[str, object] = {key: asdict(one) for key, one in self._recorded().items()}
        for key in pending["gone"]:
            kept.pop(key, None)
            self._remove(self._root / key)
        for key, name in pending["files"].items():
            target = self._root / key
            make_folder(target.parent, READABLE)
            # A missing file was moved before the server was killed.
            with contextlib.suppress(FileNotFoundError):
                (self._incoming / str(name)).replace(target)
        if kept := kept | dict(pending["kept"]):
            _write(self._record, kept)
        else:
            self._record.unlink(missing_ok=True)
        self._pending.unlink()

    def _remove(self, file: Path) -> None:
        """Remove a file, and folders that now hold only temporary files such as __pycache__."""
        file.unlink(missing_ok=True)
        for folder in file.parents:
            if folder == self._root or not folder.is_dir() or any(not is_temporary(p.name) for p in folder.iterdir()):
                return
            shutil.rmtree(folder, ignore_errors=True)

    def _is_whole(self, key: str, kept: CopiedFile) -> bool:
        file = self._root / key
        try:
            status = file.lstat()
            if (status.st_size, status.st_mtime_ns) == (kept.size, kept.mtime_ns):
                return True
            return status.st_size == kept.size and file_digest(file) == kept.sha256
        except (OSError, ServeError):
            return False


def recorded_units(home: Path) -> list[str]:
    """Return the names of units with a complete or begun copy. Creates missing folders."""
    for name in (_RECORDS, _INCOMING):
        make_folder(home / name, 0o700)
    files = [path for path in (home / _RECORDS).iterdir() if path.suffix in (".json", ".pending")]
    return sorted({"" if path.stem == _WHOLE_FILE else unquote(path.stem) for path in files})


def _write(file: Path, content: Mapping[str, object]) -> None:
    """Write a file completely or not at all, even if the machine crashes."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    part.replace(file)


_IN_USE = "in-use"


def mark_used(home: Path) -> BinaryIO:
    """Keep a repository's copy until the returned file is closed. Blocks while another server removes that copy."""
    mark = home / _IN_USE
    while True:
        with contextlib.suppress(FileNotFoundError):
            make_folder(home, READABLE)
            file = mark.open("ab")
            if lock_file(file, shared=True) and still_names(mark, file):
                # The mark's time orders the copies by their last use.
                mark.touch()
                return file
            file.close()
        time.sleep(_LOCK_POLL_SECONDS)


class CopyRoom:
    """Bounds the disk space of all copies. Blocks on the disk."""

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        """`folder` holds the copies of all repositories. `limit_bytes`: None = all but a tenth of the disk."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._used: int | None = None
        """Bytes of the last count plus the reserved bytes since; None = not counted yet."""

    def make(self, needed: int, what: str) -> None:
        """Reserve room, or only check it if there is no limit. Removes the oldest unused copies for it. Raises
        StoreError."""
        if not self._lack(needed):
            return
        unused = self._unused()
        self._used = None
        while (text := self._lack(needed)) and (home := next(unused, None)):
            shutil.rmtree(home, ignore_errors=True)
            self._used = None
        if text:
            raise StoreError(
                f"no room for the {needed} bytes of {what}: {text}; free disk space, or raise --remote-cache-size-bytes"
            )

    def _lack(self, needed: int) -> str:
        """Return why there is not enough room. "" = there is enough; with a limit, it is then reserved."""
        if self._limit_bytes is None:
            disk = shutil.disk_usage(self._folder)
            # A tenth of the disk stays free by default: with less, Kubernetes begins to evict pods.
            lacks = disk.free - needed < disk.total // 10
            return (
                f"{disk.free} bytes free in '{self._folder}', and a tenth of the disk must stay free" if lacks else ""
            )
        if self._used is None:
            self._used = _disk_bytes(self._folder)
        if self._used + needed > self._limit_bytes:
            return f"{self._used} bytes used in '{self._folder}', limit {self._limit_bytes}"
        self._used += needed
        return ""

    def _unused(self) -> Iterator[Path]:
        marks: list[tuple[float, Path]] = []
        for mark in self._folder.glob(f"*/{_IN_USE}"):
            with contextlib.suppress(FileNotFoundError):
                marks.append((mark.stat().st_mtime, mark))
        for _, mark in sorted(marks):
            # Another server may remove the copy meanwhile, so its mark must not be made again.
            with contextlib.suppress(FileNotFoundError), mark.open("r+b") as file:
                if lock_file(file, shared=False):
                    yield mark.parent


def _disk_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder, without those that vanish meanwhile."""
    total = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = Path(inner, name).lstat()
                total += status.st_size // status.st_nlink
    return total
