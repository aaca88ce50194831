"""The cache of compiled programs. Many processes use one at once: instances of a model, models, servers.

    programs/<key>/program.mxr, about.json     locks/<key>     load-trials/<key>     miopen/

A program is built in a hidden folder beside the others and comes into being by its renaming: it is there whole or not
at all. Building and removing one take its lock; who loads one holds its file, which is then not removed. When it was
used last is the time of about.json, which each use sets: a file system that is mounted noatime keeps that.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from rocserve.backends.migraphx.binding.interface import ProgramTensor
from rocserve.backends.migraphx.load_trials import LoadTrials
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe
from rocserve.cache.locks import hold, is_locked, leads_to, try_lock, wait_for_lock
from rocserve.cache.private_folder import (
    cache_directory,
    check_private,
    is_private,
    is_private_file,
    make_private,
    usual_spare_directory,
)
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.plain import from_json, to_json
from rocserve.settings import EngineSettings

PROGRAM_FILENAME = "program.mxr"
ABOUT_FILENAME = "about.json"
_HIDDEN = "."
"""Begins the names of folders in which a program is built, or removed; its key follows."""
_LEAST_FREE_BYTES = 64 << 20
"""Below this nothing is compiled into a file system."""
_REMEDY = "make room, or name another folder with --cache-directory"


@dataclass(frozen=True, slots=True)
class ProgramAbout:
    """The description of a compiled program."""

    model: str
    """Whose load or tool compiled it; another model with the same file and options uses it too."""
    source_file: str
    """The name of the model's file, without its folder."""
    recipe: ProgramRecipe
    compile_seconds: float = 0.0
    inputs: tuple[ProgramTensor, ...] = ()
    outputs: tuple[ProgramTensor, ...] = ()
    scratch_bytes: int | None = None
    """The memory that it works in beside its weights, inputs and outputs; None where that is not known."""
    messages: tuple[str, ...] = ()
    """What MIGraphX wrote while it was compiled."""


@dataclass(frozen=True, slots=True)
class _StoredAbout:
    """about.json."""

    about: ProgramAbout
    size: int
    """Of the program in bytes."""
    sha256: str
    """Of the program, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class CachedProgram:
    """A program that can be loaded. It is not removed as long as this object lives in any process, or until
    `release`."""

    key: str
    path: Path
    about: ProgramAbout
    size_bytes: int = 0
    held: BinaryIO | None = field(default=None, repr=False, compare=False)
    """The open file, whose shared lock keeps it from being removed."""

    def release(self) -> None:
        if self.held is not None:
            self.held.close()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry as `rocserve cache list` shows it; it may be gone by then."""

    key: str
    folder: Path
    about: ProgramAbout | None
    """None where it cannot be read: another version of rocserve has written it, or it is damaged."""
    size_bytes: int
    used_at: float
    """When it was last found or built, in seconds since 1970."""


class _DamagedError(Exception):
    """An entry is not what was stored."""


def ignore_message(text: str) -> None:
    """Where nobody reads warnings."""


def open_cache(settings: EngineSettings, warn: Callable[[str], None] = ignore_message) -> ProgramCache:
    """The cache that the settings name. `warn` takes a sentence on each fault of it.

    Raises:
        ServeError: UNAVAILABLE, others than this user may write to its folder.
    """
    return ProgramCache(cache_directory(settings), settings.cache_bytes, warn=warn)


class ProgramCache:
    """Compiled programs by their recipes' keys.

    Where its folder cannot be written, or its disk is full, its programs are used all the same, and new ones go to
    a spare folder among the temporary files: a model is served whatever state the cache is in.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        spare_directory: Path | None = None,
        warn: Callable[[str], None] = ignore_message,
    ) -> None:
        """
        Args:
            limit_bytes: what the programs may take together; those used least lately go first.
            spare_directory: None = a folder of this user's among the temporary files.

        Raises:
            ServeError: UNAVAILABLE, others than this user may write to the folder.
        """
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._warn = warn
        self._place = _Place(directory)
        self._spare_directory = spare_directory or usual_spare_directory()
        self._problem = self._place.prepare()
        """Why nothing can be written; "" where it can."""
        if self._problem:
            warn(
                f"compiled programs cannot be kept in {directory} ({self._problem}): those that are there are used, new"
                f" ones go to {self._spare.directory}; name another folder with --cache-directory"
            )

    def find(self, key: str) -> CachedProgram | None:
        """The program, which counts as used now and stays for as long as the result lives."""
        for place in self._places():
            try:
                found = place.find(key)
            except _DamagedError as error:
                self._warn(f"compiled program {key[:12]} in {place.directory} is damaged, and not used: {error}")
                continue
            except OSError as error:
                self._warn(f"compiled program {key[:12]} in {place.directory} cannot be read: {_words(error)}")
                continue
            if found is not None:
                return found
        return None

    def find_or_build(
        self, key: str, build: Callable[[Path], ProgramAbout], waiting: Callable[[], None]
    ) -> CachedProgram:
        """The program; built where it is not there or damaged, by one process at a time. Others are then evicted where
        the cache has become too large.

        Args:
            build: writes the program to a path and describes it; exceptions are passed on.
            waiting: called again and again while another process builds it; an exception ends the wait.

        Raises:
            ServeError: UNAVAILABLE, it cannot be written anywhere.
        """
        found = self.find(key)
        if found is not None:
            return found
        place = self._place_to_build()
        try:
            with place.locked(key, waiting):
                with suppress(_DamagedError):
                    found = place.find(key)
                found = found or place.build(key, build)
        except OSError as error:
            raise unavailable(
                f"compiled program {key[:12]} cannot be kept in {place.directory}: {_words(error)}; {_REMEDY}"
            ) from None
        try:
            place.prune(self.limit_bytes)
        except OSError as error:
            self._warn(f"compiled programs in {place.directory} cannot be evicted: {_words(error)}")
        return found

    def entries(self) -> Sequence[CacheEntry]:
        """All of the cache and the spare folder, those used least lately first."""
        return sorted((entry for place in self._places() for entry in place.entries()), key=lambda entry: entry.used_at)

    def compiling(self) -> Sequence[str]:
        """The keys of the programs that any process compiles at this moment."""
        return [key for place in self._places() for key in place.building()]

    def remove(self, key: str) -> bool:
        """Whether it is gone now: what a process builds or is about to load stays.

        Raises:
            ServeError: UNAVAILABLE, the folder cannot be written.
        """
        try:
            gone = [place.remove(key) for place in self._places()]
        except OSError as error:
            raise _cannot_remove(error) from None
        return all(gone)

    def prune(self, limit_bytes: int) -> Sequence[CacheEntry]:
        """Remove programs, those used least lately first, until the rest takes no more; also what killed processes
        have left. What was removed.

        Raises:
            ServeError: UNAVAILABLE, the folder cannot be written.
        """
        try:
            return [entry for place in self._places() for entry in place.prune(limit_bytes)]
        except OSError as error:
            raise _cannot_remove(error) from None

    @property
    def load_trials(self) -> LoadTrials:
        """What trials of users' own programs came to."""
        return LoadTrials(self._place.load_trials, self._spare.load_trials if self._problem else None)

    @property
    def tuning_folder(self) -> Path:
        """Where MIOpen keeps its tuning for this machine's GPUs."""
        return (self._spare if self._problem else self._place).tuning

    @functools.cached_property
    def _spare(self) -> _Place:
        place = _Place(self._spare_directory)
        with suppress(ServeError):
            if not place.prepare():
                return place
        # Somebody else was there first: a folder of this process alone, which goes with it.
        self._own_spare = tempfile.TemporaryDirectory(prefix="rocserve-cache-")
        place = _Place(Path(self._own_spare.name))
        place.prepare()
        return place

    def _places(self) -> Sequence[_Place]:
        """Those that may hold programs."""
        places = [self._place]
        if "_spare" in self.__dict__:
            places.append(self._spare)
        elif is_private(self._spare_directory):
            # Other processes may have left programs there; reading makes and writes nothing.
            places.append(_Place(self._spare_directory))
        # The spare folder may be the cache's own.
        return list(dict.fromkeys(places))

    def _place_to_build(self) -> _Place:
        """Raises: ServeError: UNAVAILABLE, nothing can be written anywhere."""
        problems: list[str] = []
        for spare in (bool(self._problem), True):
            place = self._spare if spare else self._place
            problem = place.prepare() or place.lack_of_room()
            if not problem:
                return place
            problems.append(f"{place.directory}: {problem}")
            self._warn(f"nothing can be compiled into {problems[-1]}; {_REMEDY}")
        raise unavailable(f"there is no place to compile into ({'; '.join(problems)}); {_REMEDY}")


@dataclass(frozen=True, slots=True)
class _Place:
    """One folder of compiled programs. Errors of the file system are raised."""

    directory: Path

    @property
    def load_trials(self) -> Path:
        return self.directory / "load-trials"

    @property
    def tuning(self) -> Path:
        return self.directory / "miopen"

    @property
    def _programs(self) -> Path:
        return self.directory / "programs"

    @property
    def _locks(self) -> Path:
        return self.directory / "locks"

    def prepare(self) -> str:
        """Make what is missing of the folders. Why nothing can be written there; "" where it can.

        Raises:
            ServeError: UNAVAILABLE, others than this user may write there.
        """
        try:
            make_private(self.directory)
            for folder in (self._programs, self._locks, self.load_trials, self.tuning):
                folder.mkdir(mode=0o700, exist_ok=True)
            tempfile.TemporaryFile(dir=self._locks).close()
            return ""
        except OSError as error:
            problem = _words(error)
        with suppress(OSError):  # where it is not there, it holds nothing that could be used
            check_private(self.directory)
        return problem

    def lack_of_room(self) -> str:
        """ "" where there is enough."""
        free = shutil.disk_usage(self.directory).free
        if free >= _LEAST_FREE_BYTES:
            return ""
        return f"the disk has {free >> 20} MiB free, and a program may take {_LEAST_FREE_BYTES >> 20} MiB"

    def find(self, key: str) -> CachedProgram | None:
        """The program, held and marked as used now.

        Raises:
            _DamagedError: it is there, but not as it was stored.
        """
        path = self._programs / key / PROGRAM_FILENAME
        try:
            file = path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        with ExitStack() as stack:
            stack.enter_context(file)
            # Who has it locked for himself alone is about to remove it.
            if not hold(file, shared=True) or not leads_to(path, file):
                return None
            stored = _verified(path.with_name(ABOUT_FILENAME), file)
            with suppress(OSError):  # a cache that is only read knows no order
                os.utime(path.with_name(ABOUT_FILENAME))
            stack.pop_all()
        return CachedProgram(key, path, stored.about, stored.size, file)

    @contextmanager
    def locked(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        lock = wait_for_lock(self._locks / key, waiting)
        try:
            yield
        finally:
            lock.release()

    def build(self, key: str, build: Callable[[Path], ProgramAbout]) -> CachedProgram:
        """The program, built in place of the one that is there. With the key locked."""
        self._discard(key)
        folder = self._programs / f"{_HIDDEN}{key}"
        folder.mkdir(mode=0o700)
        try:
            program = folder / PROGRAM_FILENAME
            about = build(program)
            program.chmod(0o600)
            with program.open("rb") as file:
                os.fsync(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
            _write_and_sync(folder / ABOUT_FILENAME, to_json(_StoredAbout(about, size, digest)))
            _sync_folder(folder)
            folder.rename(self._programs / key)
            _sync_folder(self._programs)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found = self.find(key)
        if found is None:
            raise FileNotFoundError(None, "it has been removed meanwhile")
        return found

    def entries(self) -> Sequence[CacheEntry]:
        """All of them, those used least lately first."""
        try:
            folders = [folder for folder in self._programs.iterdir() if not folder.name.startswith(_HIDDEN)]
        except OSError:
            return []
        found = [entry for folder in folders if (entry := _read_entry(folder)) is not None]
        return sorted(found, key=lambda entry: entry.used_at)

    def building(self) -> Sequence[str]:
        """The keys that a process has locked."""
        try:
            locks = list(self._locks.iterdir())
        except OSError:
            return []
        return [path.name for path in locks if is_locked(path)]

    def remove(self, key: str) -> bool:
        """Whether it is gone now; what a process builds or holds stays."""
        try:
            lock = try_lock(self._locks / key)
        except FileNotFoundError:
            return True  # there is no such folder
        if lock is None:
            return False
        try:
            # Open for writing: NFS has no exclusive lock on what is open for reading.
            with suppress(FileNotFoundError), (self._programs / key / PROGRAM_FILENAME).open("r+b") as file:
                if not hold(file, shared=False):
                    return False
            self._discard(key)
        finally:
            lock.release()
        return True

    def prune(self, limit_bytes: int) -> Sequence[CacheEntry]:
        """Remove what was used least lately until the rest takes no more than the limit; what was removed. What
        processes hold stays, whatever the sum is then."""
        left = {folder.name.removeprefix(_HIDDEN) for folder in self._programs.glob(f"{_HIDDEN}*")}
        left |= {lock.name for lock in self._locks.glob("*") if not (self._programs / lock.name).exists()}
        for key in left:
            # Of a process that was killed, unless it has the lock.
            self.remove(key)
        entries = self.entries()
        total = sum(entry.size_bytes for entry in entries)
        removed: list[CacheEntry] = []
        for entry in entries:
            if total <= limit_bytes:
                break
            if self.remove(entry.key):
                total -= entry.size_bytes
                removed.append(entry)
        return removed

    def _discard(self, key: str) -> None:
        """Remove the program. With the key locked."""
        hidden = self._programs / f"{_HIDDEN}{key}"
        shutil.rmtree(hidden, ignore_errors=True)
        with suppress(FileNotFoundError):
            (self._programs / key).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _verified(about_file: Path, file: BufferedReader) -> _StoredAbout:
    """What was stored about the open program, which has not changed since."""
    found = os.fstat(file.fileno())
    if not is_private_file(found):
        raise _DamagedError("others may write to it")
    try:
        stored = from_json(_StoredAbout, about_file.read_bytes())
    except (OSError, ValueError) as error:
        raise _DamagedError(f"its description cannot be read ({error})") from None
    if found.st_size != stored.size:
        raise _DamagedError(f"it has {found.st_size} bytes, {stored.size} were stored")
    if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
        raise _DamagedError("its bytes are not those that were stored")
    return stored


def _read_entry(folder: Path) -> CacheEntry | None:
    """None where it has just been removed."""
    try:
        sizes = [file.stat().st_size for file in folder.iterdir()]
    except OSError:
        return None
    about, used_at = None, 0.0
    with suppress(OSError, ValueError):
        used_at = (folder / ABOUT_FILENAME).stat().st_mtime
        about = from_json(_StoredAbout, (folder / ABOUT_FILENAME).read_bytes()).about
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


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _cannot_remove(error: OSError) -> ServeError:
    return unavailable(f"compiled programs cannot be removed: {error}")
