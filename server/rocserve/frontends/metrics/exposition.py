"""Writes Prometheus' text format, version 0.0.4. Prometheus' client library would end every counter's name in `_total`,
which Triton's names do not have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rocserve.core.custom_metrics import MetricFamily, Sample
from rocserve.core.latencies import SummaryReading


def exposition(families: Iterable[MetricFamily]) -> str:
    """Return the families' text. A family without samples also has its HELP and TYPE lines."""
    return "".join(line for family in families for line in _lines(family))


def _lines(family: MetricFamily) -> Iterable[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}\n"
    yield f"# TYPE {family.name} {family.kind}\n"
    for sample in family.samples:
        # As Triton's library writes them: in alphabetical order, with `le` and `quantile` behind the others.
        ordered = sorted(sample.labels.items())
        for suffix, more, value in _numbers(sample):
            labels = ",".join(f'{name}="{_quoted(text)}"' for name, text in (*ordered, *more.items()))
            # Metrics of the whole server have no labels.
            shown = f"{{{labels}}}" if labels else ""
            yield f"{family.name}{suffix}{shown} {_number(value)}\n"


def _numbers(sample: Sample) -> Iterable[tuple[str, Mapping[str, str], float]]:
    """Yield the numbers of a sample: what follows the family's name, further labels, and the number."""
    value = sample.value
    if isinstance(value, int | float):
        yield "", {}, value
        return
    yield "_count", {}, value.count
    yield "_sum", {}, value.total
    if isinstance(value, SummaryReading):
        for quantile, number in value.quantiles:
            yield "", {"quantile": repr(quantile)}, number
        return
    for bound, count in zip(value.bounds, value.cumulative, strict=True):
        yield "_bucket", {"le": str(int(bound)) if bound == int(bound) else repr(bound)}, count
    yield "_bucket", {"le": "+Inf"}, value.count


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    return "-Inf" if value == -math.inf else "+Inf" if value == math.inf else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
