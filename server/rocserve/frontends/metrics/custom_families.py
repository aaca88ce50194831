"""The metrics that models define themselves."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.core.custom_metrics import CustomMetrics
from rocserve.core.distributions import HistogramReading
from rocserve.frontends.metrics.exposition import MetricFamily, Sample, histogram_samples


def custom_families(metrics: CustomMetrics) -> Iterable[MetricFamily]:
    for family in metrics.read():
        samples: list[Sample] = []
        for labels, value in family.series:
            if isinstance(value, HistogramReading):
                samples += histogram_samples(labels, value)
            else:
                samples.append(Sample(labels, value))
        yield MetricFamily(family.name, family.kind.value, family.help, tuple(samples))
