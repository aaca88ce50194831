"""Makes files of POSIX shared memory, as clients do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rocserve.plane.guarded_mapping import FaultGuard

FOLDER = Path("/dev/shm")

GUARD = FaultGuard()
"""The guard of the tests' process."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    key: str
    """The name that clients use: with a slash in front."""

    @property
    def path(self) -> Path:
        return FOLDER / self.key.removeprefix("/")

    def put(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def get(self, offset: int, nbytes: int) -> bytes:
        return self.path.read_bytes()[offset : offset + nbytes]

    def cut(self, nbytes: int) -> None:
        os.truncate(self.path, nbytes)


@contextmanager
def shared_file(nbytes: int, name: str = "") -> Iterator[SharedFile]:
    """A file of zeros, removed after the block."""
    file = SharedFile(f"/rocserve_test_{os.getpid()}_{name or nbytes}")
    file.path.write_bytes(bytes(nbytes))
    try:
        yield file
    finally:
        file.path.unlink(missing_ok=True)
