"""Runs clients and watches next to the actions while a block lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar


class Runner(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


Each = TypeVar("Each", bound=Runner)


@contextmanager
def running(runners: Sequence[Each]) -> Iterator[Sequence[Each]]:
    for runner in runners:
        runner.start()
    try:
        yield runners
    finally:
        for runner in runners:
            runner.stop()
