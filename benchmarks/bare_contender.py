"""The bare loop as a contender: a process that runs the engine calls of an ensemble, and nothing between them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.bare_ensemble import write_steps
from benchmarks.cases import Case
from benchmarks.line_process import LineProcess
from benchmarks.probe import WrongAnswer
from benchmarks.ratios import BARE, Measurement
from benchmarks.sample_ensemble import SampleEnsemble

WARM_UP_SECONDS = 0.5


class BareContender:
    """As a context manager: the process is there inside the block.

    It works on batches as large as the case has requests in flight (the model's max_batch_size at most): the largest
    that a server could gather.
    """

    name = BARE

    def __init__(self, model: SampleEnsemble, folder: Path) -> None:
        """`folder` is for what the process reads."""
        self._model = model
        self._steps_file = folder / f"bare-{model.group}-steps.pickle"
        command = [sys.executable, "-m", "benchmarks.bare_loop", str(self._steps_file), str(model.image)]
        self._process = LineProcess("the bare loop", [*command, model.input, model.output])

    def __enter__(self) -> Self:
        write_steps(self._model.steps(), self._steps_file)
        self._process.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    def prepare(self, case: Case) -> None:
        self.measure(case, WARM_UP_SECONDS)

    def measure(self, case: Case, seconds: float) -> Measurement:
        """Raises WrongAnswer when the loop ended or gave another answer."""
        batch_size = min(case.connections * case.streams, self._model.max_batch_size)
        result = self._process.ask(f"{batch_size} {seconds}")
        if not self._model.accepts(result["answer"]):
            raise WrongAnswer(f"the bare loop says {result['answer']} for {self._model.image.name}")
        return Measurement(result["images"] / result["seconds"])

    def cpu_seconds(self) -> float:
        return self._process.cpu_seconds()
