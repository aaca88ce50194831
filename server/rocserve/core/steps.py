"""Steps are long work in parts of some milliseconds, a generator with a result; other requests run between parts."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]


def result_of(steps: Steps[_Result]) -> _Result:
    """Run all steps in one call and return their result: for work that is known to be short."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
