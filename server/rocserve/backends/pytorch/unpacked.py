"""The folder into which PyTorch unpacks a package of AOTInductor.

It goes with the package, or, after its process was killed, when the next one is loaded. PyTorch itself removes what it
unpacks only where the process ends in order.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rocserve.backends.pytorch.environment import variable

_PREFIX = "rocserve-package-"


def unpacked(load: Callable[[], Any]) -> Any:
    """What `load` gives, with a temporary folder of its own, which is removed when nobody has that any more."""
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # Another user's, or another process has just removed it.
            _remove(left, _locked(left))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = _locked(folder)
    try:
        with variable("TMPDIR", str(folder)):
            package = load()
    except BaseException:
        _remove(folder, lock)
        raise
    weakref.finalize(package, _remove, folder, lock)
    return package


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


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
