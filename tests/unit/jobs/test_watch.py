"""What is told of a job while it goes on."""

from __future__ import annotations

import logging

import pytest

from rocserve.jobs.runner import JobWatch


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def watch(clock: Clock, reports: list[str]) -> JobWatch:
    return JobWatch("compiling batch size 4", reports.append, logging.getLogger("test.watch"), "MIGraphX", clock)


def test_a_phase_is_told_at_once_and_then_with_the_time_it_has_taken(
    watch: JobWatch, clock: Clock, reports: list[str]
) -> None:
    watch.enters("reading the model")
    for _ in range(70):
        clock.seconds += 1
        watch.report_when_due()
    clock.seconds += 7200
    watch.enters("saving")
    assert reports == [
        "compiling batch size 4: reading the model",
        "compiling batch size 4: reading the model (5 s so far)",
        "compiling batch size 4: reading the model (13 s so far)",
        "compiling batch size 4: reading the model (25 s so far)",
        "compiling batch size 4: reading the model (42 s so far)",
        "compiling batch size 4: reading the model (1 min 8 s so far)",
        "compiling batch size 4: saving (2 h 1 min so far)",
    ]


def test_what_migraphx_said_last_is_told_with_it(watch: JobWatch, clock: Clock, reports: list[str]) -> None:
    watch.enters("compiling")
    watch.takes_lines(["Benchmarking gpu::mlir_op: 3 configs", "  Benchmarking gpu::mlir_op: 16 configs  "])
    clock.seconds += 5
    watch.report_when_due()
    watch.enters("saving")
    assert reports == [
        "compiling batch size 4: compiling",
        "compiling batch size 4: compiling (5 s so far); MIGraphX: Benchmarking gpu::mlir_op: 16 configs",
        "compiling batch size 4: saving (5 s so far)",
    ]
