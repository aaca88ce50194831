"""Times several engines in turns, so that what changes on the machine meanwhile changes all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rocserve.settings.flag import AMOUNT, POSITIVE, flag, number
from rocserve.tools.measuring.messages import Measure
from rocserve.tools.measuring.process import MeasuringProcess


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Milliseconds, by the names that tables and JSON have for them."""

    runs: int
    min: float
    mean: float
    p50: float
    p95: float
    p99: float
    std: float
    """Standard deviation over all that was measured."""


def summarise(seconds: Sequence[float]) -> LatencySummary:
    """
    Raises:
        ValueError: there is nothing to summarise.
    """
    if not seconds:
        raise ValueError("no times were measured")
    milliseconds = np.asarray(seconds, dtype=np.float64) * 1e3
    p50, p95, p99 = (float(value) for value in np.percentile(milliseconds, (50, 95, 99)))
    return LatencySummary(
        runs=len(seconds),
        min=float(milliseconds.min()),
        mean=float(milliseconds.mean()),
        p50=p50,
        p95=p95,
        p99=p99,
        std=float(milliseconds.std()),
    )


_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to measure."""

    warm_up: int = flag(3, AMOUNT, "runs before those that count")
    repeats: int = flag(10, POSITIVE, "runs that count, at least")
    seconds: float = flag(2.0, number("S", 0, float), "measure each setting for at least so long")


def time_interleaved(
    processes: Mapping[str, MeasuringProcess], orders: Mapping[str, Measure], timing: Timing
) -> dict[str, list[float]]:
    """The latencies, in seconds, of each process's order; who begins changes from round to round.

    Raises:
        ServeError: a run failed.
    """
    for name, order in orders.items():
        if timing.warm_up:
            processes[name].measure(replace(order, repeats=timing.warm_up, seconds=0.0))
    share = Timing(0, math.ceil(timing.repeats / _ROUNDS), timing.seconds / _ROUNDS)
    latencies: dict[str, list[float]] = {name: [] for name in orders}
    for names in _rounds(list(orders), timing):
        for name in names:
            order = replace(orders[name], repeats=share.repeats, seconds=share.seconds, outputs_file="")
            latencies[name] += processes[name].measure(order).latencies
    return latencies


def _rounds(names: Sequence[str], timing: Timing) -> Iterator[Sequence[str]]:
    for place in range(min(_ROUNDS, timing.repeats)):
        yield names if place % 2 == 0 else names[::-1]
