"""Measures a model's engine over numbers of instances and batch sizes, all instances at work at once.

An instance is what it is in a server: of ONNX Runtime on the CPU a thread on one session, else a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rocserve.core.errors import ServeError
from rocserve.tools.measuring.comparing import Candidate
from rocserve.tools.measuring.messages import Measure, Measured
from rocserve.tools.measuring.process import MeasuringProcess
from rocserve.tools.measuring.rounds import LatencySummary, Timing, summarise
from rocserve.tools.progress import ToolProgress


@dataclass(frozen=True, slots=True)
class Measurement:
    """One setting of the sweep."""

    batch_size: int
    """0 = the model does not batch: a run is one request."""
    instances: int
    latency: LatencySummary
    """Of a batch, with all instances at work."""
    throughput: float
    """Rows a second, of all instances together."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    measurement: Measurement
    reason: str
    """Goes on after "recommended: batch size 8, 2 instances, "."""


def recommend(measurements: Sequence[Measurement], latency_budget_ms: float | None) -> Recommendation:
    """With a budget: the highest throughput whose 95th percentile is within it. Without: the knee.

    Raises:
        ValueError: nothing was measured, or nothing is within the budget.
    """
    if not measurements:
        raise ValueError("nothing was measured")
    if latency_budget_ms is None:
        best = knee(measurements)
        if best.throughput == max(one.throughput for one in measurements):
            return Recommendation(best, "the highest throughput; no lower latency is worth what it costs of it")
        return Recommendation(best, "the knee of the curve: more throughput costs more in latency than it brings")
    within = [one for one in measurements if one.latency.p95 <= latency_budget_ms]
    if not within:
        fastest = min(measurements, key=lambda one: one.latency.p95)
        raise ValueError(
            f"no setting has a p95 latency within {latency_budget_ms:g} ms; the least is {fastest.latency.p95:.3f} ms,"
            f" of {setting(fastest)}"
        )
    best = max(within, key=lambda one: (one.throughput, -one.latency.p95))
    return Recommendation(best, f"the highest throughput with a p95 latency within {latency_budget_ms:g} ms")


def front(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those that no other one beats in both, by rising latency and so by rising throughput."""
    best: list[Measurement] = []
    for one in sorted(measurements, key=lambda one: (one.latency.p95, -one.throughput)):
        if not best or one.throughput > best[-1].throughput:
            best.append(one)
    return best


def knee(measurements: Sequence[Measurement]) -> Measurement:
    """Where the share of the best throughput is furthest above the share of its latency.

    That is the point of the front furthest from the line through the origin and the fastest setting.
    """
    curve = front(measurements)
    end = curve[-1]

    def gain(one: Measurement) -> float:
        return one.throughput / end.throughput - one.latency.p95 / end.latency.p95

    return max(curve, key=gain)


def setting(one: Measurement) -> str:
    """In words: batch size 8, 2 instances."""
    instances = "1 instance" if one.instances == 1 else f"{one.instances} instances"
    return f"batch size {one.batch_size}, {instances}" if one.batch_size else instances


_HEAD_START_SECONDS = 0.05
"""From the order to begin to the beginning, so that all begin together."""


@dataclass(frozen=True, slots=True)
class Sweep:
    description: str
    """What ran it: "MIGraphX 2.14.0 (c_api)"."""
    measurements: tuple[Measurement, ...]
    failures: tuple[str, ...]
    """Of settings that could not be measured."""


def sweep(
    candidate_of: Callable[[int], Candidate], instances: Sequence[int], timing: Timing, progress: ToolProgress
) -> Sweep:
    """
    `candidate_of`: the engine for a number of instances.

    Raises:
        ServeError: the engine cannot be opened for one instance.
    """
    found: list[Measurement] = []
    failures: list[str] = []
    description = ""
    for number in sorted(instances):
        candidate = candidate_of(number)
        progress.report(f"opening {_instances(number)}")
        try:
            with ExitStack() as stack:
                processes = _open(stack, candidate, number)
                description = processes[-1].open(candidate.engine).description
                for process in processes[:-1]:
                    process.open(candidate.engine)
                progress.steps(len(candidate.inputs))
                for batch_size in candidate.inputs:
                    progress.report(f"timing batch size {batch_size}, {_instances(number)}")
                    found.append(_measured(candidate, processes, number, batch_size, timing))
                    progress.done()
        except ServeError as error:
            if not found:
                raise
            failures.append(f"{_instances(number)}: {error.text}")
    return Sweep(description, tuple(found), tuple(failures))


def _open(stack: ExitStack, candidate: Candidate, number: int) -> list[MeasuringProcess]:
    return [
        stack.enter_context(MeasuringProcess(candidate.name, candidate.python, candidate.environment))
        for _ in range(1 if candidate.shares_a_process else number)
    ]


def _measured(
    candidate: Candidate, processes: Sequence[MeasuringProcess], number: int, batch_size: int, timing: Timing
) -> Measurement:
    order = replace(candidate.order(batch_size), threads=number // len(processes))
    if timing.warm_up:
        _all(processes, replace(order, repeats=timing.warm_up))
    begin_at = time.monotonic() + _HEAD_START_SECONDS
    results = _all(processes, replace(order, repeats=timing.repeats, seconds=timing.seconds, begin_at=begin_at))
    rows = max(1, batch_size)
    return Measurement(
        batch_size=batch_size,
        instances=number,
        latency=summarise([latency for result in results for latency in result.latencies]),
        throughput=sum(len(result.latencies) * rows / result.elapsed for result in results),
    )


def _all(processes: Sequence[MeasuringProcess], order: Measure) -> list[Measured]:
    for process in processes:
        process.begin(order)
    return [process.measured() for process in processes]


def _instances(number: int) -> str:
    return "1 instance" if number == 1 else f"{number} instances"
