"""Runs a model in several engines beside each other: what each answers, against the first, and how long it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory

import numpy as np

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.tools.measuring.process import (
    Array,
    Engine,
    LatencySummary,
    Measure,
    MeasuredInput,
    MeasuringProcess,
    Opened,
    Timing,
    read_outputs,
    summarise,
    time_interleaved,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one output over all samples."""

    largest: float
    """The largest absolute difference; infinite where one has a NaN or infinity that the other has not."""
    mean: float
    """The mean absolute difference."""
    relative: float
    """The norm of the difference over the norm of the reference."""
    cosine: float
    """Of the angle between both as vectors: 1 = the same direction."""
    top1: float | None
    """The share of rows whose largest element is at the same place; None where rows have one element only."""


def difference(results: Sequence[Array], references: Sequence[Array]) -> Difference:
    """Of as many of both, each pair of one shape; the first dimension counts rows."""
    sides = [
        [one.astype(np.float64).reshape(one.shape[0] if one.ndim > 1 else 1, -1) for one in side]
        for side in (results, references)
    ]
    top1 = None
    if any(rows.shape[1] > 1 for rows in sides[1]):
        best = (np.concatenate([rows.argmax(axis=1) for rows in side]) for side in sides)
        top1 = float(np.mean(np.equal(*best)))
    given, expected = (np.concatenate([rows.ravel() for rows in side]) for side in sides)
    norms = float(np.linalg.norm(given) * np.linalg.norm(expected))
    if np.array_equal(given, expected, equal_nan=True):
        cosine = 1.0
    elif not np.isfinite(norms):
        cosine = float("nan")
    else:
        cosine = float(np.dot(given, expected)) / norms if norms else 0.0
    # Equal infinities and NaNs are no difference; what only one side has is an infinite one.
    same = (given == expected) | (np.isnan(given) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(given - expected))
    distance = np.where(np.isnan(distance), np.inf, distance)
    if not distance.size:
        return Difference(0.0, 0.0, 0.0, cosine, top1)
    norm, scale = float(np.linalg.norm(distance)), float(np.linalg.norm(expected[np.isfinite(expected)]))
    relative = norm / scale if scale else (0.0 if norm == 0 else float("inf"))
    return Difference(float(distance.max()), float(distance.mean()), relative, cosine, top1)


def worst(differences: Sequence[Difference]) -> Difference:
    """Of several outputs: of each figure the one that is furthest from agreement."""
    top1 = [one.top1 for one in differences if one.top1 is not None]
    return Difference(
        largest=max(one.largest for one in differences),
        mean=max(one.mean for one in differences),
        relative=max(one.relative for one in differences),
        cosine=min(one.cosine for one in differences),
        top1=min(top1) if top1 else None,
    )


Inputs = Mapping[int, tuple[MeasuredInput, ...]]
"""By batch size; 0 = the model does not batch."""
RANDOM_SAMPLE = ""
"""In place of a file's name: inputs that are the same for each engine."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in an engine, yet to be opened."""

    name: str
    engine: Engine
    inputs: Callable[[Opened, Inputs], Inputs]
    """Of what was opened, and of the inputs of the first candidate."""
    python: tuple[str, ...] = (sys.executable,)
    """The words that start its process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    """What errors begin with; "" = its name."""
    shares_a_process: bool = False
    """Whether several instances are threads of one process; else each has its own, as in a server."""

    def process(self) -> MeasuringProcess:
        return MeasuringProcess(self.title or self.name, self.python, self.environment)


@dataclass(frozen=True, slots=True)
class Compared:
    """One candidate at one batch size."""

    latency: LatencySummary | None = None
    """None where it could not run."""
    differences: tuple[Difference, ...] = ()
    """Of each output from the first candidate's, over all samples; empty where that could not run."""
    failure: str = ""


class Comparison:
    """Candidates by their names, whose processes are open for as long as the stack is. The first is what the others are
    compared with."""

    def __init__(
        self, candidates: Mapping[str, Callable[[], Candidate]], stack: ExitStack, report: Callable[[str], None]
    ) -> None:
        """`candidates`: what makes each, or raises ServeError. Raises: ServeError: the first one cannot be had."""
        self.descriptions: dict[str, str] = {}
        """What runs it, of each that could be opened."""
        self.failures: dict[str, str] = {}
        """Why not, of the others."""
        self.inputs: dict[str, Inputs] = {}
        self._processes: dict[str, MeasuringProcess] = {}
        for name, candidate_of in candidates.items():
            candidate = None
            try:
                candidate = candidate_of()
                report(f"opening {name}")
                process = stack.enter_context(candidate.process())
                opened = process.open(candidate.engine)
                self.inputs[name] = candidate.inputs(opened, next(iter(self.inputs.values()), {}))
                self.descriptions[name], self._processes[name] = opened.description, process
            except ServeError as error:
                if not self._processes:
                    raise
                self.failures[name] = error.text if candidate else f"{name}: {error.text}"

    def compare(self, batch_size: int, samples: Sequence[str], timing: Timing) -> dict[str, Compared]:
        """Each that is open, by its name. `samples`: files of inputs, of which the first is timed."""
        failures: dict[str, str] = {}
        outputs: dict[str, list[list[Array]]] = {}
        orders: dict[str, Measure] = {}
        with TemporaryDirectory(prefix="rocserve-outputs-") as folder:
            for name, process in self._processes.items():
                file = f"{folder}/{name}.npz"
                try:
                    if batch_size not in self.inputs[name]:
                        raise invalid_argument(f"{name}: cannot run batch size {batch_size} of this model")
                    orders[name] = Measure(self.inputs[name][batch_size], data_file=samples[0])
                    runs = []
                    for sample in samples:
                        process.measure(replace(orders[name], data_file=sample, repeats=0, outputs_file=file))
                        runs.append(read_outputs(file))
                    outputs[name] = runs
                except ServeError as error:
                    failures[name] = error.text
        differences: dict[str, tuple[Difference, ...]] = {}
        first = next(iter(self._processes))
        for name, given in outputs.items() if first in outputs else ():
            reference = outputs[first]
            shapes, expected = ([list(output.shape) for run in side for output in run] for side in (given, reference))
            if shapes == expected:
                by_output = zip(zip(*given, strict=True), zip(*reference, strict=True), strict=True)
                differences[name] = tuple(difference(*sides) for sides in by_output)
            else:
                failures[name] = f"{name}: answers with outputs of shapes {shapes}, not {expected}"
        orders = {name: order for name, order in orders.items() if name not in failures}
        latencies = time_interleaved(self._processes, orders, timing) if orders else {}
        return {
            name: Compared(
                summarise(latencies[name]) if name in latencies else None,
                differences.get(name, ()),
                failures.get(name, ""),
            )
            for name in self._processes
        }
