"""Which requests of which sequences run together, on which instance, with which controls and states."""

from __future__ import annotations

import gc
import logging
import time
import weakref

import numpy as np
import pytest
from support.hand_instances import Outcome
from support.hand_loop import Flag
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import (
    InitialState,
    InstanceRateLimiter,
    OldestStrategy,
    RateLimiterResource,
    SequenceState,
)
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceTag
from rocserve.scheduling.call_cycles import LimitedInstance, LimitedModel, needs_of
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.sequence.router import SequenceRouter

from .conftest import STATE, Answer, Bench, Row

OLDEST = OldestStrategy(max_candidate_sequences=4)


def pass_time(bench: Bench, clock: list[int]) -> None:
    """Let 30 ms pass: deadlines of 20 ms are over, and clients are watched."""
    clock[0] += 30_000_000
    bench.loop.turn()


def test_a_sequence_keeps_its_row(make_bench):
    bench = make_bench()
    first = bench.ask(1, 10, start=True)
    # While the first one runs, three more arrive; they run together, each in its row.
    others = [bench.ask(sequence, 10 * sequence, start=True) for sequence in (2, 3)]
    again = bench.ask(1, 11)
    assert bench.rows == [Row(10, 1, 0, 1, 1)]
    bench.instance.last.finish()
    assert bench.rows == [Row(11, 0, 0, 1, 1), Row(20, 1, 0, 1, 2), Row(30, 1, 0, 1, 3)]
    bench.instance.last.finish()
    assert [answer.value for answer in (first, again, *others)] == [10, 11, 20, 30]
    # The rows before the third one's belong to no sequence.
    last = bench.ask(3, 31, end=True)
    assert bench.rows == [Row(0, 0, 0, 0, 0), Row(0, 0, 0, 0, 0), Row(31, 0, 1, 1, 3)]
    bench.instance.last.finish()
    assert last.value == 31
    counted = bench.statistics.snapshot()
    assert (counted.inference_count, counted.execution_count, counted.success.count) == (5, 3, 5)
    assert set(counted.batches) == {1, 3}


def test_sequences_wait_for_a_slot_in_their_order(make_bench):
    bench = make_bench()
    running = [bench.ask(sequence, start=True) for sequence in (1, 2, 3, 4)]
    waiting = [bench.ask(5, 50, start=True), bench.ask(6, 60, start=True), bench.ask(5, 51)]
    bench.instance.last.finish()
    bench.instance.last.finish()
    assert all(answer.value == 0 for answer in running)
    assert not any(answer.done.is_set() for answer in waiting)
    bench.ask(2, end=True)
    bench.instance.last.finish()
    # Row 1 now belongs to the fifth sequence.
    assert [row.value for row in bench.rows] == [0, 50]
    bench.instance.last.finish()
    assert [row.value for row in bench.rows] == [0, 51]
    bench.instance.last.finish()
    assert [answer.value for answer in waiting] == [50, None, 51]


def test_sequences_spread_over_the_instances_and_stay_there(make_bench):
    bench = make_bench(instances=2)
    for sequence in (1, 2, 3, 4):
        bench.ask(sequence, sequence, start=True)
    for instance in bench.instances:
        instance.last.finish()
        instance.last.finish()
    seen = [
        [row.sequence for execution in instance.executions for row in execution.rows] for instance in bench.instances
    ]
    assert [sorted(set(ids) - {0}) for ids in seen] == [[1, 3], [2, 4]]
    before = len(bench.instances[1].executions)
    bench.ask(3, 33, end=True)
    assert bench.rows[-1] == Row(33, 0, 1, 1, 3)
    assert len(bench.instances[1].executions) == before


def test_a_batch_waits_until_enough_slots_are_used(make_bench):
    bench = make_bench(slot_delay_microseconds=60_000_000, slot_utilization=0.75)
    for sequence in (1, 2):
        bench.ask(sequence, sequence, start=True)
    assert not bench.instance.executions
    bench.ask(3, 3, start=True)
    assert [row.value for row in bench.rows] == [1, 2, 3]


def test_a_batch_waits_no_longer_than_its_delay(make_bench):
    bench = make_bench(slot_delay_microseconds=20_000, slot_utilization=1.0)
    bench.ask(1, 7, start=True)
    assert not bench.instance.executions
    bench.loop.wait_for(lambda: bench.instance.executions)
    assert [row.value for row in bench.rows] == [7]


def test_oldest_runs_one_request_of_a_sequence_at_a_time(make_bench):
    bench = make_bench(oldest=OLDEST)
    for value in (1, 2):
        bench.ask(1, value, start=value == 1)
    for sequence in (2, 3):
        bench.ask(sequence, 10 * sequence, start=True)
    assert [row.value for row in bench.rows] == [1]
    bench.instance.last.finish()
    # In the order of arrival, without empty rows.
    assert [row.value for row in bench.rows] == [20, 30, 2]
    bench.instance.last.finish()
    bench.ask(3, 31, end=True)
    assert [row.value for row in bench.rows] == [31]


def test_oldest_has_as_many_candidates_as_it_says(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    bench.ask(1, 1, start=True)
    second = bench.ask(2, 2, start=True, end=True)
    bench.instance.last.finish()
    assert len(bench.instance.executions) == 1
    bench.ask(1, 3, end=True)
    bench.instance.last.finish()
    assert [row.value for row in bench.rows] == [2]
    bench.instance.last.finish()
    assert second.value == 2


def test_oldest_waits_for_a_preferred_size(make_bench):
    oldest = OldestStrategy(4, preferred_batch_sizes=(2,), max_queue_delay_microseconds=60_000_000)
    bench = make_bench(oldest=oldest)
    bench.ask(1, 1, start=True)
    assert not bench.instance.executions
    bench.ask(2, 2, start=True)
    assert [row.value for row in bench.rows] == [1, 2]


@pytest.mark.parametrize("strategy", [{}, {"oldest": OLDEST}])
def test_the_server_keeps_states(make_bench, strategy):
    bench = make_bench(states=(STATE,), **strategy)
    answers = []
    # All arrive together: the second request of the sequence waits for the state that the first one returns.
    for place, value in enumerate((5, 6, 7)):
        answers.append(bench.ask(1, value, start=place == 0, end=place == 2))
    states = []
    for _ in range(3):
        states.append(bench.rows[0].state)
        bench.instance.last.finish()
    # A dimension of any size starts as 1.
    assert states == [[0], [0, 5], [0, 5, 6]]
    assert [answer.value for answer in answers] == [5, 6, 7]
    assert [answer.names for answer in answers] == [["OUT"]] * 3


def test_an_answer_without_its_states_still_lies_in_the_workers_memory(make_bench, monkeypatch):
    """Its receiver copies what it keeps, as with any other answer."""
    slot = object()
    monkeypatch.setattr(Outcome, "slot", slot)
    monkeypatch.setattr(Outcome, "is_large", True)
    bench = make_bench(states=(STATE,))
    answer = bench.ask(1, 5, start=True)
    sent = []
    monkeypatch.setattr(answer, "send", lambda response, final=True: sent.append(response))
    bench.instance.last.finish()
    (response,) = sent
    assert [head.name for head in response.head.outputs] == ["OUT"]
    assert (response.slot, response.is_large) == (slot, True)


def test_states_of_different_shapes_run_apart(make_bench):
    bench = make_bench(states=(STATE,))
    bench.ask(1, 5, start=True)
    bench.instance.last.finish()
    bench.ask(2, 6, start=True)
    bench.ask(1, 7)
    assert [row.state for row in bench.rows] == [[0], [0]], "a row of nobody, and the second sequence"
    assert [row.ready for row in bench.rows] == [0, 1]
    bench.instance.last.finish()
    assert [row.state for row in bench.rows] == [[0, 5]]


def test_a_state_may_begin_with_a_file(make_bench):
    begun = np.array([8, 9], np.int32)
    initial = InitialState("begin", STATE.datatype, (2,), "file")
    state = SequenceState("STATE_IN", "STATE_OUT", STATE.datatype, (-1,), (initial,))
    bench = make_bench(states=(state,), initial={"STATE_IN": begun.tobytes()})
    bench.ask(1, 1, start=True)
    assert bench.rows[0].state == [8, 9]
    bench.instance.last.finish()
    # A second start restarts the sequence.
    bench.ask(1, 2, start=True)
    assert bench.rows[0].state == [8, 9]


def test_a_request_that_fails_leaves_the_state_as_it_was(make_bench):
    bench = make_bench(states=(STATE,))
    bench.ask(1, 1, start=True)
    bench.instance.last.finish()
    failed = bench.ask(1, 2)
    bench.instance.last.finish(failures={0: ServeError(StatusCode.INTERNAL, "this one")})
    assert failed.text == "this one"
    bench.ask(1, 3)
    assert bench.rows[0].state == [0, 1]


# What is refused


def test_the_queue_has_a_bound(make_bench):
    bench = make_bench(limits=QueueLimits(max_requests=2))
    bench.ask(1, start=True)
    for _ in range(2):
        bench.ask(1)
    with pytest.raises(ServeError, match="Exceeds maximum queue size"):
        bench.ask(1)
    assert bench.scheduler.waiting == 2


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


# Instances that come and go


def test_sequences_are_lost_with_their_worker(make_bench):
    bench = make_bench(instances=2)
    running, other = bench.ask(1, 1, start=True), bench.ask(2, 2, start=True)
    queued = bench.ask(1, 3)
    bench.scheduler.detach(bench.instance)
    assert queued.text == (
        "sequence 1 of model 'm' has been lost with the worker that ran it, start it again: the worker has ended"
    )
    bench.instance.last.finish(error=unavailable("crashed"))
    assert running.text == "crashed"
    with pytest.raises(ServeError) as caught:
        bench.ask(1)
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert "sequence 1 of model 'm' has been lost with the worker that ran it, start it again" in caught.value.text
    bench.instances[1].last.finish()
    assert other.value == 2
    # The sequence can begin again on the instance that is left.
    bench.ask(1, 5, start=True)
    assert bench.instances[1].last.rows[-1] == Row(5, 1, 0, 1, 1)


def test_a_sequence_that_has_not_begun_is_not_lost_with_the_worker_of_the_previous_one_of_its_id(make_bench):
    bench = make_bench(instances=2)
    lost = bench.ask(1, 1, start=True)
    again = bench.ask(1, 2, start=True, end=True)
    bench.scheduler.detach(bench.instance)
    bench.instance.last.finish(error=unavailable("crashed"))
    assert lost.text == "crashed"
    bench.instances[1].last.finish()
    assert again.value == 2


def test_a_sequence_that_has_not_begun_is_not_lost_with_the_worker_of_its_slot(make_bench):
    bench = make_bench(instances=2, max_batch_size=1)
    lost = bench.ask(1, 1, start=True, end=True)
    moved, other = bench.ask(2, 2, start=True), bench.ask(3, 3, start=True, end=True)
    behind, second = bench.ask(4, 4, start=True, end=True), bench.ask(2, 5, end=True)
    bench.scheduler.detach(bench.instance)
    bench.instance.last.finish(error=unavailable("crashed"))
    assert lost.text == "crashed"
    for _ in range(4):
        bench.instances[1].last.finish()
    assert [answer.value for answer in (other, moved, second, behind)] == [3, 2, 5, 4]
    ran = [row.value for batch in bench.instances[1].executions for row in batch.rows]
    assert ran == [3, 4, 2, 5], "the fourth sequence had the slot behind the third"


def test_a_worker_that_ends_unnoticed_loses_its_sequences(make_bench):
    bench = make_bench()
    bench.instance.closed = True
    assert "has been lost with the worker that ran it" in bench.ask(1, start=True).text
    replacement = type(bench.instance)(bench.loop)
    bench.scheduler.attach(replacement)
    bench.ask(1, 4, start=True)
    assert replacement.last.rows == [Row(4, 1, 0, 1, 1)]


def test_without_a_worker_sequences_wait_until_that_is_hopeless(make_bench):
    bench = make_bench()
    bench.scheduler.detach(bench.instance)
    waiting = bench.ask(1, start=True)
    bench.scheduler.fail_queue(unavailable("no worker"))
    assert waiting.text == "no worker"
    with pytest.raises(ServeError, match="no worker"):
        bench.ask(2, start=True)


# The end of a version


def test_a_version_without_a_successor_ends_its_sequences(make_bench):
    bench = make_bench()
    running, queued = bench.ask(1, 1, start=True), bench.ask(1, 2)
    drained = Flag(bench.loop)
    bench.scheduler.close(drained.set)
    bench.instance.last.finish()
    assert not drained.is_set()
    bench.instance.last.finish()
    assert (running.value, queued.value) == (1, 2)
    assert drained.is_set()


def test_a_version_without_a_successor_also_ends_the_sequences_that_wait_for_a_slot(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    answers = [bench.ask(sequence, sequence, start=True) for sequence in (1, 2, 3)]
    drained = Flag(bench.loop)
    bench.scheduler.close(drained.set)
    for execution in range(3):
        bench.instance.executions[execution].finish()
    assert [answer.value for answer in answers] == [1, 2, 3]
    assert drained.is_set()


def test_a_replaced_version_goes_on_with_its_sequences(make_bench):
    router = SequenceRouter()
    old, new = make_bench(router=router), make_bench(router=router)
    old.ask(1, 1, start=True)
    old.instance.last.finish()
    drained = Flag(old.loop)
    old.scheduler.close(drained.set)
    # Requests come to the new version, which passes those of old sequences back.
    new.ask(2, 2, start=True)
    assert new.rows == [Row(2, 1, 0, 1, 2)]
    answer = new.ask(1, 3, end=True)
    assert old.rows == [Row(3, 0, 1, 1, 1)]
    assert not drained.is_set()
    old.instance.last.finish()
    assert answer.value == 3
    assert drained.is_set()
    with pytest.raises(ServeError, match="must specify the START flag"):
        new.ask(1)


def test_a_sequence_that_starts_again_in_the_next_version_is_over_in_the_replaced_one(make_bench):
    router = SequenceRouter()
    old, new = make_bench(router=router), make_bench(router=router)
    old.ask(1, 1, start=True)
    old.instance.last.finish()
    last = old.ask(1, 2)
    drained = Flag(old.loop)
    old.scheduler.close(drained.set)
    new.ask(1, 3, start=True, end=True)
    with pytest.raises(ServeError, match="must specify the START flag"):
        new.ask(1, 4)
    old.instance.last.finish()
    assert last.value == 2
    assert drained.is_set()


def test_a_version_that_is_about_to_be_replaced_has_its_sequences(make_bench):
    router = SequenceRouter()
    old, new = make_bench(router=router), make_bench(router=router)
    old.ask(1, 1, start=True)
    old.instance.last.finish()
    # The new version is already offered, and the old one has not been informed yet.
    new.ask(1, 2)
    assert old.rows == [Row(2, 0, 0, 1, 1)]
    with pytest.raises(ServeError, match="must specify the START flag"):
        new.ask(2)


def test_instances_run_when_the_rate_limiter_says_so(make_bench, loop):
    limits = InstanceRateLimiter((RateLimiterResource("r", 1),))
    limiter = RateLimiter([], loop.call_soon, logging.getLogger("test"))
    limiter.register([needs_of(limits, None)] * 2)
    bench = make_bench(instances=2, limiter=limiter, limits_of_instances=limits)
    answers = [bench.ask(sequence, sequence, start=True) for sequence in (1, 2)]
    first, second = bench.instances
    assert (len(first.executions), len(second.executions)) == (1, 0)
    first.last.finish()
    bench.loop.wait_for(lambda: second.executions)
    second.last.finish()
    assert [answer.value for answer in answers] == [1, 2]


def test_a_call_that_belongs_to_an_older_version_is_followed_there(make_bench, loop):
    """Its caller holds what the older version needs, so the older version must run at once."""
    limits = InstanceRateLimiter((RateLimiterResource("r", 1),))
    limiter = RateLimiter([], loop.call_soon, logging.getLogger("test"))
    limiter.register([needs_of(limits, None)])
    router = SequenceRouter()
    old, new = (make_bench(router=router, limiter=limiter, limits_of_instances=limits) for _ in range(2))
    old.ask(1, 1, start=True)
    old.instance.last.finish()
    caller = LimitedInstance(LimitedModel("caller"), limits, None, lambda: None)
    assert limiter.ask(caller)
    request = InferRequest(new.head, "r", [np.int32(2).tobytes()], sequence=SequenceTag(1), caller=caller)
    answer = Answer(loop)
    new.validator.validate(request)
    exchange = Exchange(answer)
    new.scheduler.follow(request, exchange)
    new.scheduler.submit(request, exchange)
    assert old.rows == [Row(2, 0, 0, 1, 1)]
    old.instance.last.finish()
    assert answer.value == 2
    assert not caller.called


def test_what_waits_behind_batches_that_cannot_be_handed_over_runs(make_bench, monkeypatch):
    bench = make_bench()
    hand_over, count = bench.instance.execute, 2000

    def execute(form, members, on_outcome) -> None:
        if 0 < int.from_bytes(members[0][1][0], "little") < count:
            raise OSError("no room")
        hand_over(form, members, on_outcome)

    monkeypatch.setattr(bench.instance, "execute", execute)
    answers = [bench.ask(1, number, start=not number) for number in range(count + 1)]
    bench.instance.last.finish()
    assert answers[1].text == answers[-2].text == "the batch could not be handed to the worker: no room"
    bench.loop.wait_for(lambda: len(bench.instance.executions) == 2)
    assert bench.rows[0].value == count


@pytest.mark.parametrize("states", [(), (STATE,)], ids=["without states", "with states"])
def test_answered_requests_leave_nothing_behind(make_bench, states):
    """Not even until the next garbage collection: their data may be large."""

    class Data(bytearray):
        """An object that can be weakly referenced."""

    bench = make_bench(states=states)
    gc.collect()
    gc.disable()
    try:
        data = Data(np.int32(7).tobytes())
        request = InferRequest(bench.head, "r", [data], sequence=SequenceTag(1, starts=True))
        bench.validator.validate(request)
        bench.scheduler.submit(request, Exchange(answer := Answer(bench.loop)))
        bench.instance.last.finish()
        assert answer.value == 7
        bench.instance.executions.clear()
        gone = weakref.ref(data)
        del data, request
        assert gone() is None
    finally:
        gc.enable()


def reschedule(bench) -> None:
    """Do what the answerer does when the model wants the only request of the batch again."""
    (batch,) = bench.scheduler.inner._pool.in_flight[bench.instance]
    (request,) = batch.requests
    bench.loop.turning(request.on_reschedule)(request)


@pytest.mark.parametrize("strategy", [{}, {"oldest": OLDEST}], ids=["direct", "oldest"])
def test_iterative_requests_of_one_id_run_one_after_the_other(make_bench, strategy):
    bench = make_bench(iterative=True, **strategy)
    first = bench.ask(1, 10, start=True)
    more = [bench.ask(1, 11), bench.ask(1, 12, start=True, end=True), bench.ask(1, 13, start=True)]
    order = []
    for answer, value in zip((first, *more), (10, 11, 12, 13), strict=True):
        for _ in range(2):
            order.append(bench.rows)
            reschedule(bench)
            bench.instance.last.finish()
        order.append(bench.rows)
        bench.instance.last.finish()
        assert answer.value == value
    assert order == [
        [Row(value, start if not run else 0, end if not run else 0, 1, 1)]
        for value, start, end in ((10, 1, 0), (11, 0, 0), (12, 1, 1), (13, 1, 0))
        for run in range(3)
    ]
    with pytest.raises(ServeError, match="must specify the START flag"):
        bench.ask(1)


def test_an_iterative_request_without_an_id_does_not_end_a_clients_sequence(make_bench):
    bench = make_bench(iterative=True)
    first, alone, second = bench.ask(1, 10, start=True), bench.ask(0, 20), bench.ask(1, 11)
    for _ in range(3):
        bench.instance.last.finish()
    assert [answer.value for answer in (first, alone, second)] == [10, 20, 11]
    assert [row.value for batch in bench.instance.executions for row in batch.rows if row.sequence == 1] == [10, 11]


def test_a_request_that_leaves_its_sequence_does_not_stop_the_one_that_runs(make_bench):
    bench = make_bench(iterative=True)
    running, behind = bench.ask(1, 10, start=True), bench.ask(1, 11)
    bench.loop.wait_for(lambda: behind.leave is not None)
    behind.leave()
    assert behind.error.code is StatusCode.CANCELLED
    other = bench.ask(1, 12, start=True)
    for _ in range(2):
        reschedule(bench)
        bench.instance.last.finish()
        assert [row.value for row in bench.rows] == [10]
    bench.instance.last.finish()
    assert running.value == 10
    bench.instance.last.finish()
    assert other.value == 12


def test_an_iterative_request_is_not_run_again_if_its_client_has_left_while_it_ran(make_bench):
    """Even if each run is shorter than the time after which clients are watched."""
    bench = make_bench(iterative=True)
    running, behind = bench.ask(1, 10, start=True), bench.ask(1, 11)
    other = bench.ask(1, 12, start=True)
    reschedule(bench)
    bench.instance.last.finish()
    assert running.leave is not None
    running.leave()
    assert not running.done.is_set()
    reschedule(bench)
    bench.instance.last.finish()
    assert running.error.code is StatusCode.CANCELLED
    assert behind.error.code is StatusCode.CANCELLED
    assert bench.rows == [Row(12, 1, 0, 1, 1)]
    bench.instance.last.finish()
    assert other.value == 12


def test_the_deadline_of_an_iterative_request_holds_while_it_waits_to_run_again(make_bench):
    bench = make_bench(iterative=True)
    late = bench.ask(1, 10, start=True, deadline=time.monotonic() + 0.05)
    reschedule(bench)
    # The instance is busy with the rest of its batch.
    assert late.done.wait(PATIENCE_SECONDS)
    assert late.error.code is StatusCode.DEADLINE_EXCEEDED


def test_the_client_of_an_iterative_request_is_watched_once_and_heard_at_any_time(make_bench):
    """Its model may reschedule it thousands of times, with new states each time: no cancellation callback of an earlier
    run is kept."""
    bench = make_bench(iterative=True)
    watching = []

    class Watched(Answer):
        def watch_cancellation(self, callback):
            watching.append(callback)
            super().watch_cancellation(callback)

    request = InferRequest(bench.head, "r", [np.int32(5).tobytes()], sequence=SequenceTag(1, starts=True))
    bench.validator.validate(request)
    bench.scheduler.submit(request, Exchange(answer := Watched(bench.loop)))
    for _ in range(3):
        reschedule(bench)
        bench.loop.run(0.03)
        assert len(watching) == 1
        bench.instance.last.finish()
    reschedule(bench)
    answer.leave()
    assert answer.error.code is StatusCode.CANCELLED
    assert not bench.scheduler.waiting


def test_the_slot_of_an_iterative_sequence_is_free_when_its_last_answer_is_sent(make_bench):
    """A client may send the next request immediately: it takes the first row, not one after an empty row."""
    bench = make_bench(iterative=True)

    class Impatient(Answer):
        def send(self, response, final=True):
            super().send(response, final)
            bench.ask(2, 7, start=True)

    request = InferRequest(bench.head, "r", [np.int32(5).tobytes()], sequence=SequenceTag(1, starts=True))
    bench.validator.validate(request)
    bench.scheduler.submit(request, Exchange(Impatient(bench.loop)))
    bench.instance.last.finish()
    assert [row.value for row in bench.rows] == [7]


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("strategy", [{}, {"oldest": OLDEST}])
def test_an_iterative_request_runs_to_its_end_after_its_sequence_has_ended(make_bench, strategy, end):
    """A model may generate for minutes after its version's unload, or after a request with the END flag."""
    bench = make_bench(iterative=True, **strategy)
    answer, drained = bench.ask(1, 5, start=True, end=end), []
    bench.scheduler.close(lambda: drained.append(True))
    for _ in range(3):
        reschedule(bench)
        bench.instance.last.finish()
    assert answer.error is None and not drained
    bench.instance.last.finish()
    assert answer.value == 5 and drained


def test_a_lost_instance_leaves_nothing_behind(make_bench):
    """Not even until the next garbage collection: it keeps the memory that the server shared with its worker."""
    bench = make_bench(slot_delay_microseconds=60_000_000, slot_utilization=1.0)
    waiting = bench.ask(1, start=True)
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(bench.instance)
        bench.scheduler.detach(bench.instance)
        assert not waiting.done.is_set()
        bench.instances.clear()
        assert gone() is None
    finally:
        gc.enable()
