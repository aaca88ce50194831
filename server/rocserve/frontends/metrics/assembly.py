"""All metrics of a server, as its settings ask for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from rocserve.core.latencies import LatencyOptions
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.metrics.collection import ServerMetrics, Source
from rocserve.frontends.metrics.exposition import MetricFamily
from rocserve.frontends.metrics.machine_families import GpuGauges, MachineMetrics, ProcessorGauges
from rocserve.repository.fallbacks import Fallback
from rocserve.settings import MetricsSettings


def assemble_metrics(
    settings: MetricsSettings,
    options: LatencyOptions,
    tables: ServingTableHolder,
    fallbacks: Callable[[], Mapping[Fallback, int]],
    further: Sequence[Source],
    log: logging.Logger,
) -> ServerMetrics:
    """`further`: what else there is to tell beside the machine's."""
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
