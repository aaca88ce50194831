"""Metrics that models define themselves: what a worker tells of them, and their sums over all workers of the server."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from rocserve.core.distributions import HistogramReading


class MetricKind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricChange:
    """What has become of one time series since it was told last. Changes, not values: several workers have the same
    series, and one that is restarted begins anew."""

    family: str
    kind: MetricKind
    help: str
    labels: Mapping[str, str]
    value: float = 0.0
    """What was added; of a histogram, the sum of what was observed."""
    is_set: bool = False
    """Of a gauge: `value` is what it is now."""
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """Of a histogram: how many values came into which bucket; one more than there are bounds."""


@dataclass(frozen=True, slots=True)
class MetricChanges:
    changes: tuple[MetricChange, ...]


@dataclass(slots=True)
class _Series:
    labels: Mapping[str, str]
    bounds: tuple[float, ...]
    value: float = 0.0
    counts: list[int] = field(default_factory=list)
    owners: set[Hashable] = field(default_factory=set)

    def read(self) -> float | HistogramReading:
        if not self.bounds:
            return self.value
        cumulative = [sum(self.counts[: index + 1]) for index in range(len(self.bounds))]
        return HistogramReading(self.bounds, tuple(cumulative), sum(self.counts), self.value)


@dataclass(frozen=True, slots=True)
class CustomFamily:
    """Time series of one name, as they are at one moment."""

    name: str
    kind: MetricKind
    help: str
    series: Sequence[tuple[Mapping[str, str], float | HistogramReading]]


@dataclass(slots=True)
class _Family:
    kind: MetricKind
    help: str
    series: dict[frozenset[tuple[str, str]], _Series] = field(default_factory=dict)


class CustomMetrics:
    """Of all models. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}

    def apply(self, owner: Hashable, changes: MetricChanges) -> Sequence[str]:
        """Take what a worker of a model version, the owner, tells.

        Returns:
            The names of families that are left out, for another model has one of that name and of another kind.
        """
        left_out: dict[str, None] = {}
        with self._lock:
            for change in changes.changes:
                family = self._families.setdefault(change.family, _Family(change.kind, change.help))
                series = family.series.setdefault(
                    frozenset(change.labels.items()), _Series(change.labels, change.bounds)
                )
                if family.kind is not change.kind or series.bounds != change.bounds:
                    left_out[change.family] = None
                    continue
                _add(series, change)
                series.owners.add(owner)
        return list(left_out)

    def forget(self, owner: Hashable) -> None:
        """The model version is gone; so are the series that only it had."""
        with self._lock:
            for name, family in list(self._families.items()):
                for key, series in list(family.series.items()):
                    series.owners.discard(owner)
                    if not series.owners:
                        del family.series[key]
                if not family.series:
                    del self._families[name]

    def read(self) -> Sequence[CustomFamily]:
        """In the order of their names."""
        with self._lock:
            return [
                CustomFamily(
                    name,
                    family.kind,
                    family.help,
                    [(series.labels, series.read()) for series in family.series.values() if series.owners],
                )
                for name, family in sorted(self._families.items())
            ]


class OwnedMetrics:
    """The share of one model version in them."""

    def __init__(self, metrics: CustomMetrics, owner_name: str, log: logging.Logger) -> None:
        self._metrics = metrics
        self._owner_name = owner_name
        self._log = log
        self._has_left = False
        self._told: set[str] = set()

    def apply(self, changes: MetricChanges) -> None:
        if self._has_left:
            return
        for name in self._metrics.apply(self, changes):
            if name not in self._told:
                self._told.add(name)
                self._log.warning(
                    "%s: its metric '%s' is left out, for another model has one of that name and of another kind, or"
                    " with other buckets",
                    self._owner_name,
                    name,
                )

    def forget(self) -> None:
        """The version is gone."""
        self._has_left = True
        self._metrics.forget(self)


def _add(series: _Series, change: MetricChange) -> None:
    series.value = change.value if change.is_set else series.value + change.value
    if change.counts:
        counts = series.counts or [0] * len(change.counts)
        series.counts = [old + new for old, new in zip(counts, change.counts, strict=False)]
