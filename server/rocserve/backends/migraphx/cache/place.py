"""One folder of compiled programs: finding, storing, locking and evicting in it. Errors of the file system are raised.

    programs/<key>/program.mxr, about.json     locks/<key>     scratch/<name>/     load-trials/<key>     miopen/

An entry comes into being by the renaming of a finished folder and goes by another: it is there whole or not at all.
When it was used last is the time of about.json, which each use sets: a file system that is mounted noatime keeps that.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from rocserve.backends.migraphx.cache.entry import (
    ABOUT_FILENAME,
    PROGRAM_FILENAME,
    CachedProgram,
    CacheEntry,
    ProgramAbout,
    StoredAbout,
)
from rocserve.cache.locks import hold, is_locked, leads_to, try_lock, wait_for_lock
from rocserve.cache.private_folder import is_private_file, make_private
from rocserve.core.plain import from_json, to_json

_SECONDS_UNTIL_EVICTED = 0.01

_SCRATCH = "scratch-"
"""What the locks of scratch folders are called, before the folder's name."""

_GONE = ".gone-"
"""What the folders of removed entries are called until they are emptied."""


class DamagedError(Exception):
    """An entry is not what was stored."""


@dataclass(frozen=True, slots=True)
class CachePlace:
    directory: Path

    def prepare(self) -> None:
        """Make what is missing of the folders.

        Raises:
            ServeError: UNAVAILABLE, others may write here.
            OSError: the folders are not there and cannot be made.
        """
        make_private(self.directory)
        for folder in (self._programs, self._locks, self._scratches, self.load_trials, self.tuning):
            folder.mkdir(mode=0o700, exist_ok=True)

    @property
    def load_trials(self) -> Path:
        return self.directory / "load-trials"

    @property
    def tuning(self) -> Path:
        return self.directory / "miopen"

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.directory).free

    def find(self, key: str) -> CachedProgram | None:
        """The program, held and marked as used now.

        Raises:
            DamagedError: it is there, but not as it was stored.
        """
        path = self._entry(key) / PROGRAM_FILENAME
        try:
            file = path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        with ExitStack() as stack:
            stack.enter_context(file)
            # Who has it locked for himself alone is about to remove it.
            if not hold(file, shared=True) or not leads_to(path, file):
                return None
            stored = self._verified(key, file)
            self._touch(key)
            stack.pop_all()
        return CachedProgram(key, path, stored.about, stored.size, file)

    def store(self, key: str, program_file: Path, about: ProgramAbout) -> CachedProgram:
        """Take the file in; where an equal program has been stored meanwhile, that one stays.

        Args:
            program_file: one from `scratch` is not to be changed any more; any other is copied.
        """
        with self.scratch() as folder, ExitStack() as stack:
            new = folder / key
            new.mkdir(mode=0o700)
            program = new / PROGRAM_FILENAME
            self._take(program_file, program)
            file = stack.enter_context(program.open("rb"))
            hold(file, shared=True)  # from here on nobody evicts it
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            stored = StoredAbout(about, os.fstat(file.fileno()).st_size, digest)
            _write_and_sync(new / ABOUT_FILENAME, to_json(stored))
            _sync_folder(new)
            while not self._rename_into_place(new, key):
                if (equal := self._find_sound(key)) is not None:
                    return equal
                time.sleep(_SECONDS_UNTIL_EVICTED)
            _sync_folder(self._programs)
            stack.pop_all()
        return CachedProgram(key, self._entry(key) / PROGRAM_FILENAME, about, stored.size, file)

    def entries(self) -> Sequence[CacheEntry]:
        """All of them, those used least lately first."""
        try:
            folders = [folder for folder in self._programs.iterdir() if not folder.name.startswith(".")]
        except OSError:
            return []
        found = [entry for folder in folders if (entry := _read_entry(folder)) is not None]
        return sorted(found, key=lambda entry: entry.used_at)

    def remove(self, key: str) -> bool:
        """Whether it is gone now; what a process holds stays."""
        path = self._entry(key) / PROGRAM_FILENAME
        try:
            # Open for writing: NFS has no exclusive lock on what is open for reading.
            with path.open("r+b") as file:
                if not hold(file, shared=False):
                    return False
                if leads_to(path, file):
                    self.throw_away(key)
        except FileNotFoundError:
            self.throw_away(key)
        return True

    def throw_away(self, key: str) -> None:
        """Remove an entry whoever holds it."""
        # On a full disk a name in the same folder can still be had, a folder elsewhere not.
        gone = self._programs / f"{_GONE}{secrets.token_hex(8)}"
        try:
            self._entry(key).rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def prune(self, limit_bytes: int, keep: str = "") -> Sequence[CacheEntry]:
        """Remove what was used least lately until the rest takes no more than the limit; what was removed.

        `keep` and what processes hold stay, whatever the sum is then.
        """
        self._remove_remains()
        entries = self.entries()
        total = sum(entry.size_bytes for entry in entries)
        removed: list[CacheEntry] = []
        for entry in entries:
            if total <= limit_bytes:
                break
            if entry.key != keep and self.remove(entry.key):
                total -= entry.size_bytes
                removed.append(entry)
        return removed

    def compiling(self) -> Sequence[str]:
        """The keys that a process has locked."""
        try:
            locks = [path for path in self._locks.iterdir() if not path.name.startswith(_SCRATCH)]
        except OSError:
            return []
        return [path.name for path in locks if is_locked(path)]

    @contextmanager
    def lock(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        self.prepare()
        lock = wait_for_lock(self._locks / key, waiting)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder that is removed in the end, or, where the process does not come to that, by the next `prune`."""
        self.prepare()
        while True:
            name = secrets.token_hex(8)
            lock = try_lock(self._scratch_lock(name))
            if lock is not None:
                break
        folder = self._scratches / name
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()

    @property
    def _programs(self) -> Path:
        return self.directory / "programs"

    @property
    def _locks(self) -> Path:
        return self.directory / "locks"

    @property
    def _scratches(self) -> Path:
        return self.directory / "scratch"

    def _entry(self, key: str) -> Path:
        return self._programs / key

    def _scratch_lock(self, name: str) -> Path:
        return self._locks / f"{_SCRATCH}{name}"

    def _verified(self, key: str, file: BufferedReader) -> StoredAbout:
        """What is told about the open program, which is as it was when that was written."""
        about_file = self._entry(key) / ABOUT_FILENAME
        found = os.fstat(file.fileno())
        if not is_private_file(found):
            raise DamagedError("others may write to it")
        try:
            stored = from_json(StoredAbout, about_file.read_bytes())
        except (OSError, ValueError) as error:
            raise DamagedError(f"what is told about it cannot be read ({error})") from None
        if found.st_size != stored.size:
            raise DamagedError(f"it has {found.st_size} bytes, {stored.size} were stored")
        if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
            raise DamagedError("its bytes are not those that were stored")
        return stored

    def _find_sound(self, key: str) -> CachedProgram | None:
        """As `find`; a damaged entry is removed."""
        try:
            return self.find(key)
        except DamagedError:
            self.throw_away(key)
            return None

    def _take(self, source: Path, target: Path) -> None:
        try:
            if not source.is_relative_to(self._scratches):
                raise OSError
            target.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, target)
        target.chmod(0o600)

    def _rename_into_place(self, new: Path, key: str) -> bool:
        """False where there is an entry already."""
        try:
            new.rename(self._entry(key))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def _touch(self, key: str) -> None:
        try:
            os.utime(self._entry(key) / ABOUT_FILENAME)
        except OSError:
            pass  # a cache that is only read knows no order

    def _remove_remains(self) -> None:
        """Of processes that were killed: what they were compiling or removing."""
        for gone in self._programs.glob(f"{_GONE}*"):
            shutil.rmtree(gone, ignore_errors=True)
        try:
            names = [folder.name for folder in self._scratches.iterdir()]
            names += [file.name.removeprefix(_SCRATCH) for file in self._locks.glob(f"{_SCRATCH}*")]
        except OSError:
            return
        for name in sorted(set(names)):
            lock = try_lock(self._scratch_lock(name))
            if lock is not None:
                shutil.rmtree(self._scratches / name, ignore_errors=True)
                lock.release()


def _read_entry(folder: Path) -> CacheEntry | None:
    """None where it has just been removed."""
    try:
        sizes = [file.stat().st_size for file in folder.iterdir()]
    except OSError:
        return None
    about_file = folder / ABOUT_FILENAME
    about, used_at = None, 0.0
    try:
        used_at = about_file.stat().st_mtime
        about = from_json(StoredAbout, about_file.read_bytes()).about
    except (OSError, ValueError):
        pass
    return CacheEntry(folder.name, folder, about, sum(sizes), used_at)


def _write_and_sync(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
