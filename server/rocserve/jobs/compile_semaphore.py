"""Limits how many programs all servers and commands of a user compile at a time on a machine. A compiler uses gigabytes
and all processors for minutes to hours. Fifty new models in a repository must not start fifty compilers."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rocserve.cache.folders import FileLock, make_private, wait_for_lock
from rocserve.core.errors import ServeError


class CompileSemaphore:
    """A number of slots. A slot is a lock on a file of this machine: the kernel releases a dead process's slot."""

    def __init__(self, folder: Path, at_once: int = 4, low_priority_seconds: float = 600.0) -> None:
        """`low_priority_seconds`: a low-priority compile loses its slot after this time, even if it still runs, so
        that one hanging compiler does not block all other models."""
        self._folder = folder
        self._handed_on_seconds = low_priority_seconds
        self._names = tuple(f"slot-{number}" for number in range(at_once))

    @contextmanager
    def acquired(self, low_priority: bool, waiting: Callable[[], None]) -> Iterator[None]:
        """Wait for a slot and hold it. If files cannot be locked, go on without a slot. `low_priority`: the model
        serves already. `waiting` is called repeatedly while all slots are taken; an exception from it ends the wait."""
        with ExitStack() as at_the_end:
            # Further programs of models that already serve have separate slots, so that these never delay a model that
            # does not serve yet.
            if lock := self._wait(("beside-0", "beside-1") if low_priority else self._names, waiting):
                at_the_end.callback(lock.release)
            if lock and low_priority:
                hand_on = threading.Timer(self._handed_on_seconds, lock.release)
                hand_on.daemon = True
                hand_on.start()
                at_the_end.callback(hand_on.join)
                at_the_end.callback(hand_on.cancel)
            yield

    def _wait(self, names: Sequence[str], waiting: Callable[[], None]) -> FileLock | None:
        try:
            make_private(self._folder)
        except (OSError, ServeError):
            return None
        try:
            return wait_for_lock([self._folder / name for name in names], waiting)
        except OSError:
            return None


def machine_semaphore() -> CompileSemaphore:
    """Return this user's semaphore on this machine."""
    return CompileSemaphore(Path(tempfile.gettempdir()) / f"rocserve-compiles-{os.geteuid()}")
