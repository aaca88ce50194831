from __future__ import annotations

import math

import numpy as np
import pytest

from rocserve.core.latencies import WINDOW_NS, Histogram, SlidingSummary

SECOND = 10**9
QUANTILES = (0.5, 0.9, 0.99)


def test_a_histogram_counts_what_is_at_most_its_bounds() -> None:
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 1.0, 1.1, 2.5, 2.6, 100.0):
        histogram.observe(value)
    reading = histogram.read()
    assert (reading.bounds, reading.cumulative, reading.count) == ((1.0, 2.5), (2, 4), 6)
    assert reading.total == pytest.approx(107.7)


def test_quantiles_are_within_a_hundredth() -> None:
    values = np.random.default_rng(0).lognormal(8, 1, 20_000).astype(np.int64)
    summary = SlidingSummary()
    for value in values.tolist():
        summary.observe(value, 5 * SECOND)
    reading = summary.read(QUANTILES, 6 * SECOND)
    assert (reading.count, reading.total) == (20_000, values.sum())
    for quantile, value in reading.quantiles:
        assert value == pytest.approx(np.quantile(values, quantile), rel=0.012)


def test_zero_is_zero_and_small_values_are_told_apart() -> None:
    summary = SlidingSummary()
    for value in (0, 0, 1, 3):
        summary.observe(value, 0)
    assert summary.read((0.0, 0.5, 0.75, 1.0), 0).quantiles == ((0.0, 0.0), (0.5, 0.0), (0.75, 1.0), (1.0, 3.0))


def test_several_at_once() -> None:
    summary = SlidingSummary()
    summary.observe(10, 0, times=9)
    summary.observe(1000, 0)
    reading = summary.read((0.9, 1.0), 0)
    assert (reading.count, reading.total) == (10, 1090)
    assert [value for _, value in reading.quantiles] == pytest.approx([10, 1000], rel=0.012)


def test_quantiles_forget_after_a_minute_and_sums_do_not() -> None:
    summary = SlidingSummary()
    summary.observe(100, 0)
    summary.observe(200, 30 * SECOND)
    assert summary.read((0.0,), 45 * SECOND).quantiles[0][1] == pytest.approx(100, rel=0.012)
    reading = summary.read((0.0,), 70 * SECOND)
    assert reading.quantiles[0][1] == pytest.approx(200, rel=0.012)
    assert (reading.count, reading.total) == (2, 300)
    assert math.isnan(summary.read((0.5,), 30 * SECOND + WINDOW_NS + 12 * SECOND).quantiles[0][1])


def test_what_is_kept_does_not_grow_with_the_values() -> None:
    summary = SlidingSummary()
    for step in range(300):
        for value in (1, 10, 100, 10**9):
            summary.observe(value, step * SECOND)
    assert sum(len(section) for section in summary._sections.values()) <= 5 * 4


def test_without_values_there_is_no_quantile() -> None:
    ((_, value),) = SlidingSummary().read((0.5,), 0).quantiles
    assert math.isnan(value)
