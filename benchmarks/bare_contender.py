"""The bare loop as a contender: a process that runs the engine calls of an ensemble, and nothing between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.bare_ensemble import write_steps
from benchmarks.cases import Case
from benchmarks.probe import WrongAnswer
from benchmarks.ratios import Measurement
from benchmarks.sample_ensemble import ROOT, SampleEnsemble

WARM_UP_SECONDS = 0.5


class BareContender:
    """As a context manager: the process is there inside the block.

    It works on batches as large as the case has requests in flight (the model's max_batch_size at most): the largest
    that a server could gather.
    """

    name = "bare"

    def __init__(self, model: SampleEnsemble, folder: Path) -> None:
        """`folder` is for what the process reads."""
        self._model = model
        self._steps_file = folder / f"bare-{model.group}-steps.pickle"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        write_steps(self._model.steps(), self._steps_file)
        command = [sys.executable, "-m", "benchmarks.bare_loop", str(self._steps_file), str(self._model.image)]
        self._process = subprocess.Popen(
            [*command, self._model.input, self._model.output],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        # The end of its input ends the process.
        self._process.communicate(timeout=30.0)

    def prepare(self, case: Case) -> None:
        self.measure(case, WARM_UP_SECONDS)

    def measure(self, case: Case, seconds: float) -> Measurement:
        """Raises WrongAnswer when the loop ended or gave another answer."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        batch_size = min(case.connections * case.streams, self._model.max_batch_size)
        self._process.stdin.write(f"{batch_size} {seconds}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise WrongAnswer("the bare loop ended; its error is above")
        result = json.loads(line)
        if not self._model.accepts(result["answer"]):
            raise WrongAnswer(f"the bare loop says {result['answer']} for {self._model.image.name}")
        return Measurement(result["images"] / result["seconds"])

    def cpu_seconds(self) -> float:
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system
