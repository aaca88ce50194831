"""The arithmetic of a comparison: medians over rounds, and ratios paired within each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.cases import Quantity

BARE = "bare"
"""The contender that makes the same engine calls without a server."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one contender did in one round; latencies are seconds, None if there is no request to time."""

    rate: float
    """In the case's unit."""
    p50: float | None = None
    p99: float | None = None
    cpu: float | None = None
    """CPU seconds of the contender for each request, user and system: other programs disturb them less than the
    clock."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A value over the rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Raises statistics.StatisticsError if there are no values."""
        return Spread(median(values), min(values), max(values))


def ratio(quantity: Quantity, ours: Sequence[Measurement], peer: Sequence[Measurement]) -> Spread | None:
    """rocserve compared with a peer, round by round: a lasting disturbance of the machine affects both sides of a pair.
    More than 1 means that rocserve is better. None if a side has no such quantity. Raises ValueError if the two have
    different numbers of rounds."""
    pairs = list(zip(ours, peer, strict=True))
    if quantity is Quantity.RATE:
        return Spread.of([mine.rate / theirs.rate for mine, theirs in pairs])
    costs = [(cost(quantity, mine), cost(quantity, theirs)) for mine, theirs in pairs]
    known = [(mine, theirs) for mine, theirs in costs if mine and theirs]
    if len(known) < len(pairs):
        return None
    return Spread.of([theirs / mine for mine, theirs in known])


def added_seconds(ours: Sequence[Measurement], peer: Sequence[Measurement], units_per_request: float) -> Spread:
    """The seconds that rocserve adds to a peer's time for a request, round by round. Raises ValueError if the two have
    different numbers of rounds."""
    pairs = zip(ours, peer, strict=True)
    return Spread.of([units_per_request / mine.rate - units_per_request / theirs.rate for mine, theirs in pairs])


def cost(quantity: Quantity, measurement: Measurement) -> float | None:
    """A quantity of which less is better."""
    return measurement.p50 if quantity is Quantity.P50 else measurement.cpu
