"""Bounds how many programs are compiled at once on a machine, whichever servers and commands ask for them.

A compiler takes gigabytes and all processors for minutes to hours. A repository of fifty new models is not to start
fifty.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rocserve.backends.migraphx.cache.locks import FileLock, try_lock
from rocserve.backends.migraphx.cache.private_folder import make_private
from rocserve.core.errors import ServeError

_AT_ONCE = 4
_BESIDE = ("beside",)
"""Of what models that serve already still want: one at a time, and never in the place of what nobody can serve yet."""
_SECONDS_BETWEEN_LOOKS = 0.1


class CompileTurns:
    """Turns are locks on files of a folder on this machine: the end of a process gives them back."""

    def __init__(self, folder: Path, at_once: int = _AT_ONCE) -> None:
        self._folder = folder
        self._names = tuple(f"turn-{number}" for number in range(at_once))

    @contextmanager
    def taken(self, low_priority: bool, waiting: Callable[[], None]) -> Iterator[None]:
        """Wait for a turn and have it. Where no files can be locked, nobody waits.

        Args:
            low_priority: for what a model that serves already still wants.
            waiting: called again and again while all turns are taken; what it raises ends the wait.
        """
        lock = self._wait(_BESIDE if low_priority else self._names, waiting) if self._is_usable() else None
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _is_usable(self) -> bool:
        try:
            make_private(self._folder)
        except (OSError, ServeError):
            return False
        return True

    def _wait(self, names: Sequence[str], waiting: Callable[[], None]) -> FileLock | None:
        while True:
            for name in names:
                try:
                    lock = try_lock(self._folder / name)
                except OSError:
                    return None
                if lock is not None:
                    return lock
            waiting()
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def machine_turns() -> CompileTurns:
    """Those of this user on this machine."""
    return CompileTurns(Path(tempfile.gettempdir()) / f"rocserve-turns-{os.geteuid()}")
