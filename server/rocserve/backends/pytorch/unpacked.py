"""Gives PyTorch a folder to unpack a package of AOTInductor into.

The folder is deleted with the package; if its process was killed, the next load deletes it. PyTorch itself deletes
unpacked files only if the process ends normally.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from rocserve.backends.pytorch.environment import variable
from rocserve.cache.temporary_folder import TemporaryFolder, remove_left

_PREFIX = "rocserve-package-"


def unpacked(load: Callable[[], Any]) -> Any:
    """Call `load` with a separate temporary folder, which is deleted when nothing refers to the result any more."""
    remove_left(_PREFIX)
    folder = TemporaryFolder(_PREFIX)
    try:
        with variable("TMPDIR", str(folder.path)):
            package = load()
    except BaseException:
        folder.remove()
        raise
    weakref.finalize(package, folder.remove)
    return package
