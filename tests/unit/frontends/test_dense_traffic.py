"""When the reactor borrows the completion thread's work, and when it gives it back."""

from __future__ import annotations

import time
from collections import deque

import pytest

from rocserve.frontends.grpc import dense_traffic
from rocserve.frontends.grpc.dense_traffic import BURST_EVENTS, DENSE_EVENTS, DenseTraffic


class Companion:
    """A companion whose workers answer as the test has it."""

    def __init__(self) -> None:
        self.lends = True
        self.borrowed = 0
        self.given_back = 0
        self.due = 0
        self.timer = False
        self.answers: deque[bool] = deque()
        self.log: list[str] = []
        self.waits: list[float] = []

    @property
    def awaited(self) -> set[object]:
        return set(range(self.due))

    def has_timer_within(self, seconds: float) -> bool:
        return self.timer

    def borrow(self, patience_seconds: float) -> bool:
        self.borrowed += self.lends
        return self.lends

    def give_back(self) -> None:
        self.given_back += 1

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        self.waits.append(seconds)
        return [(7, 1)] if self.answers and self.answers.popleft() else []

    def handle(self, readable: list[tuple[int, int]]) -> None:
        self.due -= 1
        self.log.append("answer")

    def begin_collecting(self) -> None:
        self.log.append("begin")

    def end_collecting(self) -> None:
        self.log.append("end")


class Queue:
    """Events by the test's hand; None where nothing comes."""

    def __init__(self, *events: str | None) -> None:
        self.events = deque(events)
        self.deadlines: list[float] = []

    def poll(self, deadline: float) -> str | None:
        self.deadlines.append(deadline)
        return self.events.popleft() if self.events else None


def make(companion: Companion, queue: Queue) -> DenseTraffic:
    return DenseTraffic(companion, queue.poll, companion.log.append)


def test_many_events_in_a_short_time_are_dense():
    dense = make(Companion(), Queue())
    counted = [dense.count() for _ in range(DENSE_EVENTS)]
    assert counted == [False] * (DENSE_EVENTS - 1) + [True]


def test_the_same_number_over_a_longer_time_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense_traffic, "DENSE_SECONDS", 0.001)
    dense = make(Companion(), Queue())
    for _ in range(DENSE_EVENTS - 1):
        dense.count()
    time.sleep(0.01)
    assert not dense.count()


def test_a_burst_is_collected_before_the_next_answer_is_taken():
    companion = Companion()
    companion.due = 2
    companion.answers.extend([True, True])
    burst = [str(number) for number in range(BURST_EVENTS)]
    make(companion, Queue(*burst, None, "late", None)).run(lambda: False)
    log = companion.log
    assert log[:BURST_EVENTS] == burst
    # From now on calls come in bursts: each is collected, and handled before the answer that has come meanwhile.
    assert log[BURST_EVENTS : BURST_EVENTS + 4] == ["begin", "late", "end", "answer"]
    assert (companion.borrowed, companion.given_back) == (1, 1)


def test_single_calls_are_not_held():
    companion = Companion()
    companion.due = 1
    companion.answers.extend([True])
    make(companion, Queue("one", None)).run(lambda: False)
    assert companion.log[:2] == ["one", "answer"]


@pytest.mark.parametrize("cpus", [1, 2])
def test_an_answer_that_comes_soon_is_looked_for_where_there_is_a_cpu_to_spare(
    monkeypatch: pytest.MonkeyPatch, cpus: int
):
    monkeypatch.setattr(dense_traffic, "usable_cpus", lambda: cpus)
    companion = Companion()
    companion.due = 1
    companion.answers.extend([False, True] if cpus == 2 else [True])
    make(companion, Queue("one", None)).run(lambda: False)
    assert companion.log == ["one", "answer"]
    assert companion.waits == ([0, 0] if cpus == 2 else [dense_traffic.WORKER_WAIT_SECONDS])


def test_slow_workers_end_it():
    companion = Companion()
    companion.due = 1
    make(companion, Queue()).run(lambda: False)
    assert companion.given_back == 1
    assert "answer" not in companion.log


def test_quiet_clients_end_it():
    queue = Queue()
    companion = Companion()
    make(companion, queue).run(lambda: False)
    assert companion.given_back == 1
    assert queue.deadlines[-1] > time.time() - 1


def test_a_timer_ends_it_because_the_queue_would_be_late_for_it():
    queue = Queue()
    companion = Companion()
    companion.timer = True
    make(companion, queue).run(lambda: False)
    assert companion.given_back == 1
    assert queue.deadlines == [0.0]


def test_a_worker_that_speaks_unasked_is_heard_between_calls(monkeypatch: pytest.MonkeyPatch):
    # A flood of calls that no worker answers, such as health checks.
    monkeypatch.setattr(dense_traffic, "QUEUE_WAIT_SECONDS", 0.0)
    companion = Companion()
    companion.answers.extend([False, True])
    make(companion, Queue(None, "one", None, "two", None)).run(lambda: False)
    assert companion.log[:3] == ["one", "answer", "two"]
    assert not any(companion.waits)


def test_a_busy_companion_is_left_alone():
    companion = Companion()
    companion.lends = False
    make(companion, Queue("one")).run(lambda: False)
    assert companion.log == []
    assert companion.given_back == 0


def test_it_ends_with_the_server():
    companion = Companion()
    make(companion, Queue("one")).run(lambda: True)
    assert companion.log == []
    assert companion.given_back == 1
