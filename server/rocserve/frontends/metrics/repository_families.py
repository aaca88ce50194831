"""The metric of models that are not served."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.core.serving import IndexEntry
from rocserve.frontends.metrics.exposition import MetricFamily, Sample
from rocserve.repository.summary import outcomes


def repository_families(rows: Iterable[IndexEntry]) -> Iterable[MetricFamily]:
    """`rows`: those of the repository index."""
    samples = tuple(Sample({"model": name}, int(is_served)) for name, is_served in outcomes(rows).items())
    yield MetricFamily(
        "rocserve_model_served", "gauge", "1 when the model answers requests, 0 when it does not", samples
    )
