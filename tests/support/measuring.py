"""Measures servers with the benchmarks' load generator, also on a busy machine."""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.contenders import Contender
from benchmarks.load_generator import LoadFailed
from benchmarks.ratios import Measurement

_SECONDS = 0.5


def measured(contender: Contender, case: Case) -> Measurement:
    """Measure until the server has had the time for an answer. Raises as Contender.measure does."""
    while True:
        try:
            return contender.measure(case, _SECONDS)
        except LoadFailed as failure:
            if not str(failure).startswith("of 0 requests "):
                raise
