"""A cache of folders that engines have filled, each under a name of all that its files depend on.

    <name>/          the files; .sha256 has their digests, as sha256sum writes them
    .<name>.new/     a folder that is being filled
    .<name>.lock     held by the process that fills or removes the folder

Many processes use one at once. A folder comes into being by its renaming: it is there whole or not at all. Its
.sha256 is locked by each process that uses it, which keeps it from being removed. When it was used last is the time of
the folder itself: a file system that is mounted noatime keeps that. As
the programs in them are run, only their owner, who runs the server, may write there.

A lock is flock(2)'s: it ends with its holder however that ends, and does not pass to programs that the holder starts.
Its file is removed on release, so that a folder of locks does not fill up.
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

_SECONDS_BETWEEN_ATTEMPTS = 0.1

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What flock says on file systems that have none."""


@dataclass(frozen=True, slots=True)
class FileLock:
    """A lock that is held, until `release` or the end of the process."""

    _path: Path
    _file: BinaryIO

    def release(self) -> None:
        """Once only: afterwards the name is that of the next holder's lock."""
        if self._file.closed:
            return
        # The name goes first: a process that had opened the file before sees that it is no longer there.
        with self._file:
            self._path.unlink(missing_ok=True)


def try_lock(path: Path) -> FileLock | None:
    """The lock, or None where another has it. Its folder must exist. Raises: OSError: the file cannot be written."""
    while True:
        # Open for writing: NFS has no exclusive lock on a file that is open for reading.
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        if not hold(file, shared=False):
            file.close()
            return None
        if leads_to(path, file):
            return FileLock(path, file)
        file.close()


def hold(file: BinaryIO, *, shared: bool) -> bool:
    """Lock an open file until it is closed; False where another's lock is in the way. True on file systems without
    locks, where nothing better can be had."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    return True


def leads_to(path: Path, file: BinaryIO) -> bool:
    """Whether the name still is that of the open file."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(file.fileno()))


def cache_directory(settings: EngineSettings) -> Path:
    """The setting, else `rocserve` in $XDG_CACHE_HOME or ~/.cache; without a home among the temporary files."""
    if settings.cache_directory:
        return _expanded(settings.cache_directory).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "rocserve"
    home = _expanded("~")
    return home / ".cache/rocserve" if home.is_absolute() else usual_spare_directory()


def usual_spare_directory() -> Path:
    """This user's folder among the temporary files."""
    return Path(tempfile.gettempdir()) / f"rocserve-cache-{os.geteuid()}"


def _expanded(path: str) -> Path:
    # Path.expanduser fails for users that the machine does not know, as in containers; this leaves the "~".
    return Path(os.path.expanduser(path))  # noqa: PTH111


_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Make the folder, with those above it, for this user alone (mode 0700), or check the one that is there. Raises:
    ServeError: UNAVAILABLE, others could have put files into it. OSError: it is not there and cannot be made."""
    make_folder(folder, 0o700)
    check_private(folder)


def make_folder(folder: Path, mode: int) -> None:
    """Make the folder, with those above it, where they are not there, with this mode whatever the umask. Raises:
    OSError."""
    # One by one: `parents=True` would make those above as the process's umask has it.
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
        missing.chmod(mode)


def check_private(folder: Path) -> None:
    """Raises: ServeError: UNAVAILABLE, others could have put files into it. OSError: it is not there."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise unavailable(f"cache directory {folder} is not used: it is no folder; name another with --cache-directory")
    if not _is_trusted(found.st_uid):
        reason = f"it belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this"
        raise _refusal(folder, reason, "name another")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        reason = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise _refusal(folder, reason, f"run chmod go-w {folder}, or name a folder in it")


def is_private(folder: Path) -> bool:
    """Whether it is there, and nobody else could have put files into it."""
    try:
        check_private(folder)
    except (OSError, ServeError):
        return False
    return True


def _is_trusted(user: int) -> bool:
    # What root has written, such as a part of a container's image, is as good as our own program.
    return user in (0, os.geteuid())


def _refusal(folder: Path, reason: str, remedy: str) -> ServeError:
    return unavailable(
        f"cache directory {folder} is not used: {reason}, and the compiled programs in it are run as they are;"
        f" {remedy} with --cache-directory, which is then made with mode 0700"
    )


_DIGESTS = ".sha256"
_LOCK, _NEW = ".lock", ".new"
ANOTHER_PLACE = "make room, or name another folder with --cache-directory"


@dataclass(frozen=True, slots=True)
class CachedFolder:
    """A folder that is not removed as long as this object lives in any process, or until `release`."""

    path: Path
    _digests: BinaryIO = field(repr=False, compare=False)
    """Open, with a shared lock."""

    def release(self) -> None:
        self._digests.close()


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A folder as a listing shows it; it may be gone by then."""

    path: Path
    size_bytes: int
    used_at: float
    """When it was last found or made, in seconds since 1970."""


class UnusablePlaceError(ServeError):
    """A place that folders cannot be made in, such as one on a full disk."""

    def __init__(self, place: Path, error: OSError) -> None:
        self.reason = error.strerror or str(error)
        super().__init__(
            StatusCode.UNAVAILABLE,
            f"the cache of compiled programs {place} cannot be used: {self.reason}; {ANOTHER_PLACE}",
        )


class _DamagedError(Exception):
    """A folder's files are not those that were made."""


@dataclass(frozen=True, slots=True)
class FolderCache:
    """Folders by their names, in one place."""

    place: Path
    _limit_bytes: int
    """Of folders that take more those used least lately go."""
    _warn: Callable[[str], None]
    """Takes each fault."""
    _is_known: Callable[[Path], bool] = lambda folder: True
    """Whether this version of rocserve can use a folder's files; those of others count as damaged."""

    def find(self, name: str) -> CachedFolder | None:
        """The folder, which counts as used now; None where there is none, or a damaged one."""
        try:
            return self._open(name)
        except _DamagedError as error:
            self._warn(f"{self.place / name} is damaged, and not used: {error}")
        return None

    def find_or_make(self, name: str, make: Callable[[Path], None], waiting: Callable[[], None]) -> CachedFolder:
        """The folder; where it is not there or damaged, `make` fills an empty one, in one process at a time; and those
        used least lately go where the cache has become too large. Other processes call `waiting` again and again. What
        either raises is passed on, but an OSError, which is taken for the place's. Raises: UnusablePlaceError."""
        if (found := self.find(name)) is not None:
            return found
        try:
            make_private(self.place)
            while (lock := try_lock(self._hidden(name, _LOCK))) is None:
                waiting()
                # Not a blocking flock, which no signal handler of Python's would end.
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
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
        """All of them, those used least lately first."""
        return folder_entries([entry for entry in self._listed() if not entry.name.startswith(".")])

    def being_made(self) -> Sequence[str]:
        """The names that a process has locked."""
        names = []
        for lock in self._listed():
            if lock.suffix != _LOCK:
                continue
            with suppress(OSError), lock.open("r+b") as file:
                if not hold(file, shared=False):
                    names.append(lock.stem[1:])
        return names

    def remove(self, name: str) -> bool:
        """Whether it is gone now: one that a process makes or uses stays. Raises: ServeError: UNAVAILABLE, the place
        cannot be written."""
        hidden = [self._hidden(name, suffix) for suffix in (_LOCK, _NEW)]
        if not any(map(os.path.lexists, (self.place / name, *hidden))):
            return True
        try:
            lock = try_lock(hidden[0])
            if lock is None:
                return False
            try:
                # Open for writing: NFS has no exclusive lock on what is open for reading.
                with suppress(FileNotFoundError), (self.place / name / _DIGESTS).open("r+b") as file:
                    if not hold(file, shared=False):
                        return False
                self._discard(name)
            finally:
                lock.release()
        except OSError as error:
            raise unavailable(f"compiled programs cannot be removed: {error}") from None
        return True

    def prune(self, limit_bytes: int) -> Sequence[FolderEntry]:
        """Remove folders, those used least lately first, until the rest takes no more; also the remains of killed
        processes. Returns those that were removed. Raises: ServeError: UNAVAILABLE, one could not be removed; the
        others were."""
        failures: list[ServeError] = []

        def try_to_remove(name: str) -> bool:
            try:
                return self.remove(name)
            except ServeError as error:
                # It may be this folder's fault alone, such as one that somebody else has made.
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
        """All that is in the place; nothing where that cannot be looked into."""
        try:
            return list(self.place.iterdir())
        except OSError:
            return []

    def _hidden(self, name: str, suffix: str) -> Path:
        return self.place / f".{name}{suffix}"

    def _open(self, name: str) -> CachedFolder | None:
        """The folder, held and marked as used now. Raises: _DamagedError."""
        folder = self.place / name
        try:
            with ExitStack() as stack:
                file = stack.enter_context((folder / _DIGESTS).open("rb"))
                # A process that has it locked for itself alone is about to remove it.
                if not hold(file, shared=True) or not leads_to(folder / _DIGESTS, file):
                    return None
                states = [each.stat() for each in folder.rglob("*")]
                if not all(_is_trusted(one.st_uid) and not one.st_mode & _WRITABLE_BY_OTHERS for one in states):
                    raise _DamagedError("others may write to it")
                if file.read() != folder_listing(folder):
                    raise _DamagedError("its files are not those that were stored")
                if not self._is_known(folder):
                    raise _DamagedError("another version of rocserve has written it")
                with suppress(OSError):  # A cache that is only read has no order.
                    os.utime(folder)
                stack.pop_all()
                return CachedFolder(folder, file)
        except (OSError, ServeError) as error:
            # Not Path.exists: it fails where the place itself cannot be looked into.
            if os.path.lexists(folder):
                raise _DamagedError(f"it cannot be read: {error}") from None
            return None

    def _make(self, name: str, make: Callable[[Path], None]) -> CachedFolder:
        """With the name locked."""
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
            hold(file, shared=True)
            new.rename(self.place / name)
            stack.pop_all()
        return CachedFolder(self.place / name, file)

    def _discard(self, name: str) -> None:
        """Remove the folder, and what a killed process left of it. With the name locked."""
        hidden = self._hidden(name, _NEW)
        shutil.rmtree(hidden, ignore_errors=True)
        with suppress(FileNotFoundError):
            (self.place / name).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def folder_entries(folders: Sequence[Path]) -> Sequence[FolderEntry]:
    """Those that are still there, those used least lately first."""
    entries = []
    for folder in folders:
        with suppress(OSError):
            if not folder.is_dir():
                continue
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            entries.append(FolderEntry(folder, size, folder.stat().st_mtime))
    return sorted(entries, key=lambda entry: entry.used_at)
