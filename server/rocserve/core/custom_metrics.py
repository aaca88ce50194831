"""Sums the metrics that models define themselves over all workers of the server."""

from __future__ import annotations

import enum
import itertools
import logging
import math
import re
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rocserve.core.latencies import HistogramReading, SummaryReading

METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
RESERVED_PREFIXES = ("nv_", "rocserve_")
"""Prefixes of the server's own metrics."""

_MOST_SERIES = 10_000
"""Limit per model version: scrapes print all series, and a label with request ids would add series without end."""
_MOST_BUCKETS = 1_000
LONGEST_TEXT = 1_024
"""Characters of a metric's name, a help text, a label's name or a label's value."""


class MetricKind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float | HistogramReading | SummaryReading


EventLabels = tuple[tuple[str, str], ...]
"""The names and texts of an event's labels: the key of its count."""


def event_labels(**labels: object) -> EventLabels:
    return tuple((name, str(value)) for name, value in labels.items())


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric for monitoring, of a model or of the server itself."""

    name: str
    kind: str
    """"counter", "gauge", "histogram" or "summary"."""
    help: str
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class MetricChange:
    """A time series' change since the worker's last report: the value itself would start at 0 in a new worker."""

    family: str
    kind: MetricKind
    help: str
    labels: Mapping[str, str]
    value: float = 0.0
    """The increase; for a histogram, the sum of the observed values."""
    is_set: bool = False
    """For a gauge: `value` replaces the current value."""
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    """For a histogram: how many values fell into each bucket; one count more than there are bounds."""


@dataclass(frozen=True, slots=True)
class MetricChanges:
    """Changes of a model's own metrics, as the worker sends them."""

    changes: tuple[MetricChange, ...]


@dataclass(slots=True)
class _Series:
    """The value of a metric for one set of labels."""

    labels: Mapping[str, str]
    bounds: tuple[float, ...]
    value: float = 0.0
    counts: list[int] = field(default_factory=list)
    owners: set[Hashable] = field(default_factory=set)

    def read(self) -> Sample:
        value = HistogramReading.of(self.bounds, self.counts, self.value) if self.bounds else self.value
        return Sample(self.labels, value)


@dataclass(slots=True)
class _Family:
    """All series of a metric."""

    kind: MetricKind
    help: str
    series: dict[frozenset[tuple[str, str]], _Series] = field(default_factory=dict)


class CustomMetrics:
    """The custom metrics of all models. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._series_counts: Counter[Hashable] = Counter()

    def apply(self, owner: Hashable, changes: MetricChanges) -> Mapping[str, str]:
        """Add a worker's report. `owner`: its model version. Returns metric name -> reason for the ignored metrics."""
        left_out: dict[str, str] = {}
        with self._lock:
            for change in changes.changes:
                key = frozenset(change.labels.items())
                family = self._families.get(change.family) or _Family(change.kind, change.help)
                series = family.series.get(key) or _Series(change.labels, change.bounds)
                problem = _problem(change)
                if not problem and owner not in series.owners and self._series_counts[owner] >= _MOST_SERIES:
                    problem = f"the model already has {_MOST_SERIES} time series"
                if not problem and (family.kind is not change.kind or series.bounds != change.bounds):
                    problem = "another model defines it with another kind or other buckets"
                if problem:
                    left_out[change.family[:LONGEST_TEXT]] = problem
                    continue
                self._families[change.family], family.series[key] = family, series
                series.value = change.value if change.is_set else series.value + change.value
                if change.counts:
                    counts = series.counts or [0] * len(change.counts)
                    series.counts = [old + new for old, new in zip(counts, change.counts, strict=False)]
                if owner not in series.owners:
                    series.owners.add(owner)
                    self._series_counts[owner] += 1
        return left_out

    def forget(self, owner: Hashable) -> None:
        """Remove the series that only this owner, an unloaded model version, has."""
        with self._lock:
            self._series_counts.pop(owner, None)
            for name, family in list(self._families.items()):
                for key, series in list(family.series.items()):
                    series.owners.discard(owner)
                    if not series.owners:
                        del family.series[key]
                if not family.series:
                    del self._families[name]

    def read(self) -> Sequence[MetricFamily]:
        """Return all metrics, sorted by name."""
        with self._lock:
            return [
                MetricFamily(name, family.kind.value, family.help, [series.read() for series in family.series.values()])
                for name, family in sorted(self._families.items())
            ]


@dataclass(eq=False)
class OwnedMetrics:
    """One model version's access to the custom metrics."""

    metrics: CustomMetrics
    owner_name: str
    log: logging.Logger
    _is_forgotten: bool = False
    _warned: set[str] = field(default_factory=set)

    def apply(self, changes: MetricChanges) -> None:
        if self._is_forgotten:
            return
        for name, problem in self.metrics.apply(self, changes).items():
            if name not in self._warned and len(self._warned) < 100:
                self._warned.add(name)
                self.log.warning("%s: metric '%s' is ignored: %s", self.owner_name, name, problem)

    def forget(self) -> None:
        """Remove the version's series, and ignore reports that still come."""
        self._is_forgotten = True
        self.metrics.forget(self)


def _problem(change: MetricChange) -> str:
    """Return why a change cannot become a time series; "" if it can."""
    if not METRIC_NAME.fullmatch(change.family) or change.family.startswith(RESERVED_PREFIXES):
        return "its name is invalid"
    if not all(LABEL_NAME.fullmatch(name) for name in change.labels):
        return "its labels have invalid names"
    if max(map(len, (change.family, change.help, *itertools.chain(*change.labels.items())))) > LONGEST_TEXT:
        return f"its name, help or labels have more than {LONGEST_TEXT} characters"
    bounds, is_histogram = change.bounds, change.kind is MetricKind.HISTOGRAM
    rising = all(first < second for first, second in itertools.pairwise(bounds))
    counted = len(change.counts) == len(bounds) + 1 and all(0 <= count < 1 << 63 for count in change.counts)
    if bool(bounds) != is_histogram or not rising or not all(map(math.isfinite, bounds)):
        return "its buckets do not rise, or its kind has no buckets"
    if len(bounds) > _MOST_BUCKETS or (is_histogram and not counted) or (change.counts and not is_histogram):
        return f"its counts do not match its buckets, or it has more than {_MOST_BUCKETS} buckets"
    return ""
