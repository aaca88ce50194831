"""A child's messages, and the reports about its job while it runs and at its end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from rocserve.jobs.runner import JobOutput, JobWatch


@pytest.fixture
def output() -> Iterator[JobOutput]:
    with closing(JobOutput()) as output:
        yield output


def test_lines_are_taken_as_they_come_and_half_a_line_in_the_end(output: JobOutput) -> None:
    os.write(output.descriptor, b"one\ntw")
    assert output.take_lines() == ["one"]
    os.write(output.descriptor, b"o\n\n   \nthree")
    assert output.take_lines() == ["two"]
    assert output.take_lines(ended=True) == ["three"]
    assert [*output.last_lines] == ["one", "two", "three"]


def test_what_is_not_text_is_made_visible_and_long_lines_are_cut(output: JobOutput) -> None:
    os.write(output.descriptor, b"\x1b[2Jwiped\xff\n" + b"x" * 5000 + b"\n")
    wiped, cut = output.take_lines()
    assert wiped == "\\x1b[2Jwiped\\xff"
    assert cut == "x" * 2000 + " ... (cut)"


def test_colours_are_removed(output: JobOutput) -> None:
    os.write(output.descriptor, b"\x1b[33m2026-05-29 10:43:58.000001 [WARN] [a.cpp:7] slow\x1b[0m\n")
    assert output.take_lines() == ["2026-05-29 10:43:58.000001 [WARN] [a.cpp:7] slow"]


def test_the_file_does_not_grow_without_end(output: JobOutput) -> None:
    line = b"y" * 999 + b"\n"
    for _ in range(4):
        os.write(output.descriptor, line * 5000)
        assert len(output.take_lines()) == 5000
    assert os.fstat(output.descriptor).st_size < 8 << 20
    os.write(output.descriptor, b"after\n")
    assert output.take_lines() == ["after"]


def test_a_line_without_end_is_not_kept_whole(output: JobOutput) -> None:
    for _ in range(40):
        os.write(output.descriptor, b"z" * 100_000)
        assert output.take_lines() == []
    (line,) = output.take_lines(ended=True)
    assert line.endswith(" ... (cut)")
    assert len(line) < 3000


def test_only_the_last_lines_are_remembered(output: JobOutput) -> None:
    os.write(output.descriptor, b"".join(b"%d\n" % number for number in range(100)))
    output.take_lines()
    assert [*output.last_lines] == [str(number) for number in range(88, 100)]


NO_DESCRIPTORS = """
import os, resource
from rocserve.jobs.runner import JobProcess

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
before = os.listdir("/proc/self/fd")
failures = 0
for free in range(1, 20):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) - 1 + free, most))
    try:
        with JobProcess(["true"], os.environ, b"x"):
            pass
    except OSError:
        failures += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    assert os.listdir("/proc/self/fd") == before, free
print(failures)
"""


def test_where_descriptors_are_out_none_is_left_behind() -> None:
    done = subprocess.run([sys.executable, "-c", NO_DESCRIPTORS], stdout=subprocess.PIPE, check=True)
    # A process takes about a dozen; the last of the limits is enough.
    assert 5 < int(done.stdout) < 19


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


def test_a_phase_is_reported_when_it_begins_and_then_with_its_duration(
    watch: JobWatch, clock: Clock, reports: list[str]
) -> None:
    watch.enter_phase("reading the model")
    for _ in range(70):
        clock.seconds += 1
        watch.report_when_due()
    clock.seconds += 7200
    watch.enter_phase("saving")
    assert reports == [
        "compiling batch size 4: reading the model",
        "compiling batch size 4: reading the model (5 s so far)",
        "compiling batch size 4: reading the model (13 s so far)",
        "compiling batch size 4: reading the model (25 s so far)",
        "compiling batch size 4: reading the model (42 s so far)",
        "compiling batch size 4: reading the model (1 min 8 s so far)",
        "compiling batch size 4: saving (2 h 1 min so far)",
    ]


def test_what_migraphx_warns_of_is_a_warning(watch: JobWatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watch.log_lines(["[WARNING]: old", "12:00 [WARN] [a.cpp:7] new", "12:00 [INFO] [a.cpp:7] said"])
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


def test_a_report_has_the_last_line_of_migraphx(watch: JobWatch, clock: Clock, reports: list[str]) -> None:
    watch.enter_phase("compiling")
    watch.log_lines(["Benchmarking gpu::mlir_op: 3 configs", "  Benchmarking gpu::mlir_op: 16 configs  "])
    clock.seconds += 5
    watch.report_when_due()
    watch.enter_phase("saving")
    assert reports == [
        "compiling batch size 4: compiling",
        "compiling batch size 4: compiling (5 s so far); MIGraphX: Benchmarking gpu::mlir_op: 16 configs",
        "compiling batch size 4: saving (5 s so far)",
    ]
