"""What of a model version's latencies is kept beside the sums, where it is asked for: histograms, in fixed buckets
since the beginning, and summaries, as quantiles of the last minute."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rocserve.core.model_config import ModelConfig

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
    FIRST_RESPONSE_HISTOGRAM: (100.0, 500.0, 2000.0, 5000.0),
    REQUEST_HISTOGRAM: _LATENCY_BUCKETS,
    QUEUE_HISTOGRAM: _LATENCY_BUCKETS,
    BATCH_SIZE_HISTOGRAM: (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
}
"""By metric; a model's model_metrics may have others."""

_DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)

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
        *cumulative, count = accumulate(self._counts)
        return HistogramReading(self._bounds, tuple(cumulative), count, self._total)


@dataclass(frozen=True, slots=True)
class SummaryReading:
    quantiles: tuple[tuple[float, float], ...]
    """Quantile and value; NaN where the window has no values."""
    count: int
    """Of all values since the beginning."""
    total: int


class SlidingSummary:
    """Quantiles of the values of the last minute, count and sum of all. Not thread-safe. Values are counted in buckets
    that grow with them, a set of buckets for each fifth of the window: the memory does not grow with the number of
    values."""

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


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """How latencies are reported; --metrics-config says it."""

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = _DEFAULT_QUANTILES

    def distributions(self, config: ModelConfig) -> LatencyDistributions | None:
        """Those of a model; None = nothing but the sums is kept."""
        if not self.summaries and not self.histograms:
            return None
        return LatencyDistributions(self, config)


@dataclass(frozen=True, slots=True)
class LatencyReadings:
    """By metric."""

    summaries: Mapping[str, SummaryReading]
    histograms: Mapping[str, HistogramReading]


class LatencyDistributions:
    """Of one model version. Not thread-safe: its caller holds a lock. All times are time.monotonic_ns()."""

    def __init__(self, options: LatencyOptions, config: ModelConfig) -> None:
        self._quantiles = options.quantiles
        self._summaries: dict[str, SlidingSummary] = {}
        self._histograms: dict[str, Histogram] = {}
        if options.summaries:
            names = [QUEUE_SUMMARY, INPUT_SUMMARY, INFER_SUMMARY, OUTPUT_SUMMARY]
            # As in Triton: what a hit takes and what a run takes have nothing in common.
            names += [CACHE_HIT_SUMMARY, CACHE_MISS_SUMMARY] if config.response_cache else [REQUEST_SUMMARY]
            self._summaries = {name: SlidingSummary() for name in names}
        if options.histograms:
            self._histograms = {
                name: Histogram(sorted(set(config.histogram_buckets.get(name, buckets))))
                for name, buckets in DEFAULT_BUCKETS.items()
                if name != FIRST_RESPONSE_HISTOGRAM or config.decoupled
            }
        # Those that are looked up for each request.
        self._request_summary = self._summaries.get(REQUEST_SUMMARY)
        self._queue_summary = self._summaries.get(QUEUE_SUMMARY)
        self._phases = [
            self._summaries[name] for name in (INPUT_SUMMARY, INFER_SUMMARY, OUTPUT_SUMMARY) if name in self._summaries
        ]
        self._request_histogram = self._histograms.get(REQUEST_HISTOGRAM)
        self._queue_histogram = self._histograms.get(QUEUE_HISTOGRAM)

    def note_batch(
        self,
        compute_start: int,
        phases: Sequence[int],
        queue_starts: Sequence[int],
        request_end: int,
        batch_size: int,
    ) -> None:
        """An execution; `phases` are the nanoseconds of input, engine and output."""
        for summary, nanoseconds in zip(self._phases, phases, strict=False):
            # Times of two processes: a phase may come out below zero.
            summary.observe(max(0, nanoseconds) // 1000, request_end, len(queue_starts))
        for queue_start in queue_starts:
            self.note_request(request_end - queue_start, compute_start - queue_start, request_end)
        self.observe(BATCH_SIZE_HISTOGRAM, batch_size)

    def read(self, now_ns: int) -> LatencyReadings:
        return LatencyReadings(
            {name: summary.read(self._quantiles, now_ns) for name, summary in self._summaries.items()},
            {name: histogram.read() for name, histogram in self._histograms.items()},
        )

    def note_request(self, nanoseconds: int, waited_ns: int, ended_ns: int) -> None:
        """One that was answered, and how long it waited."""
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
    """The options that --metrics-config gives, and what of it is passed over, in words."""
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
            # `0.5:0.05,0.9:0.01`: quantiles, and how exact they need to be, which all are.
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
            problems.append(f"{name}={value}: there is no such setting, only {known}")
    counters, summaries, histograms = switches.values()
    return LatencyOptions(counters, summaries, histograms, quantiles), problems
