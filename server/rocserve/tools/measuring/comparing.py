"""Runs a model in several engines beside each other: what each answers, against the first, and how long it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.tools.differences import Array, Difference, difference
from rocserve.tools.measuring.files import read_outputs
from rocserve.tools.measuring.messages import Engine, Measure, MeasuredInput
from rocserve.tools.measuring.process import MeasuringProcess
from rocserve.tools.measuring.rounds import LatencySummary, Timing, summarise, time_interleaved

RANDOM_SAMPLE = ""
"""In place of a file's name: inputs that are the same for each engine."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in an engine, yet to be opened."""

    name: str
    engine: Engine
    inputs: Mapping[int, tuple[MeasuredInput, ...]]
    """By batch size; 0 = the model does not batch."""
    python: tuple[str, ...] = (sys.executable,)
    """The words that start its process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    shares_a_process: bool = False
    """Whether several instances are threads of one process; else each has its own, as in a server."""

    def order(self, batch_size: int, sample: str = RANDOM_SAMPLE) -> Measure:
        """Raises: ServeError: it cannot run batches of this size."""
        if batch_size not in self.inputs:
            raise invalid_argument(f"{self.name}: cannot run batch size {batch_size} of this model")
        return Measure(batch_size, self.inputs[batch_size], data_file=sample)


@dataclass(frozen=True, slots=True)
class Compared:
    """One candidate at one batch size."""

    latency: LatencySummary | None = None
    """None where it could not run."""
    differences: tuple[Difference, ...] = ()
    """Of each output from the first candidate's, over all samples; empty where that could not run."""
    failure: str = ""


class Comparison:
    """Candidates whose processes are open for as long as the stack is."""

    def __init__(self, candidates: Sequence[Candidate], stack: ExitStack, report: Callable[[str], None]) -> None:
        """Raises: ServeError: the first one cannot be opened."""
        self.descriptions: dict[str, str] = {}
        """What runs it, of each that could be opened."""
        self.failures: dict[str, str] = {}
        """Why not, of the others."""
        self._processes: dict[str, MeasuringProcess] = {}
        for candidate in candidates:
            report(f"opening {candidate.name}")
            try:
                process = stack.enter_context(MeasuringProcess(candidate.name, candidate.python, candidate.environment))
                self.descriptions[candidate.name] = process.open(candidate.engine).description
            except ServeError as error:
                if candidate is candidates[0]:
                    raise
                self.failures[candidate.name] = error.text
            else:
                self._processes[candidate.name] = process
        self._candidates = [candidate for candidate in candidates if candidate.name in self._processes]

    def compare(self, batch_size: int, samples: Sequence[str], timing: Timing) -> dict[str, Compared]:
        """Each that is open, by its name. `samples`: files of inputs, of which the first is timed."""
        failures: dict[str, str] = {}
        outputs: dict[str, list[list[Array]]] = {}
        with TemporaryDirectory(prefix="rocserve-outputs-") as folder:
            for one in self._candidates:
                try:
                    outputs[one.name] = self._outputs(one, batch_size, samples, Path(folder) / f"{one.name}.npz")
                except ServeError as error:
                    failures[one.name] = error.text
        differences = self._differences(outputs, failures)
        running = [one for one in self._candidates if one.name not in failures]
        orders = {one.name: one.order(batch_size, samples[0]) for one in running}
        latencies = time_interleaved(self._processes, orders, timing) if orders else {}
        return {
            one.name: Compared(
                summarise(latencies[one.name]) if one.name in latencies else None,
                differences.get(one.name, ()),
                failures.get(one.name, ""),
            )
            for one in self._candidates
        }

    def _outputs(self, one: Candidate, batch_size: int, samples: Sequence[str], file: Path) -> list[list[Array]]:
        """Of a run of each sample. Raises: ServeError: it cannot run one."""
        outputs = []
        for sample in samples:
            order = replace(one.order(batch_size, sample), repeats=0, outputs_file=str(file))
            self._processes[one.name].measure(order)
            outputs.append(read_outputs(str(file)))
        return outputs

    def _differences(
        self, outputs: Mapping[str, list[list[Array]]], failures: dict[str, str]
    ) -> dict[str, tuple[Difference, ...]]:
        """Of all that answer as the first one does; the others are among the failures then."""
        differences: dict[str, tuple[Difference, ...]] = {}
        reference = outputs.get(self._candidates[0].name)
        if reference is None:
            return differences
        for name, given in outputs.items():
            shapes, expected = ([list(output.shape) for run in side for output in run] for side in (given, reference))
            if shapes == expected:
                by_output = zip(zip(*given, strict=True), zip(*reference, strict=True), strict=True)
                differences[name] = tuple(difference(zip(*runs, strict=True)) for runs in by_output)
            else:
                failures[name] = f"{name}: answers with outputs of shapes {shapes}, not {expected}"
        return differences
