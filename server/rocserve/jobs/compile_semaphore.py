"""Bounds how many programs are compiled at once on a machine, whichever servers and commands ask for them.

A compiler takes gigabytes and all processors for minutes to hours. A repository of fifty new models is not to start
fifty.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rocserve.cache.folders import FileLock, make_private, try_lock
from rocserve.core.errors import ServeError

_AT_ONCE = 4
_BESIDE = ("beside-0", "beside-1")
"""Of what models that serve already still want: few, and never in the place of what nobody can serve yet."""
_HANDED_ON_SECONDS = 600.0
"""After which what compiles beside no longer counts: one compiler that hangs is not to hold up all other models."""
_SECONDS_BETWEEN_ATTEMPTS = 0.1


class CompileSemaphore:
    """Its slots are locks on files of a folder on this machine: the end of a process gives them back."""

    def __init__(self, folder: Path, at_once: int = _AT_ONCE, handed_on_seconds: float = _HANDED_ON_SECONDS) -> None:
        """`handed_on_seconds`: how long a compile at low priority has its slot, even where it takes longer."""
        self._folder = folder
        self._handed_on_seconds = handed_on_seconds
        self._names = tuple(f"slot-{number}" for number in range(at_once))

    @contextmanager
    def acquired(self, low_priority: bool, waiting: Callable[[], None]) -> Iterator[None]:
        """Wait for a slot and have it. Where no files can be locked, nobody waits. `low_priority`: for what a model
        that serves already still wants. `waiting`: called again and again while all slots are taken; what it raises
        ends the wait."""
        with ExitStack() as at_the_end:
            if lock := self._wait(_BESIDE if low_priority else self._names, waiting):
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
        while True:
            for name in names:
                try:
                    lock = try_lock(self._folder / name)
                except OSError:
                    return None
                if lock is not None:
                    return lock
            waiting()
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)


def machine_semaphore() -> CompileSemaphore:
    """That of this user on this machine."""
    return CompileSemaphore(Path(tempfile.gettempdir()) / f"rocserve-compiles-{os.geteuid()}")
