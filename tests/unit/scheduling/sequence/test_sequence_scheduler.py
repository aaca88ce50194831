"""Which requests of which sequences run together, on which instance, with which controls and states."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
from support.hand_instances import Outcome

from rocserve.core.errors import ServeError, StatusCode
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

from .conftest import STATE, Answer, Row

OLDEST = OldestStrategy(max_candidate_sequences=4)


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


def test_the_queue_has_a_bound(make_bench):
    bench = make_bench(limits=QueueLimits(max_requests=2))
    bench.ask(1, start=True)
    for _ in range(2):
        bench.ask(1)
    with pytest.raises(ServeError, match="Exceeds maximum queue size"):
        bench.ask(1)
    assert bench.scheduler.waiting == 2


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
