"""Figures of measurements: latencies, and differences between outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rocserve.load_check.tensors import Array
from rocserve.settings.flag import AMOUNT, POSITIVE, flag, number
from rocserve.verbs.check.errors import distances_of


@dataclass(frozen=True, slots=True)
class Timing:
    warm_up: int = flag(3, AMOUNT, "runs before the timed ones")
    repeats: int = flag(10, POSITIVE, "least number of timed runs")
    seconds: float = flag(2.0, number("S", 0, float), "least time for which each setting is timed")


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Holds latency figures in milliseconds, under their names in tables and JSON."""

    runs: int
    min: float
    mean: float
    p50: float
    p95: float
    p99: float
    std: float


def summarise(seconds: Sequence[float]) -> LatencySummary:
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    figures = (values.min(), values.mean(), *np.percentile(values, (50, 95, 99)), values.std())
    return LatencySummary(len(seconds), *map(float, figures))


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
    distance = distances_of(actual, expected)
    assert distance is not None, "both sides have one shape"
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
