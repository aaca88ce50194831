"""Collects all metrics of a server, as its settings ask for them, when they are read: those of model versions, by
Triton's names (and a few of our own), and what other sources give."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter

from rocserve.core import latencies
from rocserve.core.latencies import LatencyOptions
from rocserve.core.serving import ServedVersion, ServingTableHolder
from rocserve.core.statistics import StatisticsSnapshot
from rocserve.frontends.metrics.exposition import MetricFamily, Sample, histogram_samples, summary_samples
from rocserve.frontends.metrics.machine_families import GpuGauges, MachineMetrics, ProcessorGauges
from rocserve.repository.engine_plan import Fallback
from rocserve.repository.residency.resident_models import LazyVersion
from rocserve.settings import MetricsSettings

Source = Callable[[], Iterable[MetricFamily]]


@dataclass(frozen=True, slots=True)
class VersionReading:
    """A version as it is at one moment."""

    version: ServedVersion
    labels: Mapping[str, str]
    numbers: StatisticsSnapshot


_CACHED = "in microseconds (includes cached requests)"
_UNCACHED = "in microseconds (does not include cached requests)"

# By their names where a reading has them, and their help. Nanoseconds are shown as microseconds.
_COUNTERS = {
    "nv_inference_request_success": (
        "numbers.success.count",
        "Number of successful inference requests, all batch sizes",
    ),
    "nv_inference_count": (
        "numbers.inference_count",
        "Number of inferences performed (does not include cached requests)",
    ),
    "nv_inference_exec_count": (
        "numbers.execution_count",
        "Number of model executions performed (does not include cached requests)",
    ),
}
_LATENCY_COUNTERS = {
    f"nv_inference_{part}_duration_us": (f"numbers.{field}.ns", f"Cumulative {words} duration {which}")
    for part, field, words, which in (
        ("request", "success", "inference request", _CACHED),
        ("queue", "queue", "inference queuing", _CACHED),
        ("compute_input", "compute_input", "compute input", _UNCACHED),
        ("compute_infer", "compute_infer", "compute inference", _UNCACHED),
        ("compute_output", "compute_output", "inference compute output", _UNCACHED),
    )
}
_CACHE_COUNTERS = {
    "nv_cache_num_hits_per_model": ("numbers.cache_hit.count", "Number of cache hits per model"),
    "nv_cache_hit_duration_per_model": (
        "numbers.cache_hit.ns",
        "Total cache hit duration per model, in microseconds",
    ),
    "nv_cache_num_misses_per_model": ("numbers.cache_miss.count", "Number of cache misses per model"),
    "nv_cache_miss_duration_per_model": (
        "numbers.cache_miss.ns",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
    ),
}
_RESTARTS = {
    "rocserve_worker_restarts_total": (
        "version.worker_restarts",
        "How often a worker of the version had to be started again",
    ),
}
_GAUGES = {
    "nv_inference_pending_request_count": (
        "version.pending_requests",
        "Instantaneous number of pending requests awaiting execution per-model.",
    ),
    "nv_model_load_duration_secs": ("version.load_seconds", "Model load time in seconds"),
}

_SUMMARIES = {
    latencies.REQUEST_SUMMARY: f"Summary of inference request duration {_CACHED}",
    latencies.QUEUE_SUMMARY: f"Summary of inference queuing duration {_CACHED}",
    latencies.INPUT_SUMMARY: f"Cumulative compute input duration {_UNCACHED}",
    latencies.INFER_SUMMARY: f"Cumulative compute inference duration {_UNCACHED}",
    latencies.OUTPUT_SUMMARY: f"Cumulative inference compute output duration {_UNCACHED}",
    latencies.CACHE_HIT_SUMMARY: "Summary of cache hit counts/durations per model, in microseconds.",
    latencies.CACHE_MISS_SUMMARY: "Summary of cache miss counts/durations per model, in microseconds.",
}

_HISTOGRAMS = {
    latencies.FIRST_RESPONSE_HISTOGRAM: "Duration from request to first response in milliseconds",
    latencies.REQUEST_HISTOGRAM: "Durations of successful requests in milliseconds (includes cached requests)",
    latencies.QUEUE_HISTOGRAM: "Time in the queue of successful requests in milliseconds (includes cached requests)",
    latencies.BATCH_SIZE_HISTOGRAM: "Sizes of the batches that were executed",
}


def model_families(readings: Sequence[VersionReading], with_latency_counters: bool) -> Iterable[MetricFamily]:
    """Of all versions; `with_latency_counters`: the sums of latencies and the response cache's numbers too."""
    yield from _families(_COUNTERS, readings)
    if with_latency_counters:
        yield from _families(_LATENCY_COUNTERS, readings)
        caching = [reading for reading in readings if reading.version.config.response_cache]
        if caching:
            yield from _families(_CACHE_COUNTERS, caching)
    yield MetricFamily(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests, all batch sizes",
        tuple(sample for reading in readings for sample in _failures(reading)),
    )
    yield from _families(_RESTARTS, readings)
    yield from _families(_GAUGES, readings, "gauge")
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


def _families(
    rows: Mapping[str, tuple[str, str]], readings: Sequence[VersionReading], kind: str = "counter"
) -> Iterable[MetricFamily]:
    for name, (path, text) in rows.items():
        values = zip(readings, map(attrgetter(path), readings), strict=True)
        is_time = path.endswith(".ns")
        samples = (Sample(reading.labels, value // 1000 if is_time else value) for reading, value in values)
        yield MetricFamily(name, kind, text, tuple(samples))


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


def server_families(
    tables: ServingTableHolder,
    fallbacks: Callable[[], Mapping[Fallback, int]],
    options: LatencyOptions,
    further: Sequence[Source] = (),
) -> Iterable[MetricFamily]:
    """Of the versions that are ready, and of what happened since the server started. Of thousands that are only
    registered, those that were never asked have no numbers. Safe on any thread.

    `further`: other sources: the machine's gauges, and the metrics that models define.
    """
    readings: list[VersionReading] = []
    for model in tables.table.all_models:
        for version in model.versions.values():
            if not isinstance(version, LazyVersion) or version.was_asked:
                namespace = {"namespace": model.namespace} if model.namespace else {}
                tags = {f"_{name}": value for name, value in version.config.metric_tags.items()}
                labels = {"model": version.name, "version": str(version.version), **namespace, **tags}
                readings.append(VersionReading(version, labels, version.statistics.snapshot()))
    yield from model_families(readings, options.counters)
    yield MetricFamily(
        "rocserve_model_engine_info",
        "gauge",
        "1 for the engine that runs the model, and the one whose place it has taken",
        tuple(
            Sample({**reading.labels, "engine": known["engine"], "replaces": known.get("engine_replaces", "")}, 1)
            for reading in readings
            if "engine" in (known := reading.version.properties)
        ),
    )
    yield MetricFamily(
        "rocserve_engine_fallback_total",
        "counter",
        "How often an engine has taken the place of one that could not load the model",
        tuple(
            Sample({name: str(value) for name, value in asdict(fallback).items()}, count)
            for fallback, count in fallbacks().items()
        ),
    )
    for source in further:
        yield from source()


def assemble_metrics(
    settings: MetricsSettings,
    options: LatencyOptions,
    tables: ServingTableHolder,
    fallbacks: Callable[[], Mapping[Fallback, int]],
    further: Sequence[Source],
    log: logging.Logger,
) -> Source:
    """All metrics of a server; `further`: other sources beside the machine's gauges."""
    gauges: list[Callable[[], Sequence[MetricFamily]]] = []
    if settings.allow and settings.gpu:
        gauges.append(GpuGauges(log).families)
    if settings.allow and settings.cpu:
        try:
            gauges.append(ProcessorGauges().families)
        except (OSError, ValueError, IndexError) as error:
            log.warning("there are no metrics of the processors: %s", error)
    machine = MachineMetrics(gauges, settings.interval_ms / 1000, log)
    return lambda: server_families(tables, fallbacks, options, (*further, machine.families))
