"""Compares a model's outputs and latencies in several engines."""

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
    """Holds the difference of one output from its reference, over all samples."""

    largest: float
    """Largest absolute difference; infinite if only one side has a NaN or an infinity."""
    mean: float
    relative: float
    """Norm of the difference divided by the norm of the reference."""
    cosine: float
    """Cosine of the angle between both outputs as vectors; 1 = the same direction."""
    top1: float | None
    """Share of rows whose largest element has the same index; None = rows have one element."""


def difference(results: Sequence[Array], references: Sequence[Array]) -> Difference:
    """Return the difference. Both sides have the same number of arrays, and each pair has the same shape. The first
    dimension counts rows."""
    sides = [
        [one.astype(np.float64).reshape(one.shape[0] if one.ndim > 1 else 1, -1) for one in side]
        for side in (results, references)
    ]
    top1 = None
    if any(rows.shape[1] > 1 for rows in sides[1]):
        best = (np.concatenate([rows.argmax(axis=1) for rows in side]) for side in sides)
        top1 = float(np.mean(np.equal(*best)))
    actual, expected = (np.concatenate([rows.ravel() for rows in side]) for side in sides)
    norms = float(np.linalg.norm(actual) * np.linalg.norm(expected))
    if np.array_equal(actual, expected, equal_nan=True):
        cosine = 1.0
    elif not np.isfinite(norms):
        cosine = float("nan")
    else:
        cosine = float(np.dot(actual, expected)) / norms if norms else 0.0
    # Equal infinities and NaNs are no difference. A NaN or infinity on one side only is an infinite difference.
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(actual - expected))
    distance = np.where(np.isnan(distance), np.inf, distance)
    if not distance.size:
        return Difference(0.0, 0.0, 0.0, cosine, top1)
    norm, scale = float(np.linalg.norm(distance)), float(np.linalg.norm(expected[np.isfinite(expected)]))
    relative = norm / scale if scale else (0.0 if norm == 0 else float("inf"))
    return Difference(float(distance.max()), float(distance.mean()), relative, cosine, top1)


def worst(differences: Sequence[Difference]) -> Difference:
    top1 = [one.top1 for one in differences if one.top1 is not None]
    return Difference(
        largest=max(one.largest for one in differences),
        mean=max(one.mean for one in differences),
        relative=max(one.relative for one in differences),
        cosine=min(one.cosine for one in differences),
        top1=min(top1) if top1 else None,
    )


Inputs = Mapping[int, tuple[MeasuredInput, ...]]
"""Inputs by batch size; 0 = the model does not batch."""
RANDOM_SAMPLE = ""
"""Stands for a file name: random inputs, the same for each engine."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Describes a model in an engine that is not opened yet."""

    name: str
    engine: Engine
    inputs: Callable[[Opened, Inputs], Inputs]
    """Makes the inputs from the opened engine and the first candidate's inputs."""
    python: tuple[str, ...] = (sys.executable,)
    """The interpreter's command line."""
    environment: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    """Prefix of error texts; "" = the name."""
    shares_a_process: bool = False
    """Whether all instances are threads of one process, as in a server if the files have more than 4 MiB."""

    def process(self) -> MeasuringProcess:
        return MeasuringProcess(self.title or self.name, self.python, self.environment)


@dataclass(frozen=True, slots=True)
class Compared:
    latency: LatencySummary | None = None
    """None = the candidate could not run."""
    differences: tuple[Difference, ...] = ()
    """Difference of each output from the first candidate's; empty = this or the first candidate could not run."""
    failure: str = ""


class Comparison:
    """Opens candidates by name and compares them with the first one. Their processes run until the stack is closed."""

    def __init__(
        self, candidates: Mapping[str, Callable[[], Candidate]], stack: ExitStack, report: Callable[[str], None]
    ) -> None:
        """Open each candidate. Raises ServeError if the first one is unavailable."""
        self.descriptions: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        """Reasons of the unavailable candidates."""
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
        """Run all opened candidates and return their results by name. The first file of `samples` is timed."""
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
        for name, actual in outputs.items() if first in outputs else ():
            reference = outputs[first]
            shapes, expected = ([list(output.shape) for run in side for output in run] for side in (actual, reference))
            if shapes == expected:
                by_output = zip(zip(*actual, strict=True), zip(*reference, strict=True), strict=True)
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
