"""What many measured times say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
