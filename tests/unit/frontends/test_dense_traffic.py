"""When the reactor borrows the completion thread's work, and when it gives it back."""

from __future__ import annotations

import time
from collections import deque

import pytest

from rocserve.frontends.grpc import dense_traffic
from rocserve.frontends.grpc.dense_traffic import DENSE_EVENTS, DenseTraffic


class Companion:
    """A companion whose workers answer as the test has it."""

    def __init__(self) -> None:
        self.lends = True
        self.borrowed = 0
        self.given_back = 0
        self.due = 0
        self.answers: deque[bool] = deque()
        self.log: list[str] = []

    def expects(self, seconds: float) -> bool:
        return self.due > 0

    def borrow(self, patience_seconds: float) -> bool:
        self.borrowed += self.lends
        return self.lends

    def give_back(self) -> None:
        self.given_back += 1

    def wait(self, seconds: float) -> list[tuple[int, int]]:
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


def test_a_burst_is_collected_before_its_answer_is_taken():
    companion = Companion()
    companion.due = 1
    companion.answers.extend([True])
    make(companion, Queue("one", "two", None, "three", None)).run(lambda: False)
    assert companion.log[:7] == ["begin", "one", "two", "end", "begin", "three", "end"]
    assert companion.log[7] == "answer"
    assert (companion.borrowed, companion.given_back) == (1, 1)


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
