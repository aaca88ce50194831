"""The metrics of models that come and go."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.frontends.metrics.exposition import MetricFamily, Sample
from rocserve.repository.residency.resident_models import ResidentModels


def residency_families(residents: ResidentModels) -> Iterable[MetricFamily]:
    """Nothing where all models are loaded, and stay."""
    if not residents.registered:
        return
    counts = residents.counts

    def family(name: str, kind: str, text: str, value: float) -> MetricFamily:
        return MetricFamily(name, kind, text, (Sample({}, value),))

    yield family("rocserve_models_registered", "gauge", "Model versions that come and go", residents.registered)
    yield family("rocserve_models_resident", "gauge", "Of those, how many are loaded", residents.resident())
    yield family("rocserve_model_loads_total", "counter", "How often one was loaded", counts.loads)
    yield family("rocserve_model_load_failures_total", "counter", "How often a load failed", counts.failed_loads)
    yield MetricFamily(
        "rocserve_model_unloads_total",
        "counter",
        "How often one was unloaded, to make room or because nobody asked for it",
        (Sample({"reason": "room"}, counts.unloads_for_room), Sample({"reason": "idle"}, counts.unloads_of_idle)),
    )
    yield family("rocserve_cold_requests_total", "counter", "Requests that waited for a load", counts.cold_requests)
    yield family("rocserve_cold_seconds_total", "counter", "How long they have waited in all", counts.cold_seconds)
