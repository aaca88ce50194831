"""Makes temporary folders. If their process is killed, another process removes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def remove_left(prefix: str) -> None:
    """Remove the folders with this prefix that killed processes of this user have left. Blocks on the disk."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # The folder may be another user's, in use, or just removed.
            _remove(left, _locked(left))


class TemporaryFolder:
    """A folder that exists until `remove`. If this process is killed, `remove_left` in another process removes it."""

    def __init__(self, prefix: str) -> None:
        """Blocks on the disk. Raises OSError."""
        self._lock: int | None = None
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            try:
                self._lock = _locked(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue  # Another process has found the folder before it was locked, and removes it.
            except OSError:
                return  # On a file system without locks `remove_left` removes no folder.
            if self.path.exists():
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder, if it is there."""
        lock, self._lock = self._lock, None
        _remove(self.path, lock)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder that exists within the context, after removing those that killed processes have left. Raises
    OSError if it cannot be made."""
    remove_left(prefix)
    folder = TemporaryFolder(prefix)
    try:
        yield folder.path
    finally:
        folder.remove()


def _locked(folder: Path) -> int:
    """Lock a folder while the returned descriptor is open. Raises OSError if another process holds the lock."""
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
