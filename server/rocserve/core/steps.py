"""Steps are work that takes long, cut into parts of some milliseconds between which others have their turn: a generator
whose value is the result."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]


def result_of(steps: Steps[_Result]) -> _Result:
    """What the steps come to, all taken at once: for work that is known to be short."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
