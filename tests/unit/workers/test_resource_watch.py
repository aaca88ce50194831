"""Watches of workers: their processes (real ones), how much they write, and what counts as a hang."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from signal import SIGKILL

import psutil
import pytest
from support.virtual_time import in_virtual_time
from support.waiting import PATIENCE_SECONDS, until, wait_until
from support.workers import LOG

from rocserve.observability import failures
from rocserve.settings import NO_TIME_LIMITS, TimeLimits
from rocserve.workers import worker_output
from rocserve.workers.answer_watch import AnswerWatch, ProcessState, Silence, process_state
from rocserve.workers.instance import PendingAnswers
from rocserve.workers.resource_watch import ResourceWatch, read_processes
from rocserve.workers.worker_output import WorkerOutput

ROW_COUNT = 10
# Each process lives until the next one has been forked; several such chains, which write when they begin, for a minute
# at most.
ROWS = f"""
import os, time
end = time.monotonic() + 60
for row in range({ROW_COUNT}):
    if os.fork() == 0:
        os.write(1, b".")
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
        os._exit(0)
time.sleep(60)
"""
SLEEPER_COUNT = 5
SLEEPERS = f"""
import os, time
if all(os.fork() for number in range({SLEEPER_COUNT})):
    os.write(1, b".")
time.sleep(600)
"""


class Worker:
    """A process with a separate group, which is killed when it must end."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-S", "-c", code], process_group=0, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self.reasons: list[str] = []
        self.states: list[str] = []
        """The states of its group's processes when it had to end, without zombies."""

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end_because(self, reason: str, exceeds_limit: bool) -> None:
        assert exceeds_limit
        self.reasons.append(reason)
        # A signal takes effect when its process runs next.
        wait_until(lambda: set(self._states_now()) == {psutil.STATUS_STOPPED}, "the stop of all processes")
        self.states = self._states_now()
        self.end()

    def _states_now(self) -> list[str]:
        group = [process.pid for process in read_processes() if process.group == self.pid and not process.is_zombie]
        states = []
        for pid in group:
            # One that was about to end may have ended since.
            with suppress(psutil.NoSuchProcess):
                states.append(psutil.Process(pid).status())
        return [state for state in states if state != psutil.STATUS_ZOMBIE]

    def written(self, count: int) -> bytes:
        """So many bytes of what it has written to standard output, once they are there."""
        assert self._process.stdout is not None
        return self._process.stdout.read(count)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = Worker(request.param)
    yield worker
    worker.end()


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """A context in which this process can open this many more files."""
    # Descriptors of earlier tests are closed now, and not within the context.
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1], ids=["for nothing", "for the folder of processes"])
@pytest.mark.parametrize("worker", [SLEEPERS], indirect=True, ids=["sleepers"])
async def test_a_watch_goes_on_when_the_server_has_descriptors_again(worker: Worker, left: int) -> None:
    watch = ResourceWatch()
    assert worker.written(1) == b"."
    with descriptors_left(left):
        watch.add(worker, 0, 3)
        await asyncio.sleep(0.4)
        assert not worker.reasons
    await until(lambda: worker.reasons)
    assert worker.reasons == ["limit of 3 tasks exceeded (it had 6 processes and threads)"]
    await watch.close()


@pytest.mark.parametrize("worker", [ROWS], indirect=True, ids=["rows"])
async def test_processes_that_fork_without_end_are_all_stopped_before_they_are_killed(worker: Worker) -> None:
    watch = ResourceWatch()
    assert worker.written(ROW_COUNT) == b"." * ROW_COUNT
    watch.add(worker, 0, 3)
    await until(lambda: worker.reasons)
    assert worker.reasons[0].startswith("limit of 3 tasks exceeded")
    assert len(worker.states) > ROW_COUNT and set(worker.states) == {psutil.STATUS_STOPPED}
    await watch.close()


class Writing:
    """Writes bytes into a pipe, from a thread."""

    def __init__(self, data: bytes) -> None:
        self.reader, self._writer = os.pipe()
        self._data = data
        self.thread = threading.Thread(target=self._write)
        self.thread.start()

    def _write(self) -> None:
        with open(self._writer, "wb", buffering=0) as file:  # noqa: PTH123
            view = memoryview(self._data)
            while view:
                view = view[file.write(view) :]


@pytest.fixture
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the bounds of the log's rate."""
    allowance = failures.Allowance
    monkeypatch.setattr(worker_output, "Allowance", lambda burst, rate: allowance(burst, rate, lambda: 0.0))
    monkeypatch.setattr(worker_output, "_REPORT_SECONDS", 2 * PATIENCE_SECONDS)


async def log_of(data: bytes, caplog: pytest.LogCaptureFixture) -> tuple[list[str], WorkerOutput]:
    """The log's lines of what was written, as it was read in these pieces."""
    writing = Writing(data)
    output = WorkerOutput(writing.reader, "m:1: ", LOG)
    with caplog.at_level("INFO", LOG.name):
        await asyncio.to_thread(writing.thread.join, PATIENCE_SECONDS)
        assert not writing.thread.is_alive()
        output.close()
    return [record.message for record in caplog.records], output


def left_out(lines: list[str]) -> int:
    return sum(int(found[1]) for line in lines if (found := re.search(r"(\d+) lines dropped", line)))


@pytest.mark.usefixtures("_no_time_passes")
async def test_every_line_of_a_flood_is_written_or_counted(caplog: pytest.LogCaptureFixture):
    data = b"".join(b"line %d\n" % number for number in range(200_000)) + b"the end\n"
    lines, output = await log_of(data, caplog)
    written = [line for line in lines if line.startswith("m:1: line ") or line == "m:1: the end"]
    assert written == [f"m:1: line {number}" for number in range(500)]
    # One line with the number of dropped lines, and not one for each.
    assert lines == [*written, "m:1: 199501 lines dropped: the model writes too fast"]
    assert output.last_line == "the end"


async def test_the_last_line_is_the_last_where_only_the_first_ones_are_written(caplog: pytest.LogCaptureFixture):
    """All in one piece, of which the burst takes the beginning."""
    _, output = await log_of(b"line\n" * 600 + b"the end\n", caplog)
    assert output.last_line == "the end"


@pytest.mark.usefixtures("_no_time_passes")
async def test_long_lines_are_bounded_by_what_they_take(caplog: pytest.LogCaptureFixture):
    lines, _ = await log_of((b"x" * 4000 + b"\n") * 400, caplog)
    written = (256 << 10) // 4000
    assert sum(line.startswith("m:1: xxx") for line in lines) == written
    assert left_out(lines) == 400 - written


async def test_the_last_words_before_a_crash_are_found_in_a_flood(caplog: pytest.LogCaptureFixture):
    data = b"line\n" * 2000 + b"last words\nFatal Python error: Aborted\n" + b"a frame\n" * 20
    _, output = await log_of(data, caplog)
    assert output.last_line == "last words"


RUNS = ProcessState()
STOPPED = ProcessState(is_stopped=True)
TRACED = ProcessState(is_traced=True)
LIMITS = TimeLimits(request_timeout_seconds=0, hang_timeout_seconds=600)


def after(
    looks: Sequence[tuple[PendingAnswers, ProcessState]], limits: TimeLimits = LIMITS, passed: float = 60.0
) -> Silence:
    silence = Silence(limits)
    for pending_answers, process in looks:
        silence.check(pending_answers, process, passed)
    return silence


def test_a_batch_without_an_answer_is_a_hang_once_the_limit_has_passed():
    assert after([(PendingAnswers(7), RUNS)] * 10).excess == ""
    silence = after([(PendingAnswers(7), RUNS)] * 11)
    assert (silence.seconds, silence.excess) == (600, "it hung for 600 s (hang_timeout_secs)")


def test_a_model_that_answers_or_streams_is_not_hung():
    assert after([(PendingAnswers(batch), RUNS) for batch in range(1, 100)]).seconds == 0
    # One batch for hours, with a response now and then.
    assert (
        after([(PendingAnswers(7, open_requests=1, messages=messages), RUNS) for messages in range(100)]).seconds == 0
    )
    assert after([(PendingAnswers(), RUNS)] * 100).seconds == 0


def test_a_model_that_waits_for_another_is_due_again_when_that_has_answered():
    waits = (PendingAnswers(7, open_calls=1, messages=3), RUNS)
    assert after([waits] * 100).seconds == 0
    assert after([waits] * 100 + [(PendingAnswers(7, messages=3), RUNS)] * 10).excess == ""
    assert after([waits] * 100 + [(PendingAnswers(7, messages=3), RUNS)] * 11).excess != ""


def test_requests_that_a_model_holds_open_are_no_hang_unless_its_process_is_stopped():
    holds = PendingAnswers(open_requests=5, messages=9)
    assert after([(holds, RUNS)] * 100).excess == ""
    assert not after([(holds, RUNS)] * 100).is_reported
    # The time counts from the stop on, with or without calls.
    stopped = (replace(holds, open_calls=2), STOPPED)
    assert after([(holds, RUNS)] * 100 + [stopped] * 10).excess == ""
    assert after([stopped] * 11).excess == "its process was stopped for 600 s (hang_timeout_secs)"
    assert after([(PendingAnswers(), STOPPED)] * 100).excess == ""


def test_what_a_debugger_has_is_left_to_it():
    assert after([(PendingAnswers(7), TRACED)] * 100, replace(LIMITS, request_timeout_seconds=5)).excess == ""


def test_a_limit_for_answers_counts_for_open_requests_too():
    limits = TimeLimits(request_timeout_seconds=120, hang_timeout_seconds=600)
    text = "it had not answered for 120 s (request_timeout_secs)"
    assert after([(PendingAnswers(7), RUNS)] * 3, limits).excess == text
    assert after([(PendingAnswers(open_requests=1), RUNS)] * 3, limits).excess == text
    assert after([(PendingAnswers(7), RUNS)] * 1000, NO_TIME_LIMITS).excess == ""


def test_it_is_reported_after_ten_seconds_or_half_of_a_short_limit():
    assert not after([(PendingAnswers(7), RUNS)] * 10, passed=1).is_reported
    assert after([(PendingAnswers(7), RUNS)] * 11, passed=1).is_reported
    assert after([(PendingAnswers(7), RUNS)] * 2, replace(LIMITS, request_timeout_seconds=2), passed=1).is_reported
    assert after([(PendingAnswers(7), RUNS)] * 11, NO_TIME_LIMITS, passed=1).is_reported


class Instance:
    def __init__(self) -> None:
        self.now = PendingAnswers()
        self.unread = False

    def pending_answers(self) -> PendingAnswers:
        return self.now

    def has_unread(self) -> bool:
        return self.unread


@in_virtual_time
async def test_a_watch_reports_once_and_not_while_there_is_something_to_read():
    fine, hangs = Instance(), Instance()
    silences: list[Sequence[float]] = []
    hung: list[str] = []
    limits = TimeLimits(hang_timeout_seconds=0.1)
    watch = AnswerWatch([fine, hangs], limits, lambda: RUNS, silences.append, hung.append)
    hangs.now, hangs.unread = PendingAnswers(1), True
    await asyncio.sleep(0.4)
    assert hung == []
    assert any(len(seconds) == 1 for seconds in silences)
    hangs.unread = False
    await asyncio.sleep(0.2)
    assert hung == ["it hung for 0.1 s (hang_timeout_secs)"]
    assert silences[-1] == []
    watch.stop()


@in_virtual_time
async def test_a_limit_of_next_to_nothing_does_not_take_the_loop():
    looks = 0

    def look() -> ProcessState:
        nonlocal looks
        looks += 1
        return TRACED

    instance = Instance()
    instance.now = PendingAnswers(1)
    watch = AnswerWatch([instance], TimeLimits(hang_timeout_seconds=1e-9), look, lambda _: None, lambda _: None)
    await asyncio.sleep(0.3)
    watch.stop()
    assert 1 <= looks <= 7


async def test_time_in_which_the_server_stood_itself_does_not_count(monkeypatch):
    instance = Instance()
    instance.now = PendingAnswers(1)
    hung: list[str] = []
    loop = asyncio.get_running_loop()
    watch = AnswerWatch([instance], TimeLimits(hang_timeout_seconds=600), lambda: RUNS, lambda _: None, hung.append)
    moment = loop.time()
    monkeypatch.setattr(loop, "time", lambda: moment)
    watch._check()
    moment += 10_000
    watch._check()
    watch.stop()
    monkeypatch.undo()
    assert hung == []


def test_the_kernel_says_who_is_stopped():
    process = subprocess.Popen(["sleep", "600"])
    try:
        assert process_state(process.pid) == RUNS
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert process_state(process.pid) == STOPPED
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) == RUNS
