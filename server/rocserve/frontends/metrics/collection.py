"""The metrics of a server, by Triton's names (and a few of our own), read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rocserve.core.serving import ServedVersion, ServingTableHolder
from rocserve.core.statistics import StatisticsSnapshot
from rocserve.frontends.metrics.exposition import MetricFamily, Sample
from rocserve.repository.fallbacks import Fallback


@dataclass(frozen=True, slots=True)
class _Reading:
    """A version as it is at one moment."""

    version: ServedVersion
    labels: Mapping[str, str]
    numbers: StatisticsSnapshot


_Value = Callable[[_Reading], int | float]

_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda reading: reading.numbers.success.count,
    ),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda reading: reading.numbers.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda reading: reading.numbers.execution_count,
    ),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda reading: reading.numbers.success.ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda reading: reading.numbers.queue.ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda reading: reading.numbers.compute_input.ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda reading: reading.numbers.compute_infer.ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda reading: reading.numbers.compute_output.ns // 1000,
    ),
)

_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    (
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda reading: reading.version.pending_requests,
    ),
    (
        "nv_model_load_duration_secs",
        "Model load time in seconds",
        lambda reading: reading.version.load_seconds,
    ),
)


class ServerMetrics:
    """Safe on any thread."""

    def __init__(self, tables: ServingTableHolder, fallbacks: Callable[[], Mapping[Fallback, int]]) -> None:
        self._tables = tables
        self._fallbacks = fallbacks

    def families(self) -> Iterable[MetricFamily]:
        """Of the versions that are ready, and of what happened since the server started."""
        readings = [
            _read(version) for model in self._tables.table.models.values() for version in model.versions.values()
        ]
        for kind, metrics in (("counter", _COUNTERS), ("gauge", _GAUGES)):
            for name, text, value in metrics:
                samples = tuple(Sample(reading.labels, value(reading)) for reading in readings)
                yield MetricFamily(name, kind, text, samples)
        yield MetricFamily(
            "nv_inference_request_failure",
            "counter",
            "Number of failed inference requests, all batch sizes",
            tuple(sample for reading in readings for sample in _failures(reading)),
        )
        yield MetricFamily(
            "rocserve_model_engine_info",
            "gauge",
            "1 for the engine that runs the model, and the one whose place it has taken",
            tuple(_engine(reading) for reading in readings if "engine" in reading.version.properties),
        )
        yield MetricFamily(
            "rocserve_engine_fallback_total",
            "counter",
            "How often an engine has taken the place of one that could not load the model",
            tuple(Sample(_fallback_labels(fallback), count) for fallback, count in self._fallbacks().items()),
        )


def _read(version: ServedVersion) -> _Reading:
    labels = {"model": version.name, "version": str(version.version)}
    return _Reading(version, labels, version.statistics.snapshot())


def _failures(reading: _Reading) -> Iterable[Sample]:
    numbers = reading.numbers
    # What the queue refused is among the failures too.
    reasons = {
        "REJECTED": numbers.reject.count,
        "CANCELED": numbers.cancel.count,
        "OTHER": numbers.fail.count - numbers.reject.count,
    }
    return (Sample({**reading.labels, "reason": reason}, count) for reason, count in reasons.items())


def _engine(reading: _Reading) -> Sample:
    properties = reading.version.properties
    replaces = properties.get("engine_replaces", "")
    return Sample({**reading.labels, "engine": properties["engine"], "replaces": replaces}, 1)


def _fallback_labels(fallback: Fallback) -> Mapping[str, str]:
    return {
        "model": fallback.model,
        "version": str(fallback.version),
        "engine": fallback.engine,
        "replaced_by": fallback.replaced_by,
    }
