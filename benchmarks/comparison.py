"""Measures in interleaved rounds: every contender is measured alone, one after another, in changing order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.cases import Case
from benchmarks.contenders import Contender
from benchmarks.ratios import Measurement


@dataclass(frozen=True, slots=True)
class Comparison:
    """A case's measurements, by contender, in the order of the rounds."""

    case: Case
    measurements: dict[str, list[Measurement]]
    idle_share: dict[str, float]
    """The largest share of one core that each contender used while another was measured."""


def compare(
    case: Case, contenders: Sequence[Contender], rounds: int, seconds: float, report: Callable[[str], None]
) -> Comparison:
    """Measure the contenders `rounds` times for `seconds` each.

    `report` takes each measurement as a line.
    """
    for contender in contenders:
        contender.prepare(case)
    measurements: dict[str, list[Measurement]] = {contender.name: [] for contender in contenders}
    idle_share = dict.fromkeys(measurements, 0.0)
    for index in range(rounds):
        for contender in round_order(contenders, index):
            own_before = contender.cpu_seconds()
            idle = [other for other in contenders if other is not contender]
            cpu_before = [other.cpu_seconds() for other in idle]
            begin = time.monotonic()
            measurement = contender.measure(case, seconds)
            elapsed = time.monotonic() - begin
            for other, before in zip(idle, cpu_before, strict=True):
                share = (other.cpu_seconds() - before) / elapsed
                idle_share[other.name] = max(idle_share[other.name], share)
            requests = measurement.rate / case.units_per_request * seconds
            own = (contender.cpu_seconds() - own_before) / requests
            measurements[contender.name].append(replace(measurement, cpu=own))
            report(f"{case.title}, round {index + 1}: {contender.name} {measurement.rate:,.1f} {case.unit}")
    return Comparison(case, measurements, idle_share)


def round_order(contenders: Sequence[Contender], index: int) -> list[Contender]:
    """The order of a round: each round begins with the next contender, so that none always runs after the same other
    one."""
    first = index % len(contenders)
    return [*contenders[first:], *contenders[:first]]
