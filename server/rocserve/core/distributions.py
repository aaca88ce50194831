"""How values are distributed: in fixed buckets since the beginning, and as quantiles of the last minute."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_NS = 60_000_000_000
"""The past that quantiles are of, as Triton's."""
_SECTIONS = 5
_SECTION_NS = WINDOW_NS // _SECTIONS
_DIGITS = 7
"""Leading bits of a value that tell its bucket: the middle of a bucket is within one hundredth of all that is in it."""


@dataclass(frozen=True, slots=True)
class HistogramReading:
    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    """How many values are at most each bound."""
    count: int
    total: float


class Histogram:
    """Counts values by the upper bounds of their buckets. Not thread-safe."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: rising."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> HistogramReading:
        cumulative: list[int] = []
        count = 0
        for number in self._counts[:-1]:
            count += number
            cumulative.append(count)
        return HistogramReading(self._bounds, tuple(cumulative), count + self._counts[-1], self._total)


@dataclass(frozen=True, slots=True)
class SummaryReading:
    quantiles: tuple[tuple[float, float], ...]
    """Quantile and value; NaN where the window has no values."""
    count: int
    """Of all values since the beginning."""
    total: int


class SlidingSummary:
    """Quantiles of the values of the last minute, count and sum of all. Not thread-safe.

    Values are counted in buckets that grow with them, a set of buckets for each fifth of the window: the memory does
    not grow with the number of values.
    """

    __slots__ = ("_count", "_sections", "_total")

    def __init__(self) -> None:
        self._sections: dict[int, dict[int, int]] = {}
        """By number of the section: how many values in which bucket."""
        self._count = 0
        self._total = 0

    def observe(self, value: int, at_ns: int, times: int = 1) -> None:
        """`times` values that are all `value` >= 0, seen at a time of the monotonic clock."""
        self._count += times
        self._total += value * times
        number = at_ns // _SECTION_NS
        section = self._sections.get(number)
        if section is None:
            section = self._sections[number] = {}
            self._forget(number)
        shift = value.bit_length() - _DIGITS
        bucket = shift << _DIGITS | value >> shift if shift > 0 else value
        section[bucket] = section.get(bucket, 0) + times

    def read(self, quantiles: Sequence[float], now_ns: int) -> SummaryReading:
        self._forget(now_ns // _SECTION_NS)
        merged: dict[int, int] = {}
        for section in self._sections.values():
            for bucket, number in section.items():
                merged[bucket] = merged.get(bucket, 0) + number
        ordered = sorted(merged.items())
        values = tuple((quantile, _value_at(quantile, ordered)) for quantile in quantiles)
        return SummaryReading(values, self._count, self._total)

    def _forget(self, newest: int) -> None:
        for number in [number for number in self._sections if number <= newest - _SECTIONS]:
            del self._sections[number]


def _value_at(quantile: float, ordered: Sequence[tuple[int, int]]) -> float:
    rank = max(1, math.ceil(quantile * sum(number for _, number in ordered)))
    for bucket, number in ordered:
        rank -= number
        if rank <= 0:
            shift = bucket >> _DIGITS
            lowest = bucket & (1 << _DIGITS) - 1
            return float((lowest << shift) + (1 << shift) // 2)
    return math.nan
