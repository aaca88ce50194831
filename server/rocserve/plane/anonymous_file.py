"""Anonymous file is memory that processes share: made by one, written by its owner alone, read by whom it is given to.

Not /dev/shm: a container's small /dev/shm is no limit, and nothing is left behind when all ends are gone. The size is
sealed, so that no reader meets the end of the file (SIGBUS).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from typing import Any

_NAME_BYTES = 200
"""Of the file's name, which shows in /proc/PID/maps; Linux takes 249."""

MAPPED_WITHOUT_A_COPY: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Arguments of mmap.mmap. Before Python 3.13 each mapping keeps a copy of the file's descriptor."""


def create(name: str, size: int) -> int:
    """A descriptor to write, of zeros that take no memory until they are touched."""
    shown = os.fsencode(name)[:_NAME_BYTES].decode(errors="ignore")
    descriptor = os.memfd_create(shown, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Another user's process that is given a descriptor to read cannot open the file once more to write.
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, size)
    # Writing cannot be sealed for readers alone: memory could not be given back any more.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def open_for_reading(descriptor: int) -> int:
    """A new descriptor of the same file; a writable mapping of it is refused."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def map_to_write(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size, **MAPPED_WITHOUT_A_COPY)


def map_to_read(descriptor: int) -> mmap.mmap:
    size = os.fstat(descriptor).st_size
    return mmap.mmap(descriptor, size, prot=mmap.PROT_READ, **MAPPED_WITHOUT_A_COPY)
