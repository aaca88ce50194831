"""Keeps distributions of a model version's latencies, if --metrics-config asks for them: histograms with fixed buckets
since the start, and summaries, which are quantiles of the last minute."""

from __future__ import annotations

import bisect
import contextlib
import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rocserve.core.model_config import ModelConfig


class Distribution(enum.StrEnum):
    """The metrics with distributions of latencies and sizes."""

    REQUEST_SUMMARY = "nv_inference_request_summary_us"
    QUEUE_SUMMARY = "nv_inference_queue_summary_us"
    INPUT_SUMMARY = "nv_inference_compute_input_summary_us"
    INFER_SUMMARY = "nv_inference_compute_infer_summary_us"
    OUTPUT_SUMMARY = "nv_inference_compute_output_summary_us"
    CACHE_HIT_SUMMARY = "nv_cache_hit_summary_per_model"
    CACHE_MISS_SUMMARY = "nv_cache_miss_summary_per_model"

    FIRST_RESPONSE_HISTOGRAM = "nv_inference_first_response_histogram_ms"
    REQUEST_HISTOGRAM = "rocserve_request_duration_ms"
    QUEUE_HISTOGRAM = "rocserve_queue_duration_ms"
    BATCH_SIZE_HISTOGRAM = "rocserve_batch_size"


_LATENCY_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0)
DEFAULT_BUCKETS: Mapping[str, tuple[float, ...]] = {
    Distribution.FIRST_RESPONSE_HISTOGRAM: (100.0, 500.0, 2000.0, 5000.0),
    Distribution.REQUEST_HISTOGRAM: _LATENCY_BUCKETS,
    Distribution.QUEUE_HISTOGRAM: _LATENCY_BUCKETS,
    Distribution.BATCH_SIZE_HISTOGRAM: (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
}
"""Metric -> upper bounds of its buckets; a model's model_metrics may set others."""

_DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)

WINDOW_NS = 60_000_000_000
"""Quantiles cover the last minute, as Triton's do."""
_SECTIONS = 5
_SECTION_NS = WINDOW_NS // _SECTIONS
_DIGITS = 7
"""Leading bits of a value that choose its bucket: every value is within 1 % of its bucket's middle."""


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """The values of a histogram at one moment."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    """The number of values up to each bound."""
    count: int
    total: float

    @classmethod
    def of(cls, bounds: tuple[float, ...], counts: Sequence[int], total: float) -> HistogramReading:
        """`counts`: the number of values in each bucket, the last without a bound."""
        *cumulative, count = accumulate(counts)
        return cls(bounds, tuple(cumulative), count, total)


class Histogram:
    """Counts values in buckets with upper bounds. Not thread-safe."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` must rise."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> HistogramReading:
        return HistogramReading.of(self._bounds, self._counts, self._total)


@dataclass(frozen=True, slots=True)
class SummaryReading:
    """The values of a summary at one moment."""

    quantiles: tuple[tuple[float, float], ...]
    """Quantile and value; NaN if the window has no values."""
    count: int
    """Count and sum cover all values since the start."""
    total: int


class SlidingSummary:
    """Computes quantiles of the last minute's values, and count and sum of all. Not thread-safe. Counts values in
    buckets whose width grows with the value, separately for each fifth of the minute, so its memory does not grow."""

    __slots__ = ("_count", "_sections", "_total")

    def __init__(self) -> None:
        self._sections: dict[int, dict[int, int]] = {}
        """Section number -> bucket -> number of values."""
        self._count = 0
        self._total = 0

    def observe(self, value: int, at_ns: int, times: int = 1) -> None:
        """Count `value` (>= 0) `times` times, at a time.monotonic_ns()."""
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

    def buckets(self, now_ns: int) -> Mapping[int, int]:
        """Return the number of the last minute's values by bucket."""
        self._forget(now_ns // _SECTION_NS)
        merged = Counter[int]()
        for section in self._sections.values():
            merged.update(section)
        return merged

    def read(self, quantiles: Sequence[float], now_ns: int) -> SummaryReading:
        return SummaryReading(quantiles_of(self.buckets(now_ns), quantiles), self._count, self._total)

    def _forget(self, newest: int) -> None:
        for number in [number for number in self._sections if number <= newest - _SECTIONS]:
            del self._sections[number]


def quantiles_of(buckets: Mapping[int, int], quantiles: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return quantile and value of values that were counted by bucket; NaN if there are none."""
    ordered = sorted(buckets.items())
    return tuple((quantile, _value_at(quantile, ordered)) for quantile in quantiles)


def counts_between(buckets: Mapping[int, int], bounds: Sequence[float]) -> Sequence[int]:
    """Return how many of the values that were counted by bucket are up to each bound, and above the last."""
    counts = [0] * (len(bounds) + 1)
    for bucket, number in buckets.items():
        counts[bisect.bisect_left(bounds, _middle(bucket))] += number
    return counts


def _middle(bucket: int) -> float:
    shift = bucket >> _DIGITS
    lowest = bucket & (1 << _DIGITS) - 1
    return float((lowest << shift) + (1 << shift) // 2)


def _value_at(quantile: float, ordered: Sequence[tuple[int, int]]) -> float:
    rank = max(1, math.ceil(quantile * sum(number for _, number in ordered)))
    for bucket, number in ordered:
        rank -= number
        if rank <= 0:
            return _middle(bucket)
    return math.nan


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """The options of --metrics-config."""

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = _DEFAULT_QUANTILES

    def distributions(self, config: ModelConfig) -> LatencyDistributions | None:
        """Return new distributions for a model; None if only sums are asked for."""
        if not self.summaries and not self.histograms:
            return None
        return LatencyDistributions(self, config)


class LatencyDistributions:
    """The latency distributions of a model version. The caller holds a lock. Times are time.monotonic_ns()."""

    def __init__(self, options: LatencyOptions, config: ModelConfig) -> None:
        self._quantiles = options.quantiles
        self._summaries: dict[str, SlidingSummary] = {}
        self._histograms: dict[str, Histogram] = {}
        if options.summaries:
            names = [
                Distribution.QUEUE_SUMMARY,
                Distribution.INPUT_SUMMARY,
                Distribution.INFER_SUMMARY,
                Distribution.OUTPUT_SUMMARY,
            ]
            # As in Triton: a cache hit's latency and an execution's latency must not be mixed.
            names += (
                [Distribution.CACHE_HIT_SUMMARY, Distribution.CACHE_MISS_SUMMARY]
                if config.response_cache
                else [Distribution.REQUEST_SUMMARY]
            )
            self._summaries = {name: SlidingSummary() for name in names}
        if options.histograms:
            self._histograms = {
                name: Histogram(sorted(set(config.histogram_buckets.get(name, buckets))))
                for name, buckets in DEFAULT_BUCKETS.items()
            }
        self._is_decoupled = config.decoupled
        # These attributes save a look-up per request.
        self._request_summary = self._summaries.get(Distribution.REQUEST_SUMMARY)
        self._queue_summary = self._summaries.get(Distribution.QUEUE_SUMMARY)
        self._phases = [
            self._summaries[name]
            for name in (Distribution.INPUT_SUMMARY, Distribution.INFER_SUMMARY, Distribution.OUTPUT_SUMMARY)
            if name in self._summaries
        ]
        self._request_histogram = self._histograms.get(Distribution.REQUEST_HISTOGRAM)
        self._queue_histogram = self._histograms.get(Distribution.QUEUE_HISTOGRAM)
        self._first_response = self._histograms.get(Distribution.FIRST_RESPONSE_HISTOGRAM)
        self._batch_size = self._histograms.get(Distribution.BATCH_SIZE_HISTOGRAM)

    def note_batch(
        self,
        compute_start: int,
        phases: Sequence[int],
        queue_starts: Sequence[int],
        request_end: int,
        batch_size: int,
    ) -> None:
        """Record an execution; `phases` are the nanoseconds of input, engine and output."""
        for summary, nanoseconds in zip(self._phases, phases, strict=False):
            # The times come from two processes, so a phase may seem negative.
            summary.observe(max(0, nanoseconds) // 1000, request_end, len(queue_starts))
        for queue_start in queue_starts:
            self.note_request(request_end - queue_start, compute_start - queue_start, request_end)
        if self._batch_size is not None:
            self._batch_size.observe(batch_size)

    def read(self, now_ns: int) -> dict[str, SummaryReading | HistogramReading]:
        """Return all distributions by metric."""
        summaries = {name: summary.read(self._quantiles, now_ns) for name, summary in self._summaries.items()}
        return {**summaries, **{name: histogram.read() for name, histogram in self._histograms.items()}}

    def note_response(self, nanoseconds: int) -> None:
        """Record the only response to a request, or its error. A decoupled model's first responses are recorded as they
        come."""
        if self._first_response is not None and not self._is_decoupled:
            self._first_response.observe(nanoseconds / 1e6)

    def note_request(self, nanoseconds: int, waited_ns: int, ended_ns: int) -> None:
        """Record an answered request: its duration, its wait in the queue, its end."""
        self.note_response(nanoseconds)
        if self._request_summary is not None:
            self._request_summary.observe(nanoseconds // 1000, ended_ns)
        if self._queue_summary is not None:
            self._queue_summary.observe(waited_ns // 1000, ended_ns)
        if self._request_histogram is not None and self._queue_histogram is not None:
            self._request_histogram.observe(nanoseconds / 1e6)
            self._queue_histogram.observe(waited_ns / 1e6)

    def summarise(self, name: str, nanoseconds: int, at_ns: int) -> None:
        summary = self._summaries.get(name)
        if summary is not None:
            summary.observe(nanoseconds // 1000, at_ns)

    def observe(self, name: str, value: float) -> None:
        histogram = self._histograms.get(name)
        if histogram is not None:
            histogram.observe(value)


def read_latency_options(settings: Mapping[str, str]) -> tuple[LatencyOptions, list[str]]:
    """Parse --metrics-config. Returns the options, and a text for each setting that is ignored."""
    problems: list[str] = []
    switches = {"counter_latencies": True, "summary_latencies": False, "histogram_latencies": False}
    quantiles: tuple[float, ...] = _DEFAULT_QUANTILES
    for name, value in settings.items():
        if name in switches:
            if value.lower() not in ("true", "false"):
                problems.append(f"{name}={value}: expected true or false")
            else:
                switches[name] = value.lower() == "true"
        elif name == "summary_quantiles":
            # `0.5:0.05,0.9:0.01` gives quantiles and their errors, which are ignored: all are exact to 1 %.
            found: list[float] = []
            for pair in value.split(","):
                text, colon, _ = pair.partition(":")
                with contextlib.suppress(ValueError):
                    if colon and 0 <= float(text) <= 1:
                        found.append(float(text))
                        continue
                expected = "<quantile>:<error> with a quantile from 0 to 1"
                problems.append(f"summary_quantiles: expected {expected}, got '{pair}'")
            quantiles = tuple(found) or quantiles
        else:
            known = ", ".join([*switches, "summary_quantiles"])
            problems.append(f"{name}={value}: unknown setting, expected {known}")
    counters, summaries, histograms = switches.values()
    return LatencyOptions(counters, summaries, histograms, quantiles), problems
