"""Imports modules in the zygote, so that the workers which it forks have them."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules in the block. Libraries start no threads then, and the modules' memory stays shared."""
    own_environment = dict(os.environ)
    os.environ.update(
        {
            # The fork would lose the threads of a BLAS pool, and the locks that they hold would stay locked.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
    )
    gc.disable()  # See bootstrap.py.
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(own_environment)
        # Collections in the workers then leave the shared pages unchanged. A collection before it would take 25 ms of
        # each start, and free some hundred objects.
        gc.freeze()
        gc.enable()


class Preload:
    """Imports each module once."""

    def __init__(self) -> None:
        self._tried: set[str] = set()

    def load(self, names: Iterable[str]) -> None:
        """Import those of the modules that are installed and were not tried before."""
        new = [name for name in names if name not in self._tried]
        if not new:
            return
        self._tried.update(new)
        with importing():
            for name in new:
                try:
                    importlib.import_module(name)
                except ImportError:
                    continue  # A backend whose engine is not installed reports that when a model needs it.
                except Exception as error:
                    print(f"the zygote could not preload {name}: {error!r}", file=sys.stderr)
