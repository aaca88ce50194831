"""The cache of compiled programs, a folder each.

programs/<key>/program.mxr, about.json, .sha256     load-trials/<key>     miopen/

The trials of users' own .mxr files are remembered, so that a file that crashes MIGraphX is tried once. A trial is of a
file's bytes in an environment: a changed file, another MIGraphX or another GPU is tried anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.backends.migraphx.binding.interface import ProgramTensor
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, ProgramRecipe
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
    usual_spare_directory,
)
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.plain import from_json, to_json
from rocserve.settings import EngineSettings

_MOST_TRIALS = 1000
"""Kept in a folder; the oldest go."""


@dataclass(frozen=True, slots=True)
class LoadTrial:
    model: str
    file: str
    """The file's name."""
    migraphx_version: str
    crash: str = ""
    """How it ended the process, which is why it is not tried again; "" = it was loaded and run."""
    time: float = field(default_factory=time.time)
    """In seconds since 1970."""


def load_trial_key(digest: str, environment: ProgramEnvironment, target: str) -> str:
    """64 hexadecimal digits for a file's digest in an environment."""
    text = json.dumps([digest, target, json.loads(to_json(environment))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LoadTrials:
    """Those in a folder, a file each; `spare` takes new ones where that cannot be written."""

    directory: Path
    spare: Path | None = None

    def find(self, key: str) -> LoadTrial | None:
        return next(filter(None, (_read(folder / key) for folder in self._folders)), None)

    def remember(self, key: str, trial: LoadTrial) -> None:
        """Where a folder can be written."""
        folder = self._folders[-1]
        new = folder / f".{secrets.token_hex(8)}"
        with suppress(OSError):
            try:
                new.write_bytes(to_json(trial))
                new.replace(folder / key)
            finally:
                new.unlink(missing_ok=True)
            for path in sorted(_files(folder), key=lambda path: path.stat().st_mtime)[:-_MOST_TRIALS]:
                path.unlink(missing_ok=True)

    def entries(self) -> Sequence[tuple[str, LoadTrial]]:
        """Keys and load trials, the oldest first."""
        found = {path.name: _read(path) for folder in reversed(self._folders) for path in _files(folder)}
        trials = [(key, trial) for key, trial in found.items() if trial is not None]
        return sorted(trials, key=lambda entry: entry[1].time)

    def forget(self, key: str) -> None:
        """Raises: OSError: it cannot be removed."""
        for folder in self._folders:
            (folder / key).unlink(missing_ok=True)

    @property
    def _folders(self) -> Sequence[Path]:
        return (self.directory,) if self.spare is None else (self.directory, self.spare)


def _files(folder: Path) -> Sequence[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _read(path: Path) -> LoadTrial | None:
    """None where there is none, or one that another version of rocserve has written."""
    try:
        return from_json(LoadTrial, path.read_bytes())
    except (OSError, ValueError):
        return None


PROGRAM_FILENAME = "program.mxr"
ABOUT_FILENAME = "about.json"
_PROGRAMS, _LOAD_TRIALS, _TUNING = "programs", "load-trials", "miopen"
_LEAST_FREE_BYTES = 64 << 20
"""Below this nothing is compiled into a file system."""
_BLOCK_BYTES = 4096
"""A file system that is full may have room for less, such as beside the file's name."""


@dataclass(frozen=True, slots=True)
class ProgramAbout:
    """The description of a compiled program."""

    model: str
    """Whose load or tool compiled it; another model with the same file and options uses it too."""
    source_file: str
    """The name of the model's file, without its folder."""
    recipe: ProgramRecipe
    compile_seconds: float = 0.0
    """Quantising and compiling."""
    inputs: tuple[ProgramTensor, ...] = ()
    """By name. Not among them: inputs of the model on which no output depends."""
    outputs: tuple[ProgramTensor, ...] = ()
    scratch_bytes: int | None = None
    """The memory that it works in beside its weights, inputs and outputs; None where that is not known."""
    messages: tuple[str, ...] = ()
    """What MIGraphX wrote while it was compiled; cut where that is much."""


@dataclass(frozen=True, slots=True)
class CachedProgram:
    """A program that can be loaded. It is not removed as long as this lives in any process, or until `release`."""

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
    """None where it cannot be read: another version of rocserve has written it, or it is damaged."""

    @property
    def key(self) -> str:
        return self.path.name


def open_cache(settings: EngineSettings, warn: Callable[[str], None] = lambda text: None) -> ProgramCache:
    """The cache that the settings name. `warn` takes a sentence on each fault of it. Raises: ServeError: UNAVAILABLE,
    others than this user may write to its folder."""
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
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Programs take `limit_bytes` together: those used least lately go first. `spare_directory`: None = a folder of
        this user's among the temporary files. Raises: ServeError: UNAVAILABLE, others may write to the folder."""
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._warn = warn
        self._spare_directory = spare_directory or usual_spare_directory()
        self._problem = _prepare(directory)
        """Why nothing can be written; "" where it can."""
        if self._problem:
            warn(
                f"compiled programs cannot be kept in {directory} ({self._problem}): those that are there are used, new"
                f" ones go to {self._spare}; name another folder with --cache-directory"
            )

    def find(self, key: str) -> CachedProgram | None:
        """The program, which counts as used now and stays for as long as the result lives."""
        for programs in self._places():
            if (found := programs.find(key)) is not None:
                with suppress(OSError):  # Somebody may have removed it since.
                    return _program(found)
        return None

    def find_or_build(
        self, key: str, build: Callable[[Path], ProgramAbout], waiting: Callable[[], None]
    ) -> CachedProgram:
        """The program; where it is not there or damaged, `build` writes it to a path and describes it, in one process
        at a time. Others call `waiting` again and again; what either raises is passed on. Raises: ServeError:
        UNAVAILABLE, it cannot be written anywhere."""

        def make(folder: Path) -> None:
            try:
                about = build(folder / PROGRAM_FILENAME)
            except ServeError:
                # MIGraphX does not notice that it fills a disk: what it has saved only cannot be loaded.
                _check_room(folder)
                raise
            (folder / ABOUT_FILENAME).write_bytes(to_json(about))

        if (found := self.find(key)) is not None:
            return found
        problems: list[str] = []
        for directory in self._writable():
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
                    # Now that it is there: `build` may give up, to be called again and again.
                    for each in problems:
                        self._warn(f"nothing can be compiled into {each}; {ANOTHER_PLACE}")
                    return made
            problems.append(f"{directory}: {problem}")
        raise unavailable(f"there is no place to compile into ({'; '.join(problems)}); {ANOTHER_PLACE}")

    def entries(self) -> Sequence[CacheEntry]:
        """All of the cache and the spare folder, those used least lately first."""
        found = [entry for programs in self._places() for entry in programs.entries()]
        return [
            CacheEntry(entry.path, entry.size_bytes, entry.used_at, _read_about(entry.path))
            for entry in sorted(found, key=lambda entry: entry.used_at)
        ]

    def compiling(self) -> Sequence[str]:
        """The keys of the programs that any process compiles at this moment."""
        return [key for programs in self._places() for key in programs.being_made()]

    def remove(self, key: str) -> bool:
        """Whether it is gone now: what a process builds or is about to load stays. Raises: ServeError: UNAVAILABLE, the
        folder cannot be written."""
        gone = [programs.remove(key) for programs in self._places()]
        return all(gone)

    def prune(self, limit_bytes: int) -> Sequence[CacheEntry]:
        """Remove programs, those used least lately first, until the rest takes no more; also what killed processes have
        left. What was removed. Raises: ServeError: UNAVAILABLE, one could not be removed; the others were."""
        entries = self.entries()
        removed: set[Path] = set()
        failures: list[ServeError] = []
        for programs in self._places():
            try:
                removed.update(entry.path for entry in programs.prune(limit_bytes))
            except ServeError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return [entry for entry in entries if entry.path in removed]

    @property
    def load_trials(self) -> LoadTrials:
        """What trials of users' own programs came to."""
        return LoadTrials(self.directory / _LOAD_TRIALS, self._spare / _LOAD_TRIALS if self._problem else None)

    @property
    def tuning_folder(self) -> Path:
        """Where MIOpen keeps its tuning for this machine's GPUs."""
        return (self._spare if self._problem else self.directory) / _TUNING

    @functools.cached_property
    def _spare(self) -> Path:
        with suppress(ServeError):
            if not _prepare(self._spare_directory):
                return self._spare_directory
        # Somebody else was there first: a folder of this process alone, which goes with it.
        self._own_spare = tempfile.TemporaryDirectory(prefix="rocserve-cache-")
        _prepare(Path(self._own_spare.name))
        return Path(self._own_spare.name)

    def _writable(self) -> Iterator[Path]:
        """Where programs may be compiled into, the best first; the spare folder is made when it is asked for."""
        if not self._problem:
            yield self.directory
        yield self._spare

    def _places(self) -> Sequence[FolderCache]:
        """Those that may hold programs."""
        directories = [self.directory]
        if "_spare" in self.__dict__:
            directories.append(self._spare)
        elif is_private(self._spare_directory):
            # Other processes may have left programs there; reading makes and writes nothing.
            directories.append(self._spare_directory)
        # The spare folder may be the cache's own.
        return [self._programs(directory) for directory in dict.fromkeys(directories)]

    def _programs(self, directory: Path) -> FolderCache:
        return FolderCache(
            directory / _PROGRAMS, self.limit_bytes, self._warn, lambda folder: _read_about(folder) is not None
        )


def _prepare(directory: Path) -> str:
    """Make what is missing of the folders. Why nothing can be written there; "" where it can. Refuses a
    folder that others may write to."""
    try:
        make_private(directory)
        for name in (_PROGRAMS, _LOAD_TRIALS, _TUNING):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
        _check_room(directory / _PROGRAMS)
        return ""
    except OSError as error:
        problem = error.strerror or str(error)
    with suppress(OSError):  # where it is not there, it holds nothing that could be used
        check_private(directory)
    return problem


def _check_room(folder: Path) -> None:
    """Raises: OSError: it takes no files, or none that holds anything."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(_BLOCK_BYTES))


def _program(folder: CachedFolder) -> CachedProgram:
    """Raises: OSError: it is no longer there."""
    about = from_json(ProgramAbout, (folder.path / ABOUT_FILENAME).read_bytes())
    path = folder.path / PROGRAM_FILENAME
    return CachedProgram(folder.path.name, path, about, path.stat().st_size, folder)


def _read_about(folder: Path) -> ProgramAbout | None:
    try:
        return from_json(ProgramAbout, (folder / ABOUT_FILENAME).read_bytes())
    except (OSError, ValueError):
        return None
