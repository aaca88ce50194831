"""Collects metrics when they are read: of model versions (with Triton's names, and further ones), the machine's gauges,
and the server's own."""

from __future__ import annotations

import importlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rocserve.core.custom_metrics import EventLabels, MetricFamily, Sample
from rocserve.core.latencies import Distribution, LatencyOptions
from rocserve.core.padding import SIZES_PROPERTY
from rocserve.core.request_memory import RequestMemory
from rocserve.core.serving import IndexEntry, ServedVersion, ServingTableHolder
from rocserve.core.statistics import Statistics
from rocserve.repository.model_repository import outcomes
from rocserve.repository.residency.resident_models import ResidentModels
from rocserve.settings import MetricsSettings
from rocserve.workers.resource_watch import memory_bytes

Source = Callable[[], Iterable[MetricFamily]]


@dataclass(frozen=True, slots=True)
class VersionReading:
    """The statistics of a version, with the labels of its metrics."""

    version: ServedVersion
    labels: Mapping[str, str]
    numbers: Statistics


_CACHED = "in microseconds (includes cached requests)"
_UNCACHED = "in microseconds (does not include cached requests)"

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

# Metric -> (kind, help text).
_DISTRIBUTIONS = {
    Distribution.REQUEST_SUMMARY: ("summary", f"Summary of inference request duration {_CACHED}"),
    Distribution.QUEUE_SUMMARY: ("summary", f"Summary of inference queuing duration {_CACHED}"),
    Distribution.INPUT_SUMMARY: ("summary", f"Cumulative compute input duration {_UNCACHED}"),
    Distribution.INFER_SUMMARY: ("summary", f"Cumulative compute inference duration {_UNCACHED}"),
    Distribution.OUTPUT_SUMMARY: ("summary", f"Cumulative inference compute output duration {_UNCACHED}"),
    Distribution.CACHE_HIT_SUMMARY: ("summary", "Summary of cache hit counts/durations per model, in microseconds."),
    Distribution.CACHE_MISS_SUMMARY: ("summary", "Summary of cache miss counts/durations per model, in microseconds."),
    Distribution.FIRST_RESPONSE_HISTOGRAM: ("histogram", "Duration from request to first response in milliseconds"),
    Distribution.REQUEST_HISTOGRAM: (
        "histogram",
        "Durations of successful requests in milliseconds (includes cached requests)",
    ),
    Distribution.QUEUE_HISTOGRAM: (
        "histogram",
        "Time in the queue of successful requests in milliseconds (includes cached requests)",
    ),
    Distribution.BATCH_SIZE_HISTOGRAM: ("histogram", "Sizes of the batches that were executed"),
}


def model_families(readings: Sequence[VersionReading], with_latency_counters: bool) -> Iterable[MetricFamily]:
    """Yield the metrics of all versions. `with_latency_counters`: also sums of latencies, and the cache's counters."""
    yield from _families(
        {
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
        },
        readings,
    )
    if with_latency_counters:
        yield from _families(_LATENCY_COUNTERS, readings)
        caching = [reading for reading in readings if reading.version.config.response_cache]
        if caching:
            yield from _cache_families(caching)
    yield MetricFamily(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests, all batch sizes",
        [sample for reading in readings for sample in _failures(reading)],
    )
    if padding := [reading for reading in readings if SIZES_PROPERTY in reading.version.properties]:
        real = ("numbers.real_elements", "Elements that clients sent in inputs that are padded")
        added = ("numbers.padded_elements", "Elements added to inputs by padding")
        yield from _families({"rocserve_real_elements_total": real, "rocserve_padded_elements_total": added}, padding)
    restarts = ("version.worker_restarts", "Restarts of the version's workers after they had ended")
    yield from _families({"rocserve_worker_restarts_total": restarts}, readings)
    pending = (
        "version.pending_requests",
        "Instantaneous number of pending requests awaiting execution per-model.",
    )
    load = ("version.load_seconds", "Model load time in seconds")
    gauges = {"nv_inference_pending_request_count": pending, "nv_model_load_duration_secs": load}
    yield from _families(gauges, readings, "gauge")
    kept = [(reading.labels, reading.numbers.latencies) for reading in readings]
    for name, (kind, text) in _DISTRIBUTIONS.items():
        if samples := [Sample(labels, known[name]) for labels, known in kept if name in known]:
            yield MetricFamily(name, kind, text, samples)


def _cache_families(readings: Sequence[VersionReading]) -> Iterable[MetricFamily]:
    missed = "Total cache miss (insert+lookup) duration per model, in microseconds"
    return _families(
        {
            "nv_cache_num_hits_per_model": ("numbers.cache_hit.count", "Number of cache hits per model"),
            "nv_cache_hit_duration_per_model": (
                "numbers.cache_hit.ns",
                "Total cache hit duration per model, in microseconds",
            ),
            "nv_cache_num_misses_per_model": ("numbers.cache_miss.count", "Number of cache misses per model"),
            "nv_cache_miss_duration_per_model": ("numbers.cache_miss.ns", missed),
        },
        readings,
    )


def _families(
    rows: Mapping[str, tuple[str, str]], readings: Sequence[VersionReading], kind: str = "counter"
) -> Iterable[MetricFamily]:
    """Yield a family for each row. `rows`: metric -> (path of its value in a VersionReading, help text); nanoseconds
    are shown as microseconds."""
    for name, (path, text) in rows.items():
        read, divisor = attrgetter(path), 1000 if path.endswith(".ns") else None
        values = ((reading.labels, read(reading)) for reading in readings)
        samples = [Sample(labels, value // divisor if divisor else value) for labels, value in values]
        yield MetricFamily(name, kind, text, samples)


def _failures(reading: VersionReading) -> Iterable[Sample]:
    numbers = reading.numbers
    # The failures include all of these.
    reasons = {
        "REJECTED": numbers.reject.count,
        "CANCELED": numbers.cancel.count,
        "BACKEND": numbers.backend_failures,
    }
    reasons["OTHER"] = numbers.fail.count - sum(reasons.values())
    return _by("reason", reasons, reading.labels)


def _by(label: str, values: Mapping[str, float], others: Mapping[str, str] = MappingProxyType({})) -> list[Sample]:
    """Return a sample for each text of a label. `others`: further labels."""
    return [Sample({**others, label: text}, value) for text, value in values.items()]


def server_families(
    tables: ServingTableHolder,
    fallbacks: Mapping[EventLabels, int],
    options: LatencyOptions,
    other_sources: Sequence[Source] = (),
) -> Iterable[MetricFamily]:
    """Yield the metrics of ready versions and of the server's events since its start. A version that loads on demand is
    included after its first request. `other_sources`: for example models' own metrics. Safe on any thread."""
    readings: list[VersionReading] = []
    for model in tables.table.all_models:
        for version in model.versions.values():
            if version.has_statistics:
                namespace = {"namespace": model.namespace} if model.namespace else {}
                # Because of one name with other characters, Prometheus would reject all metrics.
                tags = {
                    "_" + re.sub("[^a-zA-Z0-9_]", "_", name): text for name, text in version.config.metric_tags.items()
                }
                labels = {"model": version.name, "version": str(version.version), **namespace, **tags}
                readings.append(VersionReading(version, labels, version.statistics.totals()))
    yield from model_families(readings, options.counters)
    yield MetricFamily(
        "rocserve_model_engine_info",
        "gauge",
        "1; the labels name the engine that runs the model, and the engine that it replaces",
        [
            Sample({**reading.labels, "engine": known["engine"], "replaces": known.get("engine_replaces", "")}, 1)
            for reading in readings
            if "engine" in (known := reading.version.properties)
        ],
    )
    yield MetricFamily(
        "rocserve_model_memory_bytes",
        "gauge",
        "Memory of the version's workers without files; models that share a worker have equal parts of it",
        [
            Sample(reading.labels, sum(memory_bytes(pid) // models for pid, models in workers.items()))
            for reading in readings
            if (workers := reading.version.worker_pids)
        ],
    )
    yield MetricFamily(
        "rocserve_engine_fallback_total",
        "counter",
        "Loads in which another engine replaced one that could not load the model",
        _counted(fallbacks),
    )
    yield MetricFamily(
        "rocserve_load_check_seconds",
        "gauge",
        "Duration of the version's load check in seconds; 0 if the results of an earlier load were used",
        [
            Sample(reading.labels, reading.version.load_check.seconds)
            for reading in readings
            if reading.version.load_check.parts
        ],
    )
    for source in other_sources:
        yield from source()


def load_check_families(failed: Mapping[EventLabels, int]) -> Iterable[MetricFamily]:
    yield MetricFamily(
        "rocserve_load_check_failures_total",
        "counter",
        "Failed load checks of the version",
        _counted(failed),
    )


def _counted(counts: Mapping[EventLabels, int]) -> list[Sample]:
    # A copy, made in one step, because loads change the counts meanwhile.
    return [Sample(dict(labels), count) for labels, count in tuple(counts.items())]


def machine_metrics(settings: MetricsSettings, log: logging.Logger) -> MachineMetrics:
    """Return the metrics of the machine that the settings ask for."""
    gauges: list[Callable[[], Sequence[MetricFamily]]] = []
    if settings.allow and settings.gpu:
        gauges.append(GpuGauges(log).families)
    if settings.allow and settings.cpu:
        try:
            gauges.append(ProcessorGauges().families)
        except (OSError, ValueError, IndexError) as error:
            log.warning("no CPU metrics: %s", error)
    return MachineMetrics(gauges, settings.interval_ms / 1000, log)


class ProcessorGauges:
    """Reads the processors' load since the last reading, and the memory, from /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._ticks()

    def families(self) -> Sequence[MetricFamily]:
        """Raises OSError or ValueError if /proc is not as in Linux."""
        idle, total = self._ticks()
        passed = total - self._last[1]
        busy = 1.0 - (idle - self._last[0]) / passed if passed > 0 else 0.0
        self._last = (idle, total)
        rows = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
        memory = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 2}
        used = memory["MemTotal"] - memory["MemAvailable"]
        return [
            _single("nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]", min(1.0, max(0.0, busy))),
            _single("nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes", memory["MemTotal"]),
            _single("nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes", used),
        ]

    def _ticks(self) -> tuple[int, int]:
        """Return the idle ticks and all ticks since the system's start."""
        first = (self._proc / "stat").read_text().partition("\n")[0]
        # user nice system idle iowait irq softirq steal; user and nice include guests.
        ticks = [int(word) for word in first.split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)


@dataclass(eq=False)
class GpuGauges:
    """Reads AMD's GPUs through the module amdsmi, if it is installed and finds any."""

    _log: logging.Logger
    _import_module: Callable[[str], Any] = importlib.import_module
    _library: Any = field(default=None, init=False)
    _gpus: Sequence[tuple[str, Any]] | None = field(default=None, init=False)
    """(Identity, handle) of each GPU; None = not searched for yet."""

    def families(self) -> Sequence[MetricFamily]:
        if self._gpus is None:
            self._gpus = self._find()
        found = [MetricFamily(name, "gauge", text, self._samples(name, read)) for name, text, read in _GPU_GAUGES]
        return [family for family in found if family.samples]

    def _find(self) -> Sequence[tuple[str, Any]]:
        try:
            self._library = self._import_module("amdsmi")
            self._library.amdsmi_init()
            handles = self._library.amdsmi_get_processor_handles()
            return [(str(self._library.amdsmi_get_gpu_device_uuid(handle)), handle) for handle in handles]
        except ImportError:
            return []
        except Exception as error:
            # One of the library's exceptions, or a library that does not fit its module.
            self._log.warning("no GPU metrics: amdsmi raised %s: %s", type(error).__name__, error)
            return []

    def _samples(self, name: str, read: Callable[[Any, Any], float | None]) -> Sequence[Sample]:
        assert self._gpus is not None
        samples: list[Sample] = []
        for uuid, handle in self._gpus:
            try:
                value = read(self._library, handle)
            except Exception as error:
                self._log.debug("amdsmi has no %s: %s: %s", name, type(error).__name__, error)
                continue
            if value is not None:
                samples.append(Sample({"gpu_uuid": uuid}, value))
        return samples


@dataclass(eq=False)
class MachineMetrics:
    """Reads gauges at most once in an interval, whatever the number of calls. Safe on any thread."""

    _sources: Sequence[Callable[[], Sequence[MetricFamily]]]
    _interval_seconds: float
    _log: logging.Logger
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _families: list[MetricFamily] = field(default_factory=list, init=False)
    _read_again_at: float = field(default=0.0, init=False)

    def families(self) -> Sequence[MetricFamily]:
        with self._lock:
            now = time.monotonic()
            if now >= self._read_again_at:
                self._read_again_at = now + self._interval_seconds
                self._families = []
                for source in self._sources:
                    try:
                        self._families += source()
                    except (OSError, ValueError, KeyError, IndexError) as error:
                        self._log.debug("cannot read the machine's gauges: %s: %s", type(error).__name__, error)
            return self._families


def _single(name: str, kind: str, text: str, value: float) -> MetricFamily:
    return MetricFamily(name, kind, text, [Sample({}, value)])


def _number(value: Any) -> float | None:
    """Return a number from amdsmi, which returns text, such as N/A, if it has none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _percent(value: Any) -> float | None:
    number = _number(value)
    return None if number is None else number / 100


def _power(info: Mapping[str, Any]) -> float | None:
    """Return the first value that this version of the library has for this GPU."""
    values = (_number(info.get(f"{kind}socket_power")) for kind in ("", "current_", "average_"))
    return next((value for value in values if value is not None), None)


def _limit(info: Mapping[str, Any]) -> float | None:
    number = _number(info.get("power_limit"))
    # Newer versions of the library give microwatts: no GPU has so many watts.
    return number / 1e6 if number is not None and number > 10_000 else number


_GPU_GAUGES: tuple[tuple[str, str, Callable[[Any, Any], float | None]], ...] = (
    (
        "nv_gpu_utilization",
        "GPU utilization rate [0.0 - 1.0)",
        lambda library, gpu: _percent(library.amdsmi_get_gpu_activity(gpu)["gfx_activity"]),
    ),
    (
        "nv_gpu_memory_total_bytes",
        "GPU total memory, in bytes",
        lambda library, gpu: _number(library.amdsmi_get_gpu_memory_total(gpu, library.AmdSmiMemoryType.VRAM)),
    ),
    (
        "nv_gpu_memory_used_bytes",
        "GPU used memory, in bytes",
        lambda library, gpu: _number(library.amdsmi_get_gpu_memory_usage(gpu, library.AmdSmiMemoryType.VRAM)),
    ),
    (
        "nv_gpu_power_usage",
        "GPU power usage in watts",
        lambda library, gpu: _power(library.amdsmi_get_power_info(gpu)),
    ),
    (
        "nv_gpu_power_limit",
        "GPU power management limit in watts",
        lambda library, gpu: _limit(library.amdsmi_get_power_info(gpu)),
    ),
)


def repository_families(rows: Iterable[IndexEntry]) -> Iterable[MetricFamily]:
    samples = [
        Sample({"model": name, "namespace": namespace} if namespace else {"model": name}, int(is_served))
        for (name, namespace), is_served in outcomes(rows).items()
    ]
    yield MetricFamily(
        "rocserve_model_served", "gauge", "1 when the model answers requests, 0 when it does not", samples
    )


def memory_families(memory: RequestMemory) -> Iterable[MetricFamily]:
    use = memory.use()
    yield MetricFamily(
        "rocserve_request_memory_bytes",
        "gauge",
        "Bytes of requests that arrive, wait or run, and of answers that clients have not read yet",
        _by("kind", {"request": use.request_bytes, "answer": use.answer_bytes}),
    )
    yield _single(
        "rocserve_request_memory_limit_bytes",
        "gauge",
        "Limit of the bytes of requests and answers (--max-request-memory)",
        memory.limit_bytes,
    )
    yield MetricFamily(
        "rocserve_request_memory_refusals_total",
        "counter",
        "Requests and answers refused for lack of memory",
        _by("kind", {"request": use.refused_requests, "answer": use.refused_answers}),
    )


def residency_families(residents: ResidentModels) -> Iterable[MetricFamily]:
    """Yield the metrics of models that load on demand; none if there are no such models."""
    if not residents.registered:
        return
    counts = residents.counts

    yield _single("rocserve_models_registered", "gauge", "Model versions that load on demand", residents.registered)
    yield _single("rocserve_models_resident", "gauge", "Those of them that are loaded", residents.resident_count())
    yield _single("rocserve_model_loads_total", "counter", "Loads of model versions on demand", counts.loads)
    yield _single("rocserve_model_load_failures_total", "counter", "Failed loads on demand", counts.failed_loads)
    yield MetricFamily(
        "rocserve_model_unloads_total",
        "counter",
        "Unloads of model versions that load on demand, to make room or after idle time",
        _by("reason", {"room": counts.unloads_for_room, "idle": counts.unloads_of_idle}),
    )
    yield _single("rocserve_cold_requests_total", "counter", "Requests that waited for a load", counts.cold_requests)
    yield _single("rocserve_cold_seconds_total", "counter", "Seconds that they have waited", counts.cold_seconds)
