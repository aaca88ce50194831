"""A file that one process at a time holds, over all processes of a machine.

The lock is flock(2)'s: it ends with its holder however that ends, and does not pass to programs that the holder starts.
The file is removed on release, so that a folder of locks does not fill up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_SECONDS_BETWEEN_ATTEMPTS = 0.1

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What flock says on file systems that have none."""


class FileLock:
    """A lock that is held, until `release` or the end of the process."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    def release(self) -> None:
        """Once only: afterwards the name is that of the next holder's lock."""
        if self._file.closed:
            return
        # The name goes first: a process that had opened the file before sees that it is no longer there.
        with self._file:
            self._path.unlink(missing_ok=True)


def try_lock(path: Path) -> FileLock | None:
    """The lock, or None where another has it. Its folder must exist. Raises: OSError: the file cannot be written."""
    while True:
        # Open for writing: NFS has no exclusive lock on a file that is open for reading.
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        if not hold(file, shared=False):
            file.close()
            return None
        if leads_to(path, file):
            return FileLock(path, file)
        file.close()


def wait_for_lock(path: Path, waiting: Callable[[], None]) -> FileLock:
    """The lock, as soon as nobody else has it. `waiting`: called again and again while another has it; what it raises
    ends the wait. Raises: OSError: the file cannot be written."""
    while (lock := try_lock(path)) is None:
        waiting()
        # Not a blocking flock, which no signal handler of Python's would end.
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    return lock


def is_locked(path: Path) -> bool:
    """Whether a process has the lock at this moment."""
    try:
        with path.open("r+b") as file:
            return not hold(file, shared=False)
    except OSError:
        return False


def hold(file: BinaryIO, *, shared: bool) -> bool:
    """Lock an open file until it is closed; False where another's lock is in the way. True on file systems without
    locks, where nothing better can be had."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    return True


def leads_to(path: Path, file: BinaryIO) -> bool:
    """Whether the name still is that of the open file."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(file.fileno()))
