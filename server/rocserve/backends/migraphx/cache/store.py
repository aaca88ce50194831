"""The cache of compiled programs. Many processes use one at once: instances of a model, models, servers."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rocserve.backends.migraphx.cache.entry import CachedProgram, CacheEntry, ProgramAbout
from rocserve.backends.migraphx.cache.load_trials import LoadTrials
from rocserve.backends.migraphx.cache.place import CachePlace, DamagedError
from rocserve.cache.directory import usual_spare_directory
from rocserve.cache.private_folder import check_private, is_private
from rocserve.core.errors import ServeError, unavailable

_LEAST_FREE_BYTES = 64 << 20
"""Below this nothing is compiled into a file system."""

_REMEDY = "make room, or name another folder with --cache-directory"


def ignore_message(text: str) -> None:
    """Where nobody reads warnings."""


class ProgramCache:
    """Compiled programs by their recipes' keys.

    Where its folder cannot be written, or its disk is full, what is in it is used all the same, and new programs go to
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
        self._place = CachePlace(directory)
        self._spare_directory = spare_directory or usual_spare_directory()
        self._problem = _prepare(self._place)
        """Why nothing can be written; "" where it can."""
        if self._problem:
            warn(
                f"compiled programs cannot be kept in {directory} ({self._problem}): those that are there are used, new"
                f" ones go to {self._spare.directory}; name another folder with --cache-directory"
            )

    def find(self, key: str) -> CachedProgram | None:
        """The program, which counts as used now and stays for as long as the result lives; a damaged one is removed."""
        for place in self._places():
            try:
                found = place.find(key)
            except DamagedError as error:
                self._warn(f"compiled program {key[:12]} in {place.directory} is damaged, and not used: {error}")
                _remove_damaged(place, key)
                continue
            except OSError as error:
                self._warn(f"compiled program {key[:12]} in {place.directory} cannot be read: {_words(error)}")
                continue
            if found is not None:
                return found
        return None

    @contextmanager
    def lock(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Be the only process that compiles this program. Whoever gets the lock looks for the program again first.

        Args:
            waiting: called again and again while another compiles it; what it raises ends the wait.
        """
        called_off: list[Exception] = []

        def ask() -> None:
            try:
                waiting()
            except Exception as error:
                called_off.append(error)
                raise

        with ExitStack() as stack:
            for place in self._writable_places():
                try:
                    stack.enter_context(place.lock(key, ask))
                    break
                except OSError as error:
                    if called_off:
                        raise
                    self._warn(f"nothing can be locked in {place.directory}: {_words(error)}")
            yield

    @contextmanager
    def scratch(self, room_bytes: int = _LEAST_FREE_BYTES) -> Iterator[Path]:
        """A folder of one's own for what is to be stored, on the same disk; removed in the end, or, where the process
        does not come to that, by whoever stores or prunes next.

        Args:
            room_bytes: what is going to be written, as far as is known.

        Raises:
            ServeError: UNAVAILABLE, nothing can be written anywhere.
        """
        with ExitStack() as stack:
            yield self._enter_scratch(stack, max(room_bytes, _LEAST_FREE_BYTES))

    def store(self, key: str, program_file: Path, about: ProgramAbout) -> CachedProgram:
        """Take the file into the cache, then evict others where that has become too large.

        Args:
            program_file: one from `scratch` is not to be changed any more; any other is copied.

        Raises:
            ServeError: UNAVAILABLE, it cannot be written anywhere.
        """
        problems: list[str] = []
        for place in self._writable_places():
            try:
                stored = place.store(key, program_file, about)
            except OSError as error:
                problems.append(f"{place.directory}: {_words(error)}")
                self._warn(f"compiled program {key[:12]} of model {about.model} cannot be kept in {problems[-1]}")
                continue
            self._evict(place, keep=key)
            return stored
        raise unavailable(
            f"compiled program {key[:12]} of model {about.model} cannot be kept anywhere ({'; '.join(problems)});"
            f" {_REMEDY}"
        )

    def entries(self) -> Sequence[CacheEntry]:
        """What is in the cache and in the spare folder, those used least lately first."""
        return sorted((entry for place in self._places() for entry in place.entries()), key=lambda entry: entry.used_at)

    def compiling(self) -> Sequence[str]:
        """The keys of what is being compiled at this moment, by any process."""
        return [key for place in self._places() for key in place.compiling()]

    def remove(self, key: str) -> bool:
        """Whether it is gone now: what a process is about to load stays.

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
        """Where MIOpen keeps what it has found out about this machine's GPUs."""
        return next(self._writable_places()).tuning

    @functools.cached_property
    def _spare(self) -> CachePlace:
        place = CachePlace(self._spare_directory)
        try:
            problem = _prepare(place)
        except ServeError as refusal:
            problem = refusal.text
        if problem:
            # Somebody else was there first: a folder of this process alone, which goes with it.
            self._own_spare = tempfile.TemporaryDirectory(prefix="rocserve-cache-")
            place = CachePlace(Path(self._own_spare.name))
            place.prepare()
        return place

    def _places(self) -> Sequence[CachePlace]:
        """Those that may hold programs."""
        places = [self._place]
        if "_spare" in self.__dict__:
            places.append(self._spare)
        elif is_private(self._spare_directory):
            # Other processes may have left programs there; nothing is made or written for a look at it.
            places.append(CachePlace(self._spare_directory))
        # The spare folder may be the very one that is looked after.
        return list(dict.fromkeys(places))

    def _writable_places(self) -> Iterator[CachePlace]:
        if not self._problem:
            yield self._place
        yield self._spare

    def _enter_scratch(self, stack: ExitStack, room_bytes: int) -> Path:
        problems: list[str] = []
        for place in self._writable_places():
            try:
                folder = stack.enter_context(place.scratch())
                free = place.free_bytes()
            except OSError as error:
                problem = _words(error)
            else:
                if free >= room_bytes:
                    return folder
                problem = f"the disk has {free >> 20} MiB free, and a program may take {room_bytes >> 20} MiB"
            problems.append(f"{place.directory}: {problem}")
            self._warn(f"nothing can be compiled into {problems[-1]}; {_REMEDY}")
        raise unavailable(f"there is no place to compile into ({'; '.join(problems)}); {_REMEDY}")

    def _evict(self, place: CachePlace, keep: str) -> None:
        try:
            place.prune(self.limit_bytes, keep)
        except OSError as error:
            self._warn(f"compiled programs in {place.directory} cannot be evicted: {_words(error)}")


def _prepare(place: CachePlace) -> str:
    """Why nothing can be written there; "" where it can.

    Raises:
        ServeError: UNAVAILABLE, others than this user may write there.
    """
    try:
        place.prepare()
        with place.scratch():
            return ""
    except OSError as error:
        problem = _words(error)
    try:
        check_private(place.directory)
    except OSError:
        pass  # it is not there, and so holds nothing that could be used
    return problem


def _remove_damaged(place: CachePlace, key: str) -> None:
    try:
        place.throw_away(key)
    except OSError:
        pass  # it is passed over again the next time


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _cannot_remove(error: OSError) -> ServeError:
    return unavailable(f"compiled programs cannot be removed: {error}")
