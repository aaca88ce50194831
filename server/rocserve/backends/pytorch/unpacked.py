"""The folder into which PyTorch unpacks a package of AOTInductor.

It goes with the package, or, after its process was killed, when the next one is loaded. PyTorch itself removes what it
unpacks only where the process ends in order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from rocserve.backends.pytorch.environment import variable
from rocserve.cache.temporary_folder import TemporaryFolder, remove_left

_PREFIX = "rocserve-package-"


def unpacked(load: Callable[[], Any]) -> Any:
    """What `load` gives, with a temporary folder of its own, which is removed when nobody has that any more."""
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
