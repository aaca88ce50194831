"""Writes Prometheus' text format, version 0.0.4. Prometheus' client library would end every counter's name in `_total`,
which Triton's names do not have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rocserve.core.latencies import HistogramReading, SummaryReading

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float
    suffix: str = ""
    """Follows the family's name, such as _bucket."""


@dataclass(frozen=True, slots=True)
class MetricFamily:
    name: str
    kind: str
    """"counter", "gauge", "histogram" or "summary"."""
    help: str
    samples: tuple[Sample, ...]


def exposition(families: Iterable[MetricFamily]) -> str:
    """Return the families' text. A family without samples also has its HELP and TYPE lines."""
    return "".join(line for family in families for line in _lines(family))


def _lines(family: MetricFamily) -> Iterable[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}\n"
    yield f"# TYPE {family.name} {family.kind}\n"
    for sample in family.samples:
        labels = ",".join(f'{name}="{_quoted(text)}"' for name, text in sample.labels.items())
        # Metrics of the whole server have no labels.
        shown = f"{{{labels}}}" if labels else ""
        yield f"{family.name}{sample.suffix}{shown} {_number(sample.value)}\n"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    return "-Inf" if value == -math.inf else "+Inf" if value == math.inf else repr(value)


def histogram_samples(labels: Mapping[str, str], reading: HistogramReading) -> tuple[Sample, ...]:
    rows = [
        Sample({**labels, "le": str(int(bound)) if bound == int(bound) else repr(bound)}, count, "_bucket")
        for bound, count in zip(reading.bounds, reading.cumulative, strict=True)
    ]
    return (
        Sample(labels, reading.count, "_count"),
        Sample(labels, reading.total, "_sum"),
        *rows,
        Sample({**labels, "le": "+Inf"}, reading.count, "_bucket"),
    )


def summary_samples(labels: Mapping[str, str], reading: SummaryReading) -> tuple[Sample, ...]:
    rows = [Sample({**labels, "quantile": repr(quantile)}, value) for quantile, value in reading.quantiles]
    return (Sample(labels, reading.count, "_count"), Sample(labels, reading.total, "_sum"), *rows)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
