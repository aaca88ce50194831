"""Folders among the temporary files that do not stay for ever where their process is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def remove_left(prefix: str) -> None:
    """Remove the folders that killed processes of this user have left. Blocks on the disk."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # Another user's, or another process has it, or has just removed it.
            _remove(left, _locked(left))


class TemporaryFolder:
    """It goes by `remove`, or, after its process was killed, by the `remove_left` of another."""

    def __init__(self, prefix: str) -> None:
        """Blocks on the disk. Raises: OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock: int | None = None
        with suppress(OSError):  # A file system without locks, where none is taken for left.
            self._lock = _locked(self.path)

    def remove(self) -> None:
        """Once only."""
        _remove(self.path, self._lock)


def _locked(folder: Path) -> int:
    """A descriptor that nobody else has while it is open, whatever becomes of the process. Raises: OSError: another
    process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
