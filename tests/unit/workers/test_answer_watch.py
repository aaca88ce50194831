"""What counts as a worker that hangs, and what does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from rocserve.settings import NO_TIME_LIMITS, TimeLimits
from rocserve.workers.answer_watch import AnswerWatch, Owed, ProcessState, Silence, process_state

RUNS = ProcessState()
STOPPED = ProcessState(is_stopped=True)
TRACED = ProcessState(is_traced=True)
LIMITS = TimeLimits(request_seconds=0, hang_seconds=600)


def after(looks: Sequence[tuple[Owed, ProcessState]], limits: TimeLimits = LIMITS, passed: float = 60.0) -> Silence:
    silence = Silence(limits)
    for owed, process in looks:
        silence.check(owed, process, passed)
    return silence


def test_a_batch_without_an_answer_is_a_hang_once_the_limit_has_passed():
    assert after([(Owed(7), RUNS)] * 10).excess == ""
    silence = after([(Owed(7), RUNS)] * 11)
    assert (silence.seconds, silence.excess) == (600, "it hung for 600 s (hang_timeout_secs)")


def test_a_model_that_answers_or_streams_is_not_hung():
    assert after([(Owed(batch), RUNS) for batch in range(1, 100)]).seconds == 0
    # One batch for hours, with a response now and then.
    assert after([(Owed(7, requests=1, said=said), RUNS) for said in range(100)]).seconds == 0
    assert after([(Owed(), RUNS)] * 100).seconds == 0


def test_a_model_that_waits_for_another_is_due_again_when_that_has_answered():
    waits = (Owed(7, calls=1, said=3), RUNS)
    assert after([waits] * 100).seconds == 0
    assert after([waits] * 100 + [(Owed(7, said=3), RUNS)] * 10).excess == ""
    assert after([waits] * 100 + [(Owed(7, said=3), RUNS)] * 11).excess != ""


def test_requests_that_a_model_holds_open_are_no_hang_unless_its_process_is_stopped():
    holds = Owed(requests=5, said=9)
    assert after([(holds, RUNS)] * 100).excess == ""
    assert not after([(holds, RUNS)] * 100).is_reported
    # The time counts from the stop on, calls or not.
    stopped = (replace(holds, calls=2), STOPPED)
    assert after([(holds, RUNS)] * 100 + [stopped] * 10).excess == ""
    assert after([stopped] * 11).excess == "its process was stopped for 600 s (hang_timeout_secs)"
    assert after([(Owed(), STOPPED)] * 100).excess == ""


def test_what_a_debugger_has_is_left_to_it():
    assert after([(Owed(7), TRACED)] * 100, replace(LIMITS, request_seconds=5)).excess == ""


def test_a_limit_for_answers_counts_for_open_requests_too():
    limits = TimeLimits(request_seconds=120, hang_seconds=600)
    text = "it had not answered for 120 s (request_timeout_secs)"
    assert after([(Owed(7), RUNS)] * 3, limits).excess == text
    assert after([(Owed(requests=1), RUNS)] * 3, limits).excess == text
    assert after([(Owed(7), RUNS)] * 1000, NO_TIME_LIMITS).excess == ""


def test_it_is_reported_after_ten_seconds_or_half_of_a_short_limit():
    assert not after([(Owed(7), RUNS)] * 10, passed=1).is_reported
    assert after([(Owed(7), RUNS)] * 11, passed=1).is_reported
    assert after([(Owed(7), RUNS)] * 2, replace(LIMITS, request_seconds=2), passed=1).is_reported
    assert after([(Owed(7), RUNS)] * 11, NO_TIME_LIMITS, passed=1).is_reported


class Instance:
    def __init__(self) -> None:
        self.now = Owed()
        self.unread = False

    def owed(self) -> Owed:
        return self.now

    def has_unread(self) -> bool:
        return self.unread


async def test_a_watch_reports_once_and_not_while_there_is_something_to_read():
    fine, hangs = Instance(), Instance()
    silences: list[Sequence[float]] = []
    hung: list[str] = []
    limits = TimeLimits(hang_seconds=0.1)
    watch = AnswerWatch([fine, hangs], limits, lambda: RUNS, silences.append, hung.append)
    hangs.now, hangs.unread = Owed(1), True
    await asyncio.sleep(0.4)
    assert hung == []
    assert any(len(seconds) == 1 for seconds in silences)
    hangs.unread = False
    await asyncio.sleep(0.2)
    assert hung == ["it hung for 0.1 s (hang_timeout_secs)"]
    assert silences[-1] == []
    watch.stop()


async def test_a_limit_of_next_to_nothing_does_not_take_the_loop():
    looks = 0

    def look() -> ProcessState:
        nonlocal looks
        looks += 1
        return TRACED

    instance = Instance()
    instance.now = Owed(1)
    watch = AnswerWatch([instance], TimeLimits(hang_seconds=1e-9), look, lambda _: None, lambda _: None)
    await asyncio.sleep(0.3)
    watch.stop()
    assert 1 <= looks <= 7


async def test_time_in_which_the_server_stood_itself_does_not_count(monkeypatch):
    instance = Instance()
    instance.now = Owed(1)
    hung: list[str] = []
    loop = asyncio.get_running_loop()
    watch = AnswerWatch([instance], TimeLimits(hang_seconds=600), lambda: RUNS, lambda _: None, hung.append)
    moment = loop.time()
    monkeypatch.setattr(loop, "time", lambda: moment)
    watch._check()
    moment += 10_000
    watch._check()
    watch.stop()
    monkeypatch.undo()
    assert hung == []


def test_the_kernel_says_who_is_stopped():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert process_state(process.pid) == RUNS
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert process_state(process.pid) == STOPPED
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) == RUNS
