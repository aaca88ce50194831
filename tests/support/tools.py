"""Runs a verb of the command as its user would, in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rocserve.cli import main
from support.waiting import LOAD_CHECK_SECONDS


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    out: str
    err: str

    def row(self, name: str) -> list[str]:
        """The words of the first line that begins with `name`, without the name."""
        for line in self.out.splitlines():
            if line.strip().startswith(name):
                return line.strip().removeprefix(name).split()
        raise AssertionError(f"no line begins with {name!r} in:\n{self.out}")


_CHECKING = ("bench", "check", "compare", "compile", "tune")
"""The verbs that load models, which check them."""


class Command:
    """`rocserve` with a cache that only this test uses. Its load checks have the time for a verdict on a busy machine,
    too."""

    def __init__(self, cache: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.cache = cache
        self._capture = capture

    def __call__(self, *words: str | Path) -> Ran:
        self._capture.readouterr()
        verb, *others = map(str, words)
        limits = [f"--load-check-seconds={LOAD_CHECK_SECONDS:g}"] if verb in _CHECKING else []
        try:
            status = main([verb, *limits, *others])
        except SystemExit as error:
            assert isinstance(error.code, int)
            status = error.code
        captured = self._capture.readouterr()
        return Ran(status, captured.out, captured.err)

    def on_migraphx(self, root: Path, *words: str | Path) -> Ran:
        verb, *others = words
        return self(verb, "--migraphx-root", root, "--cache-directory", self.cache, *others)
