"""Prometheus' text format, version 0.0.4.

Written here, for Prometheus' own client library ends the name of every counter in `_total`, and Triton's have no such
ending.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class MetricFamily:
    name: str
    kind: str
    """counter or gauge."""
    help: str
    samples: tuple[Sample, ...]


def exposition(families: Iterable[MetricFamily]) -> str:
    """The families, each with its head, whether or not it has samples."""
    return "".join(line for family in families for line in _lines(family))


def _lines(family: MetricFamily) -> Iterable[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}\n"
    yield f"# TYPE {family.name} {family.kind}\n"
    for sample in family.samples:
        labels = ",".join(f'{name}="{_quoted(text)}"' for name, text in sample.labels.items())
        yield f"{family.name}{{{labels}}} {_number(sample.value)}\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
