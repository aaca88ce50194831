"""Measures a model at each batch size and number of instances and, with --lengths, also padded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rocserve.backends.written_sizes import SIZES, half_steps
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.load_check import LoadCheckMode
from rocserve.verbs.engines import CPU, ONNXRUNTIME
from rocserve.verbs.model_choice import ToolModel
from rocserve.verbs.printing import ToolProgress, counted
from rocserve.verbs.workers import ToolWorkers
from rocserve_tools.measuring.candidates import OpenCandidate, prepare
from rocserve_tools.measuring.figures import LatencySummary, Timing, summarise
from rocserve_tools.measuring.lengths import DrawnLengths, WrittenLengths
from rocserve_tools.measuring.timed_runs import timed_runs
from rocserve_tools.measuring.workload import MadeSamples, drawn_lengths, workload


@dataclass(frozen=True, slots=True)
class Measurement:
    batch_size: int
    """0 = the model does not batch, and a run is one request."""
    instances: int
    latency: LatencySummary
    """Latency of a batch while all instances run."""
    throughput: float
    """Rows per second of all instances together."""
    rows: float
    """Mean rows of a batch: fewer than the batch size if requests of unlike lengths do not share batches."""
    padded: float | None = None
    """Padded elements for each real one; None = nothing is padded."""
    sizes: str = ""
    """The parameter `sizes` that was tried; "" = as the model is configured."""


def setting(one: Measurement) -> str:
    instances = counted(one.instances, "instance")
    padded = f', {SIZES} "{one.sizes}"' if one.sizes else ""
    return (f"batch size {one.batch_size}, {instances}" if one.batch_size else instances) + padded


@dataclass
class Sweep:
    """What was measured so far."""

    model: ToolModel
    engine: str
    lengths: Sequence[WrittenLengths]
    timing: Timing
    progress: ToolProgress
    description: str = field(default="", init=False)
    """The engine's: "MIGraphX 2.14.0 (c_api)"."""
    measurements: list[Measurement] = field(default_factory=list, init=False)
    failures: list[str] = field(default_factory=list, init=False)
    """The reasons of settings that could not be measured."""
    drawn: Mapping[str, DrawnLengths] = field(default_factory=dict, init=False)
    """The lengths of the requests, by dimension."""
    sizes: str = field(default="", init=False)
    """What is tried as the parameter `sizes`; "" = nothing."""
    sizes_not_tried: str = field(default="", init=False)
    """Why `sizes` could not be tried; "" = it was, or there was no reason to."""
    _is_checked: bool = field(default=False, init=False)
    """Whether the load check has nothing against `sizes`."""

    def run(self, instances: Sequence[int]) -> None:
        """Measure each setting. Raises ServeError if the engine cannot be opened for the first number of instances."""
        for count in sorted(instances):
            try:
                asyncio.run(self._measure(count, self.model))
            except ServeError as error:
                if not self.measurements:
                    raise
                self.failures.append(f"{counted(count, 'instance')}: {error.text}")
            if self.sizes:
                self._run_padded(count)

    def _run_padded(self, count: int) -> None:
        model = self.model.with_parameters(sizes=self.sizes)
        try:
            if not self._is_checked:
                asyncio.run(self._check_padding(model))
                self._is_checked = True
            asyncio.run(self._measure(count, model, self.sizes))
        except ServeError as error:
            if self._is_checked:
                self.failures.append(f"{counted(count, 'instance')}, padded: {error.text}")
            else:
                self.sizes, self.sizes_not_tried = "", error.text

    async def _check_padding(self, model: ToolModel) -> None:
        """Raises ServeError if the engine does not pad, or if the load check finds or fears that answers change."""
        strict = prepare(model.with_parameters(load_check=LoadCheckMode.STRICT.value), self.engine)
        async with ToolWorkers(model.source.settings, self.progress.report) as workers:
            loaded = await workers.load(*strict.placed.planned())
            if not loaded.signature.padding.dimensions:
                raise invalid_argument("ONNX Runtime pads only on the CPU")
            if doubts := loaded.signature.dependent_rows or loaded.load_check.warning:
                raise invalid_argument(doubts)

    async def _measure(self, count: int, model: ToolModel, sizes: str = "") -> None:
        title = counted(count, "instance") + (", padded" if sizes else "")
        self.progress.report(f"opening {title}")
        async with ToolWorkers(model.source.settings, self.progress.report) as workers:
            opened = await prepare(model, self.engine).open(workers, {}, count, self.lengths)
            if not self.description:
                self.description, self.drawn = opened.description, drawn_lengths(opened)
                self.sizes = self._proposed(opened)
            # Without a limit in the configuration, an engine's limit is what fits into memory now.
            known = {one.batch_size for one in self.measurements if one.instances == count}
            tried = {size: inputs for size, inputs in opened.inputs.items() if not sizes or size in known}
            self.progress.steps(len(tried))
            for batch_size, inputs in tried.items():
                self.progress.report(f"timing batch size {batch_size}, {title}")
                made, timing = workload(opened, batch_size), self.timing
                samples = MadeSamples(made, inputs)
                if timing.warm_up:
                    await timed_runs(opened.workers, samples, timing.warm_up)
                runs = await timed_runs(opened.workers, samples, timing.repeats, timing.seconds)
                latency = summarise(runs.latencies)
                rate = count * made.rows * 1e3 / latency.mean
                self.measurements.append(Measurement(batch_size, count, latency, rate, made.rows, made.padded, sizes))
                self.progress.done()

    def _proposed(self, opened: OpenCandidate) -> str:
        """Return what to try as the parameter `sizes`: ONNX Runtime needs no programs for them. The longest request
        must have a size, because a server refuses longer ones."""
        is_written = SIZES in self.model.source.config.parameters
        if self.engine not in (ONNXRUNTIME, CPU) or is_written or max(opened.inputs) < 2:
            return ""
        return "; ".join(f"{label}={','.join(map(str, half_steps(law.largest)))}" for label, law in opened.laws.items())
