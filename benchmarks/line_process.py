"""A process that answers each line on its standard input with a line of JSON, and sleeps between them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.probe import WrongAnswer

_ROOT = Path(__file__).resolve().parents[1]


class LineProcess:
    """A context manager: the process runs inside the block."""

    def __init__(self, title: str, command: Sequence[str]) -> None:
        """`title`: its name in the error if it ends by itself. The command runs in the root of the checkout."""
        self._title = title
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        # The end of its input ends the process.
        self._process.communicate(timeout=30.0)

    def ask(self, line: str) -> dict[str, Any]:
        """Raises WrongAnswer if the process has ended."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise WrongAnswer(f"{self._title} ended; its error is above")
        result: dict[str, Any] = json.loads(answer)
        return result

    def cpu_seconds(self) -> float:
        """CPU time used so far, user and system."""
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system
