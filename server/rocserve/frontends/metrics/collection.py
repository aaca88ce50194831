"""Collects all metrics of a server, as its settings ask for them, when they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

from rocserve.core.latencies import LatencyOptions
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.metrics.exposition import MetricFamily, Sample
from rocserve.frontends.metrics.machine_families import GpuGauges, MachineMetrics, ProcessorGauges
from rocserve.frontends.metrics.model_families import VersionReading, model_families, read_version
from rocserve.repository.engine_plan import Fallback
from rocserve.repository.residency.resident_models import LazyVersion
from rocserve.settings import MetricsSettings

Source = Callable[[], Iterable[MetricFamily]]


class ServerMetrics:
    """Safe on any thread."""

    def __init__(
        self,
        tables: ServingTableHolder,
        fallbacks: Callable[[], Mapping[Fallback, int]],
        options: LatencyOptions,
        further: Sequence[Source] = (),
    ) -> None:
        """`further`: other sources: the machine's gauges, and the metrics that models define."""
        self._tables = tables
        self._fallbacks = fallbacks
        self._options = options
        self._further = further

    def families(self) -> Iterable[MetricFamily]:
        """Of the versions that are ready, and of what happened since the server started. Of thousands that are only
        registered, those that were never asked have no numbers."""
        table = self._tables.table
        readings = [
            read_version(version, model.namespace)
            for model in table.all_models
            for version in model.versions.values()
            if not isinstance(version, LazyVersion) or version.was_asked
        ]
        yield from model_families(readings, self._options.counters)
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
            tuple(
                Sample({name: str(value) for name, value in asdict(fallback).items()}, count)
                for fallback, count in self._fallbacks().items()
            ),
        )
        for source in self._further:
            yield from source()


def _engine(reading: VersionReading) -> Sample:
    properties = reading.version.properties
    replaces = properties.get("engine_replaces", "")
    return Sample({**reading.labels, "engine": properties["engine"], "replaces": replaces}, 1)


def assemble_metrics(
    settings: MetricsSettings,
    options: LatencyOptions,
    tables: ServingTableHolder,
    fallbacks: Callable[[], Mapping[Fallback, int]],
    further: Sequence[Source],
    log: logging.Logger,
) -> ServerMetrics:
    """`further`: other sources beside the machine's gauges."""
    gauges: list[Callable[[], Sequence[MetricFamily]]] = []
    if settings.allow and settings.gpu:
        gauges.append(GpuGauges(log).families)
    if settings.allow and settings.cpu:
        try:
            gauges.append(ProcessorGauges().families)
        except (OSError, ValueError, IndexError) as error:
            log.warning("there are no metrics of the processors: %s", error)
    machine = MachineMetrics(gauges, settings.interval_ms / 1000, log)
    return ServerMetrics(tables, fallbacks, options, (*further, machine.families))
