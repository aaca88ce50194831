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
    """What one contender did in one round; latencies are seconds, None where there is no request to time."""

    rate: float
    """In the case's unit."""
    p50: float | None = None
    p99: float | None = None
    cpu: float | None = None
    """CPU seconds of the contender a request, user and system: which others disturb less than the clock."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A value over the rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Raises statistics.StatisticsError for no values."""
        return Spread(median(values), min(values), max(values))


def ratio(quantity: Quantity, ours: Sequence[Measurement], peer: Sequence[Measurement]) -> Spread | None:
    """rocserve against a peer, round by round: what disturbs the machine for long disturbs both sides of a pair.

    More than 1 means that rocserve is better. None where a side has no such quantity.

    Raises:
        ValueError: the two have not as many rounds.
    """
    pairs = list(zip(ours, peer, strict=True))
    if quantity is Quantity.RATE:
        return Spread.of([mine.rate / theirs.rate for mine, theirs in pairs])
    costs = [(cost(quantity, mine), cost(quantity, theirs)) for mine, theirs in pairs]
    known = [(mine, theirs) for mine, theirs in costs if mine and theirs]
    if len(known) < len(pairs):
        return None
    return Spread.of([theirs / mine for mine, theirs in known])


def added_seconds(ours: Sequence[Measurement], peer: Sequence[Measurement], units_per_request: float) -> Spread:
    """How much longer than a peer rocserve takes for a request on the whole, round by round.

    Raises:
        ValueError: the two have not as many rounds.
    """
    pairs = zip(ours, peer, strict=True)
    return Spread.of([units_per_request / mine.rate - units_per_request / theirs.rate for mine, theirs in pairs])


def cost(quantity: Quantity, measurement: Measurement) -> float | None:
    """The quantity of which less is better."""
    return measurement.p50 if quantity is Quantity.P50 else measurement.cpu
