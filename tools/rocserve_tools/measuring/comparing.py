"""Compares a model's outputs and latencies in several engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.load_check.tensors import Array
from rocserve.verbs.workers import ToolWorkers
from rocserve_tools.measuring.candidates import Candidate, Inputs, OpenCandidate
from rocserve_tools.measuring.figures import Difference, LatencySummary, Timing, difference, summarise
from rocserve_tools.measuring.lengths import DrawnLengths, WrittenLengths
from rocserve_tools.measuring.timed_runs import Sample, Samples, timed_runs
from rocserve_tools.measuring.workload import MadeSamples, Workload, drawn_lengths, workload

_ROUNDS = 5
_COMPARED = 4
"""Batches of unlike lengths whose outputs are compared: all of them may need much memory."""


@dataclass(frozen=True, slots=True)
class Compared:
    latency: LatencySummary | None = None
    """None = the candidate could not run."""
    differences: tuple[Difference, ...] = ()
    """Difference of each output from the first candidate's; empty = this or the first candidate could not run."""
    failure: str = ""


class Comparison:
    """Compares candidates with the first one."""

    def __init__(self, lengths: Sequence[WrittenLengths] = ()) -> None:
        self._lengths = lengths
        self.open: dict[str, OpenCandidate] = {}
        self.failures: dict[str, str] = {}
        """Reasons of the candidates that are not available."""

    async def add(self, name: str, prepare: Callable[[], Candidate], workers: ToolWorkers) -> None:
        """Open a candidate. Raises ServeError if it is the first one and cannot be opened."""
        candidate = None
        try:
            candidate = prepare()
            self.open[name] = await candidate.open(workers, self.inputs, lengths=self._lengths)
        except ServeError as error:
            if not self.open:
                raise
            self.failures[name] = error.text if candidate else f"{name}: {error.text}"

    @property
    def inputs(self) -> Inputs:
        """Inputs of the first candidate; empty before it is open."""
        return next((one.inputs for one in self.open.values()), {})

    @property
    def drawn(self) -> Mapping[str, DrawnLengths]:
        """Lengths of the workload's requests, by dimension; empty if they have one shape."""
        return drawn_lengths(next(iter(self.open.values())))

    def workload(self, batch_size: int) -> Workload:
        """Return what all candidates run if there are no samples, as the first one's server would form it."""
        return workload(next(iter(self.open.values())), batch_size)

    async def compare(self, batch_size: int, made: Workload | Sequence[Sample], timing: Timing) -> dict[str, Compared]:
        """Run all opened candidates on a workload or on samples, and return their results by name. The whole workload,
        or the first sample, is timed."""
        failures: dict[str, str] = {}
        outputs: dict[str, list[Sequence[Array]]] = {}
        timed: dict[str, Samples] = {}
        for name, one in self.open.items():
            try:
                if batch_size not in one.inputs:
                    raise invalid_argument(f"{name}: cannot run batch size {batch_size} of this model")
                inputs = one.inputs[batch_size]
                if isinstance(made, Workload):
                    timed[name] = samples = MadeSamples(made, inputs)
                    compared = [*islice(samples, _COMPARED)]
                else:
                    compared = [{item.name: run[item.name] for item in inputs if item.name in run} for run in made]
                    timed[name] = compared[:1]
                outputs[name] = [(await timed_runs(one.workers, (run,), 1)).outputs for run in compared]
            except ServeError as error:
                failures[name] = error.text
        differences: dict[str, tuple[Difference, ...]] = {}
        reference = outputs.get(next(iter(self.open)), [])
        for name, actual in outputs.items() if reference else ():
            shapes, expected = ([list(output.shape) for run in side for output in run] for side in (actual, reference))
            if shapes == expected:
                by_output = zip(zip(*actual, strict=True), zip(*reference, strict=True), strict=True)
                differences[name] = tuple(difference(*sides) for sides in by_output)
            else:
                failures[name] = f"{name}: answers with outputs of shapes {shapes}, not {expected}"
        latencies = await self._timed({name: run for name, run in timed.items() if name not in failures}, timing)
        return {
            name: Compared(
                summarise(latencies[name]) if name in latencies else None,
                differences.get(name, ()),
                failures.get(name, ""),
            )
            for name in self.open
        }

    async def _timed(self, runs: Mapping[str, Samples], timing: Timing) -> dict[str, list[float]]:
        """Run the candidates in rounds, each second round from the last one to the first, and return the latencies in
        seconds. Raises ServeError if a run fails."""
        for name, samples in runs.items() if timing.warm_up else ():
            await timed_runs(self.open[name].workers, samples, timing.warm_up)
        repeats, seconds = math.ceil(timing.repeats / _ROUNDS), timing.seconds / _ROUNDS
        latencies: dict[str, list[float]] = {name: [] for name in runs}
        for place in range(min(_ROUNDS, timing.repeats)):
            for name in list(runs)[:: -1 if place % 2 else 1]:
                latencies[name] += (await timed_runs(self.open[name].workers, runs[name], repeats, seconds)).latencies
        return latencies
