"""Which of the settings that were measured to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.tools.measuring.rounds import LatencySummary


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
