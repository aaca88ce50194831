"""Remains of a shared file go in pieces: its memory, and the places where this process has mapped it.

To unmap what a tensor of 1 GiB has filled takes 40 to 80 ms of CPU time, to free its pages another 150. Where others
wait for the thread meanwhile, both are done some megabytes at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rocserve.core.steps import Steps
from rocserve.plane import anonymous_file

GIVEN_BACK_AT_ONCE = 8 << 20
"""Bytes, in one step: some 2 ms, in which its process does nothing else."""

Later = Callable[[Steps[None]], object]
"""Takes the steps of what takes long. From any thread."""


class Remains:
    """What is left of a file that is no longer used. Held by all who may use it: who has opened it, slots in it
    and mappings of it; when this goes nobody does."""

    def __init__(self, later: Later | None) -> None:
        """`later`: None: all goes at once."""
        self._later = later
        self._descriptor = -1
        self._unused: list[tuple[int, int]] = []
        """Mappings: addresses and bytes."""

    def keep(self, descriptor: int) -> None:
        """Take a descriptor over, to write, of a file that nobody has a use for when this process has none."""
        if self._later is None:
            os.close(descriptor)
        else:
            self._descriptor = descriptor

    def unmap(self, address: int, nbytes: int) -> None:
        """Nobody holds a view of a mapping any more."""
        if self._later is None:
            anonymous_file.unmap(address, nbytes)
        else:
            self._unused.append((address, nbytes))

    def __del__(self) -> None:
        if self._later is not None and (self._unused or self._descriptor >= 0):
            self._later(_pieces(self._descriptor, self._unused))


NOTHING_LEFT = Remains(None)
"""Of a file that has been let go of."""


def _pieces(descriptor: int, mappings: list[tuple[int, int]]) -> Steps[None]:
    """One a step."""
    try:
        if descriptor >= 0:
            # This takes the pages out of the mappings, too: what is left of these goes in no time.
            size = os.fstat(descriptor).st_size
            yield from anonymous_file.give_back_pieces(descriptor, 0, size, GIVEN_BACK_AT_ONCE)
        else:
            for address, nbytes in mappings:
                for start in range(0, nbytes, GIVEN_BACK_AT_ONCE):
                    anonymous_file.leave(address + start, min(GIVEN_BACK_AT_ONCE, nbytes - start))
                    yield
    finally:
        for address, nbytes in mappings:
            anonymous_file.unmap(address, nbytes)
        if descriptor >= 0:
            os.close(descriptor)
