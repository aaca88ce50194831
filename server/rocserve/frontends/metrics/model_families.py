"""The metrics of model versions, by Triton's names (and a few of our own)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rocserve.core import latencies
from rocserve.core.serving import ServedVersion
from rocserve.core.statistics import StatisticsSnapshot
from rocserve.frontends.metrics.exposition import MetricFamily, Sample, histogram_samples, summary_samples


@dataclass(frozen=True, slots=True)
class VersionReading:
    """A version as it is at one moment."""

    version: ServedVersion
    labels: Mapping[str, str]
    numbers: StatisticsSnapshot


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    help: str
    value: Callable[[VersionReading], int | float]


_COUNTERS = (
    _Row(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda reading: reading.numbers.success.count,
    ),
    _Row(
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda reading: reading.numbers.inference_count,
    ),
    _Row(
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda reading: reading.numbers.execution_count,
    ),
)
_LATENCY_COUNTERS = (
    _Row(
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda reading: reading.numbers.success.ns // 1000,
    ),
    _Row(
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda reading: reading.numbers.queue.ns // 1000,
    ),
    _Row(
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda reading: reading.numbers.compute_input.ns // 1000,
    ),
    _Row(
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda reading: reading.numbers.compute_infer.ns // 1000,
    ),
    _Row(
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda reading: reading.numbers.compute_output.ns // 1000,
    ),
)
_CACHE_COUNTERS = (
    _Row(
        "nv_cache_num_hits_per_model",
        "Number of cache hits per model",
        lambda reading: reading.numbers.cache_hit.count,
    ),
    _Row(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda reading: reading.numbers.cache_hit.ns // 1000,
    ),
    _Row(
        "nv_cache_num_misses_per_model",
        "Number of cache misses per model",
        lambda reading: reading.numbers.cache_miss.count,
    ),
    _Row(
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda reading: reading.numbers.cache_miss.ns // 1000,
    ),
)

_WORKER_RESTARTS = _Row(
    "rocserve_worker_restarts_total",
    "How often a worker of the version had to be started again",
    lambda reading: reading.version.worker_restarts,
)

_GAUGES = (
    _Row(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda reading: reading.version.pending_requests,
    ),
    _Row("nv_model_load_duration_secs", "Model load time in seconds", lambda reading: reading.version.load_seconds),
)

_SUMMARIES = {
    latencies.REQUEST_SUMMARY: "Summary of inference request duration in microseconds (includes cached requests)",
    latencies.QUEUE_SUMMARY: "Summary of inference queuing duration in microseconds (includes cached requests)",
    latencies.INPUT_SUMMARY: "Cumulative compute input duration in microseconds (does not include cached requests)",
    latencies.INFER_SUMMARY: "Cumulative compute inference duration in microseconds (does not include cached requests)",
    latencies.OUTPUT_SUMMARY: (
        "Cumulative inference compute output duration in microseconds (does not include cached requests)"
    ),
    latencies.CACHE_HIT_SUMMARY: "Summary of cache hit counts/durations per model, in microseconds.",
    latencies.CACHE_MISS_SUMMARY: "Summary of cache miss counts/durations per model, in microseconds.",
}

_HISTOGRAMS = {
    latencies.FIRST_RESPONSE_HISTOGRAM: "Duration from request to first response in milliseconds",
    latencies.REQUEST_HISTOGRAM: "Durations of successful requests in milliseconds (includes cached requests)",
    latencies.QUEUE_HISTOGRAM: "Time in the queue of successful requests in milliseconds (includes cached requests)",
    latencies.BATCH_SIZE_HISTOGRAM: "Sizes of the batches that were executed",
}


def read_version(version: ServedVersion, namespace: str) -> VersionReading:
    """`namespace`: the model's, where there are namespaces."""
    tags = {f"_{name}": value for name, value in version.config.metric_tags.items()}
    model = {"model": version.name, "version": str(version.version)}
    labels = {**model, **({"namespace": namespace} if namespace else {}), **tags}
    return VersionReading(version, labels, version.statistics.snapshot())


def model_families(readings: Sequence[VersionReading], with_latency_counters: bool) -> Iterable[MetricFamily]:
    """Of all versions; `with_latency_counters`: the sums of latencies and the response cache's numbers too."""
    for row in (*_COUNTERS, *(_LATENCY_COUNTERS if with_latency_counters else ())):
        yield _family(row, "counter", readings)
    caching = [reading for reading in readings if reading.version.config.response_cache]
    for row in _CACHE_COUNTERS if with_latency_counters and caching else ():
        yield _family(row, "counter", caching)
    yield MetricFamily(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests, all batch sizes",
        tuple(sample for reading in readings for sample in _failures(reading)),
    )
    yield _family(_WORKER_RESTARTS, "counter", readings)
    for row in _GAUGES:
        yield _family(row, "gauge", readings)
    kept = [(reading.labels, reading.numbers.latencies) for reading in readings if reading.numbers.latencies]
    for name, text in _SUMMARIES.items():
        summaries = [(labels, known.summaries[name]) for labels, known in kept if name in known.summaries]
        if summaries:
            samples = tuple(sample for labels, known in summaries for sample in summary_samples(labels, known))
            yield MetricFamily(name, "summary", text, samples)
    for name, text in _HISTOGRAMS.items():
        histograms = [(labels, known.histograms[name]) for labels, known in kept if name in known.histograms]
        if histograms:
            samples = tuple(sample for labels, known in histograms for sample in histogram_samples(labels, known))
            yield MetricFamily(name, "histogram", text, samples)


def _family(row: _Row, kind: str, readings: Sequence[VersionReading]) -> MetricFamily:
    samples = tuple(Sample(reading.labels, row.value(reading)) for reading in readings)
    return MetricFamily(row.name, kind, row.help, samples)


def _failures(reading: VersionReading) -> Iterable[Sample]:
    numbers = reading.numbers
    # All of them are among the failures.
    reasons = {
        "REJECTED": numbers.reject.count,
        "CANCELED": numbers.cancel.count,
        "BACKEND": numbers.backend_failures,
    }
    reasons["OTHER"] = numbers.fail.count - sum(reasons.values())
    return (Sample({**reading.labels, "reason": reason}, count) for reason, count in reasons.items())
