"""Keeps compiled programs and the results of load trials in the cache.

programs/<key>/program.mxr, about.json, .sha256     load-trials/<key>     miopen/     problems/<environment>.json

A load trial is the first load and run of a user's own .mxr file. Its result is kept so that a file that crashes
MIGraphX is tried once. The trial's key covers the file's bytes and the environment: a changed file, another MIGraphX or
another GPU is tried again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.backends.migraphx.binding import ProgramTensor
from rocserve.backends.migraphx.compiling.problem_cache import ProblemCache
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, ProgramRecipe
from rocserve.cache.entries import entry_files, read_entry, write_entry
from rocserve.cache.folders import (
    ANOTHER_PLACE,
    CachedFolder,
    FolderCache,
    FolderEntry,
    UnusablePlaceError,
    cache_directory,
    check_private,
    is_private,
    make_private,
    temporary_cache_directory,
)
from rocserve.cache.temporary_folder import TemporaryFolder, remove_left
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.plain import from_json, to_json
from rocserve.settings import EngineSettings

_MOST_TRIALS = 1000
"""Load trials kept in each folder; the oldest are removed first."""


@dataclass(frozen=True, slots=True)
class LoadTrial:
    model: str
    file: str
    migraphx_version: str
    crash: str = ""
    """How the program crashed the process, the reason not to try it again; "" = it was loaded and run."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""


def load_trial_key(digest: str, environment: ProgramEnvironment, target: str) -> str:
    """Return the trial's key: 64 hexadecimal digits, from the file's digest, the environment and the target."""
    text = json.dumps([digest, target, json.loads(to_json(environment))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LoadTrials:
    """Keeps the load trials of a folder, each in a file. `spare` takes new trials if the folder cannot be written."""

    directory: Path
    spare: Path | None = None

    def find(self, key: str) -> LoadTrial | None:
        return next(filter(None, (read_entry(folder, key, LoadTrial) for folder in self._folders)), None)

    def remember(self, key: str, trial: LoadTrial) -> None:
        """Store a trial. If the folder cannot be written, the trial is lost silently."""
        with suppress(OSError):
            write_entry(self._folders[-1], key, trial, _MOST_TRIALS)

    def entries(self) -> Sequence[tuple[str, LoadTrial]]:
        """Return keys and load trials, oldest first."""
        folders = reversed(self._folders)
        found = {path.name: read_entry(one, path.name, LoadTrial) for one in folders for path in entry_files(one)}
        trials = [(key, trial) for key, trial in found.items() if trial is not None]
        return sorted(trials, key=lambda entry: entry[1].time)

    def forget(self, key: str) -> None:
        """Remove a trial. Raises OSError if its file cannot be removed."""
        for folder in self._folders:
            (folder / key).unlink(missing_ok=True)

    @property
    def _folders(self) -> Sequence[Path]:
        return (self.directory,) if self.spare is None else (self.directory, self.spare)


PROGRAM_FILENAME = "program.mxr"
ABOUT_FILENAME = "about.json"
_PROGRAMS, _LOAD_TRIALS, _TUNING, _PROBLEMS = "programs", "load-trials", "miopen", "problems"
_LEAST_FREE_BYTES = 64 << 20
"""With less free space on its file system, a folder takes no compiled program."""


@dataclass(frozen=True, slots=True)
class ProgramAbout:
    model: str
    """The model for which the program was compiled. Other models with the same file and options use it, too."""
    source_file: str
    """Name of the model's file, without its folder."""
    recipe: ProgramRecipe
    compile_seconds: float = 0.0
    """Time to quantise (with reading the calibration data) and to compile."""
    inputs: tuple[ProgramTensor, ...] = ()
    """Sorted by name. Inputs of the model on which no output depends are missing."""
    outputs: tuple[ProgramTensor, ...] = ()
    scratch_bytes: int | None = None
    """Working memory of the program, in addition to weights, inputs and outputs; None = unknown."""
    messages: tuple[str, ...] = ()
    """MIGraphX's output during the compile, cut if it is long."""


@dataclass(frozen=True, slots=True)
class CachedProgram:
    """A loadable program. It stays in the cache until `release`, or as long as the object lives in any process."""

    key: str
    path: Path
    about: ProgramAbout
    size_bytes: int
    _folder: CachedFolder = field(repr=False, compare=False)

    def release(self) -> None:
        self._folder.release()


@dataclass(frozen=True, slots=True)
class CacheEntry(FolderEntry):
    """A program as `rocserve cache list` shows it."""

    about: ProgramAbout | None
    """None = unreadable: another version of rocserve wrote it, or it is damaged."""

    @property
    def key(self) -> str:
        return self.path.name


def open_cache(settings: EngineSettings, warn: Callable[[str], None] = lambda text: None) -> ProgramCache:
    """Open the cache that the settings name. `warn` takes a sentence about each fault. Raises ServeError (UNAVAILABLE)
    if other users may write to its folder."""
    return ProgramCache(cache_directory(settings), settings.cache_bytes, warn=warn)


class ProgramCache:
    """Finds, builds and removes compiled programs by their recipes' keys. If its folder cannot be written or its disk
    is full, its programs are still used, and new programs go to a spare folder among the temporary files, so that
    models are served all the same."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        spare_directory: Path | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`limit_bytes`: bound for the programs of each folder; the least recently used are removed first.
        `spare_directory`: None = this user's folder among the temporary files. Raises ServeError (UNAVAILABLE) if other
        users may write to the folder."""
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._warn = warn
        self._spare_directory = spare_directory or temporary_cache_directory()
        self._write_error = _prepare(directory)
        """Why the folder cannot be written; "" = it can."""
        if self._write_error:
            warn(
                f"cannot write compiled programs to {directory} ({self._write_error}): existing ones are used, new ones"
                f" go to {self._spare}; name another folder with --cache-directory"
            )

    def find(self, key: str) -> CachedProgram | None:
        """Return the program, mark it as used now, and keep it in the cache as long as the result lives."""
        for programs in self._program_folders():
            if (found := programs.find(key)) is not None:
                with suppress(OSError):  # Another process may have removed the program since.
                    return _program(found)
        return None

    def holds(self, key: str) -> bool:
        """Return whether the program is there now; another process may remove it."""
        if (found := self.find(key)) is not None:
            found.release()
        return found is not None

    def find_or_build(
        self, key: str, build: Callable[[Path], ProgramAbout], waiting: Callable[[], None]
    ) -> CachedProgram:
        """Return the program; if it is missing or damaged, `build` writes it to a path and describes it, in one process
        at a time. The other processes call `waiting` repeatedly. Errors of both functions are passed on. Raises
        ServeError (UNAVAILABLE) if no folder can store the program."""

        def make(folder: Path) -> None:
            try:
                about = build(folder / PROGRAM_FILENAME)
            except ServeError:
                # MIGraphX does not notice a full disk: the saved program fails only when it is loaded.
                _check_room(folder)
                raise
            (folder / ABOUT_FILENAME).write_bytes(to_json(about))

        if (found := self.find(key)) is not None:
            return found
        problems: list[str] = []
        for directory in self._writable_folders():
            problem = _prepare(directory)
            free = shutil.disk_usage(directory).free if not problem else 0
            if not problem and free < _LEAST_FREE_BYTES:
                least = _LEAST_FREE_BYTES >> 20
                problem = f"the disk has {free >> 20} MiB free, and a program may take {least} MiB"
            if not problem:
                try:
                    made = _program(self._programs(directory).find_or_make(key, make, waiting))
                except UnusablePlaceError as error:
                    problem = error.reason
                else:
                    # The warnings wait for a success because `build` may give up and be called again many times.
                    for problem in problems:
                        self._warn(f"cannot compile into {problem}; {ANOTHER_PLACE}")
                    return made
            problems.append(f"{directory}: {problem}")
        raise unavailable(f"no folder takes compiled programs ({'; '.join(problems)}); {ANOTHER_PLACE}")

    def entries(self) -> Sequence[CacheEntry]:
        """Return all programs of the cache and the spare folder, least recently used first."""
        found = [entry for programs in self._program_folders() for entry in programs.entries()]
        return [
            CacheEntry(entry.path, entry.size_bytes, entry.used_at, _read_about(entry.path))
            for entry in sorted(found, key=lambda entry: entry.used_at)
        ]

    def compiling(self) -> Sequence[str]:
        """Return the keys of the programs that a process is compiling, or removing, at this moment."""
        return [key for programs in self._program_folders() for key in programs.being_made()]

    def remove(self, key: str) -> bool:
        """Remove a program. Returns whether it is gone: a program that a process builds or is about to load stays.
        Raises ServeError (UNAVAILABLE) if the folder cannot be written."""
        gone = [programs.remove(key) for programs in self._program_folders()]
        return all(gone)

    def prune(self, limit_bytes: int) -> Sequence[CacheEntry]:
        """Remove the leftovers of killed processes, and in each folder the least recently used programs until the rest
        takes at most `limit_bytes`. Returns the removed programs. Raises ServeError (UNAVAILABLE) if a program could
        not be removed, after removing the others."""
        entries = self.entries()
        removed: set[Path] = set()
        failures: list[ServeError] = []
        for programs in self._program_folders():
            try:
                removed.update(entry.path for entry in programs.prune(limit_bytes))
            except ServeError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return [entry for entry in entries if entry.path in removed]

    @property
    def load_trials(self) -> LoadTrials:
        return LoadTrials(self.directory / _LOAD_TRIALS, self._spare / _LOAD_TRIALS if self._write_error else None)

    @property
    def tuning_folder(self) -> Path:
        """MIOpen's folder for the tuning results of this machine's GPUs."""
        return (self._spare if self._write_error else self.directory) / _TUNING

    def problems(self, environment: ProgramEnvironment, exhaustive: bool) -> ProblemCache:
        """Return what MIGraphX has measured in this environment. `exhaustive`: the other way of tuning would take its
        solutions for its own."""
        text = json.dumps([json.loads(to_json(environment.measuring)), exhaustive], sort_keys=True)
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        folder = self._spare if self._write_error else self.directory
        return ProblemCache(folder / _PROBLEMS / name, self._warn)

    @functools.cached_property
    def _spare(self) -> Path:
        with suppress(ServeError):
            if not _prepare(self._spare_directory):
                return self._spare_directory
        # Another user made the spare folder first: use a folder of this process alone, which ends with the process.
        prefix = "rocserve-spare-"
        remove_left(prefix)
        own = TemporaryFolder(prefix)
        weakref.finalize(self, own.remove)
        _prepare(own.path)
        return own.path

    def _writable_folders(self) -> Iterator[Path]:
        """Yield the folders for new programs, preferred first. The spare folder is created only when it is reached."""
        if not self._write_error:
            yield self.directory
        yield self._spare

    def _program_folders(self) -> Sequence[FolderCache]:
        """Return the folders that may hold programs."""
        directories = [self.directory]
        if "_spare" in self.__dict__:
            directories.append(self._spare)
        elif is_private(self._spare_directory):
            # Other processes may have left programs there; reading creates and writes nothing.
            directories.append(self._spare_directory)
        # The spare folder may be the cache's own folder.
        return [self._programs(directory) for directory in dict.fromkeys(directories)]

    def _programs(self, directory: Path) -> FolderCache:
        return FolderCache(
            directory / _PROGRAMS, self.limit_bytes, self._warn, lambda folder: _read_about(folder) is not None
        )


def _prepare(directory: Path) -> str:
    """Create the missing folders. Returns why nothing can be written there; "" = it can. Raises ServeError
    (UNAVAILABLE) if other users may write to the folder."""
    try:
        make_private(directory)
        for name in (_PROGRAMS, _LOAD_TRIALS, _TUNING, _PROBLEMS):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
        _check_room(directory / _PROGRAMS)
        return ""
    except OSError as error:
        problem = error.strerror or str(error)
    with suppress(OSError):  # A missing folder holds nothing that could be used.
        check_private(directory)
    return problem


def _check_room(folder: Path) -> None:
    """Raises OSError if the folder takes no files, or only empty ones."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        # A smaller file may be stored even on a full file system, next to its name.
        file.write(bytes(4096))


def _program(folder: CachedFolder) -> CachedProgram:
    """Raises OSError if the program has been removed."""
    about = from_json(ProgramAbout, (folder.path / ABOUT_FILENAME).read_bytes())
    path = folder.path / PROGRAM_FILENAME
    return CachedProgram(folder.path.name, path, about, path.stat().st_size, folder)


def _read_about(folder: Path) -> ProgramAbout | None:
    return read_entry(folder, ABOUT_FILENAME, ProgramAbout)
