"""What ends a sequence: clients that leave, deadlines, restarts, idle time."""

from __future__ import annotations

import time

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import (
    OldestStrategy,
)

from .conftest import Answer, Bench, Row

OLDEST = OldestStrategy(max_candidate_sequences=4)


def pass_time(bench: Bench, clock: list[int]) -> None:
    """Let 30 ms pass: deadlines of 20 ms are over, and clients are watched."""
    clock[0] += 30_000_000
    bench.loop.turn()


@pytest.mark.parametrize("oldest", [None, OLDEST], ids=["direct", "oldest"])
@pytest.mark.parametrize("is_late", [False, True], ids=["its client leaves", "its deadline passes"])
def test_a_request_that_is_next_but_has_not_begun_ends_its_sequence(
    make_bench, clock: list[int], oldest, is_late: bool
):
    bench = make_bench(oldest=oldest)
    running = bench.ask(1, 1, start=True)
    following = bench.ask(2, 2, start=True, deadline=time.monotonic() + 0.02 if is_late else None)
    behind = bench.ask(2, 3)
    pass_time(bench, clock)
    if not is_late:
        following.leave()
    assert following.done.is_set()
    assert following.error.code is (StatusCode.DEADLINE_EXCEEDED if is_late else StatusCode.CANCELLED)
    assert behind.error.code is StatusCode.CANCELLED
    bench.instance.last.finish()
    assert running.value == 1
    assert len(bench.instance.executions) == 1
    with pytest.raises(ServeError, match="for sequence 2 to model 'm' must specify the START flag"):
        bench.ask(2)


@pytest.mark.parametrize("strategy", [{}, {"oldest": OldestStrategy(max_candidate_sequences=1)}])
def test_a_client_that_leaves_ends_its_sequence(make_bench, strategy):
    bench = make_bench(**strategy)
    running = bench.ask(1, 1, start=True)
    second, third = bench.ask(1, 2), bench.ask(1, 3)
    bench.loop.wait_for(lambda: second.leave is not None)
    second.leave()
    bench.instance.last.finish()
    assert running.value == 1
    assert {second.error.code, third.error.code} == {StatusCode.CANCELLED}
    assert len(bench.instance.executions) == 1
    with pytest.raises(ServeError, match="must specify the START flag"):
        bench.ask(1, 4)
    assert bench.statistics.snapshot().cancel.count == 2


@pytest.mark.parametrize("oldest", [None, OldestStrategy(max_candidate_sequences=1)], ids=["direct", "oldest"])
@pytest.mark.parametrize("is_late", [False, True], ids=["its client leaves", "its deadline passes"])
@pytest.mark.parametrize("where", ["slot", "backlog"])
def test_a_sequence_does_not_end_with_the_previous_one_of_its_id(make_bench, oldest, is_late: bool, where: str):
    bench = make_bench(oldest=oldest, max_batch_size=1)
    bench.ask(1, 1, start=True)
    sequence = 1 if where == "slot" else 2
    deadline = time.monotonic() + 0.02 if is_late else None
    given_up = bench.ask(sequence, 2, start=where == "backlog", deadline=deadline)
    again = [bench.ask(sequence, 3, start=True), bench.ask(sequence, 4, end=True)]
    if not is_late:
        bench.loop.wait_for(lambda: given_up.leave is not None)
        given_up.leave()
    assert given_up.done.wait(PATIENCE_SECONDS), "it does not wait for the request that runs"
    assert given_up.error.code is (StatusCode.DEADLINE_EXCEEDED if is_late else StatusCode.CANCELLED)
    if where == "backlog":
        bench.ask(1, 5, end=True)
    while not again[1].done.is_set():
        bench.instance.last.finish()
    assert [answer.value for answer in again] == [3, 4]
    assert bench.rows == [Row(4, 0, 1, 1, sequence)]


def test_a_restarted_sequence_keeps_its_slot_and_one_after_an_end_waits_for_its_turn(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    bench.ask(1, 10, start=True)
    bench.ask(2, 20, start=True, end=True)
    # The first sequence starts again, ends, and starts for the third time, while the other one waits for the slot.
    bench.ask(1, 11, start=True)
    bench.ask(1, 12, end=True)
    bench.ask(1, 13, start=True, end=True)
    order = [bench.rows[0].value]
    while len(order) < 5:
        bench.instance.last.finish()
        order.append(bench.rows[0].value)
    assert order == [10, 11, 12, 20, 13]


def test_a_restarted_sequence_keeps_its_place_in_the_backlog(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    bench.ask(1, 10, start=True, end=True)
    given_up = bench.ask(2, 20, start=True)
    bench.ask(3, 30, start=True, end=True)
    again = bench.ask(2, 21, start=True, end=True)
    bench.loop.wait_for(lambda: given_up.leave is not None)
    given_up.leave()
    bench.instance.last.finish()
    assert [row.value for row in bench.rows] == [21]
    bench.instance.last.finish()
    assert again.value == 21
    assert [row.value for row in bench.rows] == [30]


def test_the_other_requests_of_a_sequence_get_the_reason_of_its_end(make_bench, clock: list[int]):
    bench = make_bench()
    bench.ask(1, start=True)
    late, behind = bench.ask(1, deadline=time.monotonic() + 0.02), bench.ask(1)
    pass_time(bench, clock)
    assert late.done.is_set()
    assert behind.error.code is StatusCode.CANCELLED
    assert behind.text == (
        "sequence 1 of model 'm' has ended, start it again: another request of it was cancelled, or could not be"
        " answered in time"
    )


def test_a_client_that_leaves_the_backlog_takes_its_sequence_along(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    bench.ask(1, start=True)
    waiting = [bench.ask(2, start=True), bench.ask(2)]
    bench.loop.wait_for(lambda: waiting[1].leave is not None)
    waiting[1].leave()
    assert [answer.error.code for answer in waiting] == [StatusCode.CANCELLED] * 2
    assert bench.scheduler.waiting == 0


def test_a_deadline_in_the_queue_ends_the_sequence(make_bench, clock: list[int]):
    bench = make_bench()
    bench.ask(1, start=True)
    late = bench.ask(1, deadline=time.monotonic() + 0.02)
    behind = bench.ask(1)
    pass_time(bench, clock)
    assert late.done.is_set()
    bench.instance.last.finish()
    assert late.error.code is StatusCode.DEADLINE_EXCEEDED
    assert behind.error.code is StatusCode.CANCELLED
    assert bench.scheduler.waiting == 0


@pytest.mark.parametrize("oldest", [None, OldestStrategy(max_candidate_sequences=1)], ids=["direct", "oldest"])
def test_a_sequence_that_cannot_be_answered_in_time_does_not_run(make_bench, oldest):
    bench = make_bench(oldest=oldest)
    for sequence in (1, 2, 3, 4):
        bench.ask(sequence, start=True, end=True)
        bench.instance.last.engine_ns = 60_000_000_000
        bench.instance.last.finish()
    hopeless = bench.ask(5, start=True, end=True, deadline=time.monotonic() + 30)
    hopeful = bench.ask(6, start=True, end=True, deadline=time.monotonic() + 300)
    assert hopeless.error.code is StatusCode.DEADLINE_EXCEEDED
    assert bench.rows[0].sequence == 6
    bench.instance.last.finish()
    assert hopeful.done.is_set()


@pytest.mark.parametrize("oldest", [None, OldestStrategy(max_candidate_sequences=1)], ids=["direct", "oldest"])
def test_sequences_run_in_time_again_when_their_model_has_become_faster(make_bench, clock: list[int], oldest):
    """It took two seconds for each batch, now it takes 0.2, and its clients wait for one."""
    bench = make_bench(oldest=oldest)

    def run(engine_ns: int, deadline: float | None) -> Answer:
        before = len(bench.instance.executions)
        answer = bench.ask(len(bench.instance.executions) + 1, start=True, end=True, deadline=deadline)
        if len(bench.instance.executions) > before:
            bench.instance.last.engine_ns = engine_ns
            bench.instance.last.finish()
        clock[0] += engine_ns
        bench.loop.turn()
        return answer

    for _ in range(40):
        run(2_000_000_000, None)
    answers = [run(200_000_000, clock[0] / 1e9 + 1) for _ in range(40)]
    assert sum(answer.response is not None for answer in answers) >= 25, "those before it was known are refused"


def test_the_newest_sequence_gets_the_slot_while_the_oldest_has_waited_for_too_long(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    bench.ask(1, start=True, end=True)
    bench.ask(2, start=True, end=True)
    for sequence in (3, 4, 5):
        bench.ask(sequence, start=True, end=True, deadline=time.monotonic() + 10)
    order = []
    while len(order) < 2:
        bench.instance.last.finish()
        order.append(bench.rows[0].sequence)
    assert order == [2, 3], "they have time"
    for sequence in (6, 7, 8):
        bench.ask(sequence, start=True, end=True, deadline=time.monotonic() + 10)
    # As if they had waited for long.
    for request in bench.scheduler._table:
        request.queue_start_ns -= 100_000_000_000
    while len(order) < 7:
        bench.instance.last.finish()
        order.append(bench.rows[0].sequence)
    assert order == [2, 3, 4, 8, 7, 6, 5], "the fourth has had its slot while the third ran"


def test_a_backlog_expires_as_a_whole(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    bench.ask(1, start=True)
    answers = [bench.ask(2, start=True), bench.ask(2, timeout=20_000)]
    assert [answer.text for answer in answers] == ["timeout of the corresponding sequence has been expired"] * 2
    assert answers[0].error.code is StatusCode.UNAVAILABLE


def test_a_slot_that_becomes_free_in_the_turn_of_a_request_ends_its_waiting(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    bench.ask(1, start=True)
    answers: list[Answer] = []

    def ask_and_finish() -> None:
        answers.append(bench.ask_in_turn(2, 5, start=True, timeout=20_000))
        bench.ask_in_turn(1, end=True)
        bench.instance.last.finish()

    bench.loop.turning(ask_and_finish)()
    bench.loop.run(0.05)
    bench.instance.last.finish()
    bench.instance.last.finish()
    assert answers[0].value == 5


def test_an_idle_sequence_ends_but_not_one_that_runs(make_bench):
    bench = make_bench(max_sequence_idle_microseconds=30_000, oldest=OldestStrategy(max_candidate_sequences=1))
    running = bench.ask(1, 1, start=True)
    waiting = bench.ask(2, 2, start=True)
    bench.loop.run(0.1)
    assert not waiting.done.is_set()
    assert len(bench.instance.executions) == 1
    bench.instance.last.finish()
    assert running.value == 1
    bench.loop.wait_for(lambda: len(bench.instance.executions) == 2)
    assert bench.rows[0].sequence == 2
    with pytest.raises(ServeError, match="for sequence 1 to model 'm' must specify the START flag"):
        bench.ask(1)
