"""The part of a file that is there so far, and its digest."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Self

from rocserve.tools.get.errors import GetError

_BLOCK_BYTES = 1 << 20


class PartialFile:
    """As a context manager: open, and nobody else's. What an earlier download left is kept and counted in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._digest = hashlib.sha256()
        self._file: BufferedRandom | None = None

    def __enter__(self) -> Self:
        """Raises: GetError when another process writes it, or it cannot be written."""
        with self._disk_faults():
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            file = self._file = os.fdopen(descriptor, "r+b")
            if not _is_ours(file, self.path):
                file.close()
                raise GetError(f"another process is writing '{self.path}'; wait for it, or end it")
            while block := file.read(_BLOCK_BYTES):
                self._digest.update(block)
                self.size += len(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._disk_faults():
            self._open().close()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def append(self, data: bytes) -> None:
        """Raises: GetError, such as for a full disk."""
        with self._disk_faults():
            self._open().write(data)
        self._digest.update(data)
        self.size += len(data)

    def clear(self) -> None:
        """Begin anew."""
        with self._disk_faults():
            file = self._open()
            file.seek(0)
            file.truncate()
        self._digest = hashlib.sha256()
        self.size = 0

    def keep_as(self, target: Path) -> None:
        """Give the file its name, in one step, once it is on the disk."""
        with self._disk_faults():
            file = self._open()
            file.flush()
            os.fsync(file.fileno())
            target.parent.mkdir(exist_ok=True)
            self.path.replace(target)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    @contextmanager
    def _disk_faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"cannot write '{self.path}': {error.strerror or error}"
            raise GetError(text + ("; run again, it goes on from what is there" if self.size else "")) from error

    def _open(self) -> BufferedRandom:
        assert self._file is not None, "used outside its block"
        return self._file


def _is_ours(file: BufferedRandom, path: Path) -> bool:
    """Lock it; no where another process has, or has given the file its name while this one waited to open it: to write
    into it would then be to write into what a server has loaded."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
