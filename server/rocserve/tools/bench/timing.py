"""Times candidates in turns and compares what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.plain import to_json
from rocserve.tools.bench.candidates import Candidate, Candidates
from rocserve.tools.differences import Array, Difference, difference, worst
from rocserve.tools.measuring.files import read_outputs
from rocserve.tools.measuring.process import MeasuringProcess
from rocserve.tools.measuring.rounds import LatencySummary, Timing, summarise, time_interleaved
from rocserve.tools.progress import ToolProgress


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """One engine at one batch size."""

    engine: str
    batch_size: int
    """0 = the model does not batch."""
    latency: LatencySummary | None
    """None where it could not run."""
    throughput: float
    """Rows a second (runs, where the model does not batch)."""
    speed: float
    """Its throughput over the first engine's."""
    difference: Difference | None
    """Of its outputs from the first engine's, the worst of each figure; None of the first itself."""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class BenchResult:
    model: str
    engines: Mapping[str, str]
    """By name, what runs it or why it cannot be had."""
    times: tuple[EngineTimes, ...]
    missing: tuple[str, ...]
    """The engines that could not be opened."""

    def json(self) -> str:
        return to_json(self).decode()


def bench(model_name: str, candidates: Candidates, timing: Timing, progress: ToolProgress) -> BenchResult:
    """Time all of them at each batch size of the first.

    Raises:
        ServeError: the first one cannot be opened.
    """
    first = candidates.available[0]
    descriptions: dict[str, str] = {}
    missing = dict(candidates.missing)
    processes: dict[str, MeasuringProcess] = {}
    with ExitStack() as stack:
        for candidate in candidates.available:
            progress.report(f"opening {candidate.name}")
            try:
                process = stack.enter_context(MeasuringProcess(candidate.name, candidate.python, candidate.environment))
                descriptions[candidate.name] = process.open(candidate.engine).description
            except ServeError as error:
                if candidate is first:
                    raise
                missing[candidate.name] = error.text
            else:
                processes[candidate.name] = process
        runnable = [candidate for candidate in candidates.available if candidate.name in processes]
        progress.steps(len(first.inputs))
        times: list[EngineTimes] = []
        for batch_size in first.inputs:
            times += _Round(runnable, processes, batch_size, timing, progress).times()
            progress.done()
    return BenchResult(model_name, {**descriptions, **missing}, tuple(times), tuple(missing))


class _Round:
    """One batch size."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        processes: Mapping[str, MeasuringProcess],
        batch_size: int,
        timing: Timing,
        progress: ToolProgress,
    ) -> None:
        self._candidates = candidates
        self._processes = processes
        self._batch_size = batch_size
        self._timing = timing
        self._failures: dict[str, str] = {}
        progress.report(f"batch size {batch_size}: timing" if batch_size else "timing")

    def times(self) -> list[EngineTimes]:
        with TemporaryDirectory(prefix="rocserve-bench-") as folder:
            differences = self._differences(Path(folder))
        names = [one.name for one in self._candidates if one.name not in self._failures]
        orders = {one.name: one.order(self._batch_size) for one in self._candidates if one.name in names}
        latencies = time_interleaved(self._processes, orders, self._timing) if orders else {}
        summaries = {name: summarise(seconds) for name, seconds in latencies.items()}
        rates = {name: max(1, self._batch_size) * 1e3 / summary.mean for name, summary in summaries.items()}
        reference = rates.get(self._candidates[0].name, 0.0)
        return [
            EngineTimes(
                engine=one.name,
                batch_size=self._batch_size,
                latency=summaries.get(one.name),
                throughput=rates.get(one.name, 0.0),
                speed=rates.get(one.name, 0.0) / reference if reference else 0.0,
                difference=differences.get(one.name),
                failure=self._failures.get(one.name, ""),
            )
            for one in self._candidates
        ]

    def _differences(self, folder: Path) -> dict[str, Difference]:
        """Runs each once, which shows who can run this batch size at all."""
        outputs: dict[str, list[Array]] = {}
        for one in self._candidates:
            try:
                outputs[one.name] = self._outputs(one, folder / f"{one.name}.npz")
            except ServeError as error:
                self._failures[one.name] = error.text
        reference = outputs.pop(self._candidates[0].name, None)
        if reference is None:
            return {}
        differences = {}
        for name, given in outputs.items():
            shapes, expected = ([list(output.shape) for output in side] for side in (given, reference))
            if shapes == expected:
                differences[name] = worst([difference([pair]) for pair in zip(given, reference, strict=True)])
            else:
                self._failures[name] = f"{name}: answers with outputs of shapes {shapes}, not {expected}"
        return differences

    def _outputs(self, one: Candidate, file: Path) -> list[Array]:
        if self._batch_size not in one.inputs:
            raise invalid_argument(f"{one.name}: cannot run batch size {self._batch_size} of this model")
        order = replace(one.order(self._batch_size), repeats=1, outputs_file=str(file))
        self._processes[one.name].measure(order)
        return read_outputs(str(file))
