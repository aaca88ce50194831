"""Remains release a shared file in steps: its memory, and this process's mappings of it. Unmapping a tensor of 1 GiB
takes 40 to 80 ms of CPU time, freeing its pages another 150. A thread on which requests wait therefore releases some
megabytes at a time."""

from __future__ import annotations

import os
from collections.abc import Callable

from rocserve.core.steps import Steps
from rocserve.plane import anonymous_file

GIVEN_BACK_AT_ONCE = 8 << 20
"""Bytes per step: about 2 ms, in which the process does nothing else."""

Later = Callable[[Steps[None]], object]
"""Runs the steps of long work. Safe on any thread."""


class Remains:
    """Releases mappings and perhaps the memory of a file when it dies, after the heap or reader, its slots and its
    views."""

    def __init__(self, later: Later | None) -> None:
        """`later` runs the steps; None: everything is released in one call."""
        self._later = later
        self._descriptor = -1
        self._unused: list[tuple[int, int]] = []
        """Addresses and bytes of mappings without views."""

    def keep(self, descriptor: int) -> None:
        """Take over a writable descriptor of a file whose memory is released after this process's last use."""
        if self._later is None:
            os.close(descriptor)
        else:
            self._descriptor = descriptor

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap a mapping that has no views any more; with `later`, when this object dies."""
        if self._later is None:
            anonymous_file.unmap(address, nbytes)
        else:
            self._unused.append((address, nbytes))

    def __del__(self) -> None:
        if self._later is not None and (self._unused or self._descriptor >= 0):
            self._later(_pieces(self._descriptor, self._unused))


NOTHING_LEFT = Remains(None)
"""For a closed heap or reader."""


def _pieces(descriptor: int, mappings: list[tuple[int, int]]) -> Steps[None]:
    try:
        if descriptor >= 0:
            # This removes the pages from the mappings too, so that unmapping takes no time.
            size = os.fstat(descriptor).st_size
            yield from anonymous_file.give_back_pieces(descriptor, 0, size, GIVEN_BACK_AT_ONCE)
        else:
            while mappings:
                address, nbytes = mappings.pop()
                piece = min(GIVEN_BACK_AT_ONCE, nbytes)
                anonymous_file.unmap(address, piece)
                if nbytes > piece:
                    mappings.append((address + piece, nbytes - piece))
                yield
    finally:
        for address, nbytes in mappings:
            anonymous_file.unmap(address, nbytes)
        if descriptor >= 0:
            os.close(descriptor)
