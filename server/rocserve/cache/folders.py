"""A cache of folders that engines have filled. A folder's name identifies everything that its files depend on.

    <name>/          the files; .sha256 has their digests, as sha256sum writes them
    .<name>.new/     a folder that is being filled
    .<name>.lock     locked by the process that fills or removes the folder

Many processes use a cache concurrently. A filled folder gets its name by a rename, so it is complete or does not exist.
Each process that uses a folder has a shared lock on its .sha256, which keeps the folder from being removed. A folder's
modification time is its last use, because that works on a noatime mount, too. Only the server's user and root may write
to a folder, because the programs in it are executed.

Locks are those of flock(2): the kernel releases a lock when the holder ends, and child programs do not inherit it. A
.lock file is removed on release, so that lock files do not accumulate.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rocserve.cache.digests import folder_listing
from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class FileLock:
    """A held lock, until `release` or the end of the process."""

    _path: Path
    _file: BinaryIO

    def release(self) -> None:
        """Release the lock. Further calls have no effect, because the file may then be another holder's."""
        if self._file.closed:
            return
        # Removed before the lock is released: a process that has opened the file finds that the name is gone.
        with self._file:
            self._path.unlink(missing_ok=True)


def try_lock(path: Path) -> FileLock | None:
    """Take a lock; None if another process holds it. Raises OSError if the file cannot be written."""
    while True:
        # Open for writing, because NFS allows no exclusive lock on a file opened for reading.
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        if not lock_file(file, shared=False):
            file.close()
            return None
        if still_names(path, file):
            return FileLock(path, file)
        file.close()


def wait_for_lock(paths: Sequence[Path], waiting: Callable[[], None]) -> FileLock:
    """Take the first lock that is free. Calls `waiting` repeatedly while other processes hold all of them; an exception
    from it ends the wait. Raises OSError as `try_lock`."""
    while True:
        for path in paths:
            if (lock := try_lock(path)) is not None:
                return lock
        waiting()
        # Polling, because a blocking flock would delay Python's signal handlers.
        time.sleep(0.1)


def lock_file(file: BinaryIO, *, shared: bool) -> bool:
    """Lock an open file until it is closed. Returns False if another process holds the lock; True without locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some file systems have no locks.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def still_names(path: Path, file: BinaryIO) -> bool:
    """Return whether the path still names the open file."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(file.fileno()))


def cache_directory(settings: EngineSettings) -> Path:
    """Return the setting, else `rocserve` in $XDG_CACHE_HOME or ~/.cache. Without a home: a temporary folder."""
    if settings.cache_directory:
        return _expanded(settings.cache_directory).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "rocserve"
    home = _expanded("~")
    return home / ".cache/rocserve" if home.is_absolute() else temporary_cache_directory()


def temporary_cache_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"rocserve-cache-{os.geteuid()}"


def _expanded(path: str) -> Path:
    # Unlike this, Path.expanduser raises for users that the machine does not know, which is common in containers.
    return Path(os.path.expanduser(path))  # noqa: PTH111


_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Create a folder and its parents for this user alone (mode 0700), or check an existing one. Raises ServeError
    (UNAVAILABLE) as `check_private` does, OSError if the folder cannot be created."""
    make_folder(folder, 0o700)
    check_private(folder)


def make_folder(folder: Path, mode: int) -> None:
    """Create a folder and its missing parents, all with this mode, regardless of the umask. Raises OSError."""
    # One by one, because `parents=True` would apply the umask to the parents.
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
        missing.chmod(mode)


def check_private(folder: Path) -> None:
    """Raises ServeError (UNAVAILABLE) if users except this one and root may write to it, OSError if it is missing."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise unavailable(
            f"cache directory {folder} is not used: it is not a folder; name another with --cache-directory"
        )
    if not _is_trusted(found.st_uid):
        reason = f"it belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this"
        raise _refusal(folder, reason, "name another")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        reason = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise _refusal(folder, reason, f"run chmod go-w {folder}, or name a folder in it")


def is_private(folder: Path) -> bool:
    """Return whether the folder exists and only this user and root could have written to it."""
    try:
        check_private(folder)
    except (OSError, ServeError):
        return False
    return True


def _is_trusted(user: int) -> bool:
    # Root's files, such as those of a container image, are as trustworthy as this program itself.
    return user in (0, os.geteuid())


def _refusal(folder: Path, reason: str, remedy: str) -> ServeError:
    return unavailable(
        f"cache directory {folder} is not used: {reason}, and the compiled programs in it are executed;"
        f" {remedy} with --cache-directory, which the server then creates with mode 0700"
    )


_DIGESTS = ".sha256"
_LOCK, _NEW = ".lock", ".new"
ANOTHER_PLACE = "make room, or name another folder with --cache-directory"


@dataclass(frozen=True, slots=True)
class CachedFolder:
    """A folder in use. It is not removed until `release`, or until this object is freed."""

    path: Path
    _digests: BinaryIO = field(repr=False, compare=False)
    """An open file with a shared lock."""

    def release(self) -> None:
        self._digests.close()


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A folder in a listing. It may have been removed meanwhile."""

    path: Path
    size_bytes: int
    used_at: float
    """When it was last used, in seconds since 1970."""


class UnusablePlaceError(ServeError):
    """The cache's place cannot be written, for example because the disk is full."""

    def __init__(self, place: Path, error: OSError) -> None:
        self.reason = error.strerror or str(error)
        super().__init__(
            StatusCode.UNAVAILABLE,
            f"the cache of compiled programs {place} cannot be used: {self.reason}; {ANOTHER_PLACE}",
        )


class _DamagedError(Exception):
    """A folder's files differ from those that were stored."""


@dataclass(frozen=True, slots=True)
class FolderCache:
    """A cache of folders, by name, in one place."""

    place: Path
    _limit_bytes: int
    """If the folders take more, the least recently used ones are removed."""
    _warn: Callable[[str], None]
    _is_known: Callable[[Path], bool] = lambda folder: True
    """Whether this version of rocserve can use a folder's files; if not, the folder counts as damaged."""

    def find(self, name: str) -> CachedFolder | None:
        """Return a folder, and mark it as used now; None if it is missing or damaged."""
        try:
            return self._open(name)
        except _DamagedError as error:
            self._warn(f"{self.place / name} is damaged, and not used: {error}")
        return None

    def find_or_make(self, name: str, make: Callable[[Path], None], waiting: Callable[[], None]) -> CachedFolder:
        """Return a folder. If it is missing or damaged, `make` fills a new one, in one process at a time; then the
        least recently used folders are removed if the cache is too large. A process that waits for another calls
        `waiting` repeatedly. Exceptions of `make` and `waiting` pass through, except that an OSError becomes
        UnusablePlaceError. Raises ServeError (UNAVAILABLE) if the place is not private."""
        if (found := self.find(name)) is not None:
            return found
        try:
            make_private(self.place)
            lock = wait_for_lock([self._hidden(name, _LOCK)], waiting)
            try:
                with suppress(_DamagedError):
                    found = self._open(name)
                found = found or self._make(name, make)
            finally:
                lock.release()
        except OSError as error:
            raise UnusablePlaceError(self.place, error) from None
        try:
            self.prune(self._limit_bytes)
        except ServeError as error:
            self._warn(error.text)
        return found

    def entries(self) -> Sequence[FolderEntry]:
        """Return all folders, least recently used first."""
        return folder_entries([entry for entry in self._listed() if not entry.name.startswith(".")])

    def being_made(self) -> Sequence[str]:
        """Return the names of folders that a process is filling, or removing at this moment."""
        names = []
        for lock in self._listed():
            if lock.suffix != _LOCK:
                continue
            with suppress(OSError), lock.open("r+b") as file:
                if not lock_file(file, shared=False):
                    names.append(lock.stem[1:])
        return names

    def remove(self, name: str) -> bool:
        """Remove an unused folder. Returns whether it is gone. Raises ServeError (UNAVAILABLE) if the place is not
        writable."""
        hidden = [self._hidden(name, suffix) for suffix in (_LOCK, _NEW)]
        if not any(map(os.path.lexists, (self.place / name, *hidden))):
            return True
        try:
            lock = try_lock(hidden[0])
            if lock is None:
                return False
            try:
                # Open for writing, because NFS allows no exclusive lock on a file opened for reading.
                with suppress(FileNotFoundError), (self.place / name / _DIGESTS).open("r+b") as file:
                    if not lock_file(file, shared=False):
                        return False
                self._discard(name)
            finally:
                lock.release()
        except OSError as error:
            raise unavailable(f"compiled programs cannot be removed: {error}") from None
        return True

    def prune(self, limit_bytes: int) -> Sequence[FolderEntry]:
        """Remove remains of killed processes, then the least recently used folders until the others fit the limit.
        Returns the removed folders. Raises ServeError (UNAVAILABLE) at the end if a removal failed."""
        failures: list[ServeError] = []

        def try_to_remove(name: str) -> bool:
            try:
                return self.remove(name)
            except ServeError as error:
                # The fault may concern only this folder, for example if another user has created it.
                failures.append(error)
                return False

        for hidden in self._listed():
            name = hidden.stem[1:]
            if hidden.suffix in (_LOCK, _NEW) and not os.path.lexists(self.place / name):
                try_to_remove(name)
        entries = self.entries()
        total = sum(entry.size_bytes for entry in entries)
        removed: list[FolderEntry] = []
        for entry in entries:
            if total <= limit_bytes:
                break
            if try_to_remove(entry.path.name):
                total -= entry.size_bytes
                removed.append(entry)
        if failures:
            raise failures[0]
        return removed

    def _listed(self) -> Sequence[Path]:
        """Return the entries of the place; empty if it cannot be read."""
        try:
            return list(self.place.iterdir())
        except OSError:
            return []

    def _hidden(self, name: str, suffix: str) -> Path:
        return self.place / f".{name}{suffix}"

    def _open(self, name: str) -> CachedFolder | None:
        """Open a folder with a shared lock, and mark it as used; None if missing or locked. Raises _DamagedError."""
        folder = self.place / name
        try:
            with ExitStack() as stack:
                file = stack.enter_context((folder / _DIGESTS).open("rb"))
                # An exclusive lock belongs to a process that will remove the folder.
                if not lock_file(file, shared=True) or not still_names(folder / _DIGESTS, file):
                    return None
                states = [one.stat() for one in folder.rglob("*")]
                if not all(_is_trusted(one.st_uid) and not one.st_mode & _WRITABLE_BY_OTHERS for one in states):
                    raise _DamagedError("others may write to it")
                if file.read() != folder_listing(folder):
                    raise _DamagedError("its files differ from the stored ones")
                if not self._is_known(folder):
                    raise _DamagedError("another version of rocserve has written it")
                with suppress(OSError):  # The place may be read-only.
                    os.utime(folder)
                stack.pop_all()
                return CachedFolder(folder, file)
        except (OSError, ServeError) as error:
            # Path.exists would raise if the place cannot be read.
            if os.path.lexists(folder):
                raise _DamagedError(f"it cannot be read: {error}") from None
            return None

    def _make(self, name: str, make: Callable[[Path], None]) -> CachedFolder:
        """Fill a new folder. The caller has locked the name."""
        self._discard(name)
        new = self._hidden(name, _NEW)
        new.mkdir(mode=0o700)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, new, ignore_errors=True)
            make(new)
            (new / _DIGESTS).write_bytes(folder_listing(new))
            for made in new.rglob("*"):
                made.chmod(0o700 if made.is_dir() else 0o600)
            file = stack.enter_context((new / _DIGESTS).open("rb"))
            lock_file(file, shared=True)
            new.rename(self.place / name)
            stack.pop_all()
        return CachedFolder(self.place / name, file)

    def _discard(self, name: str) -> None:
        """Remove a folder and the remains of a killed process. The caller has locked the name."""
        hidden = self._hidden(name, _NEW)
        shutil.rmtree(hidden, ignore_errors=True)
        with suppress(FileNotFoundError):
            (self.place / name).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def folder_entries(folders: Sequence[Path]) -> Sequence[FolderEntry]:
    """Return the folders that exist, least recently used first."""
    entries = []
    for folder in folders:
        with suppress(OSError):
            if not folder.is_dir():
                continue
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            entries.append(FolderEntry(folder, size, folder.stat().st_mtime))
    return sorted(entries, key=lambda entry: entry.used_at)
