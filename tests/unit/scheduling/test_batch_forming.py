"""Which of the waiting requests share a batch: Triton's rules, case by case; batches of models whose engine takes
almost no time; and the queue's priority levels, whose cost depends on the used ones only."""

from __future__ import annotations

import pytest
from support.hand_instances import Nobody

from rocserve.core.exchange import Exchange
from rocserve.core.model_config import DynamicBatching, QueuePolicy
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.scheduling import instances
from rocserve.scheduling.queue import QueueFull, QueueLimits, RequestQueue

_LONG = 30_000_000
"""Microseconds: a delay that does not pass."""


def formed(bench, rows: list[int]) -> list[tuple[int, ...]]:
    """The batches that waiting requests of these row counts form once the running batch ends."""
    bench.submit(0.0, rows=8)
    assert len(bench.executions) == 1
    for count in rows:
        bench.submit(1.0, count)
    return bench.finish_all(engine_ns=10_000_000)[1:]


@pytest.mark.parametrize(
    ("preferred", "rows", "batches"),
    [
        ((4,), [3, 1, 2], [(3, 1), (2,)]),
        ((4,), [6, 1], [(6,), (1,)]),
        ((2, 6), [1, 2, 3, 1], [(1, 2, 3), (1,)]),
        ((3, 8), [2, 2, 2, 2], [(2, 2, 2, 2)]),
        ((3,), [2, 2, 2, 2], [(2,), (2,), (2,), (2,)]),
    ],
)
def test_without_a_delay(make_bench, preferred, rows, batches) -> None:
    bench = make_bench(DynamicBatching(preferred_batch_sizes=preferred))
    assert formed(bench, rows) == batches


@pytest.mark.parametrize(
    ("preferred", "rows", "batches"),
    [
        ((4,), [8, 1, 1, 1], [(8,)]),
        ((4,), [8, 1, 1, 1, 1], [(8,), (1, 1, 1, 1)]),
        ((4,), [8, 1, 1, 1, 1, 1], [(8,), (1, 1, 1, 1)]),
        ((4,), [8, 3, 3], [(8,), (3,)]),
        ((2, 4), [8, 1, 1, 1], [(8,), (1, 1)]),
        ((), [8, 5, 4], [(8,), (5,)]),
    ],
)
def test_with_a_delay_that_has_not_passed(make_bench, preferred, rows, batches) -> None:
    bench = make_bench(DynamicBatching(preferred_batch_sizes=preferred, max_queue_delay_microseconds=_LONG))
    bench.submit(0.0, rows[0])
    for count in rows[1:]:
        bench.submit(1.0, count)
    assert bench.finish_all(engine_ns=10_000_000) == batches


def test_what_is_sent_ahead_could_not_have_grown(make_bench) -> None:
    bench = make_bench(DynamicBatching(preferred_batch_sizes=(2, 4)))
    bench.warm_up(rows=4)
    before = len(bench.executions)
    for _ in range(6):
        bench.submit(1.0)
    ahead = [execution.request_sizes for execution in bench.executions[before:]]
    assert ahead == [(1,), (1, 1, 1, 1)]


@pytest.mark.parametrize(
    "batching",
    [
        DynamicBatching(priority_levels=2, default_priority_level=2),
        DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=100)),
        DynamicBatching(default_queue_policy=QueuePolicy(default_timeout_microseconds=_LONG)),
    ],
)
def test_nothing_is_sent_ahead_of_what_the_queue_decides(make_bench, batching) -> None:
    bench = make_bench(batching)
    bench.warm_up(rows=8)
    before = len(bench.executions)
    for _ in range(3):
        bench.submit(1.0, 8)
    assert len(bench.executions) == before + 1
    assert bench.scheduler.waiting == 2


def test_an_engine_that_takes_two_batches_at_once_is_given_the_second_before_the_first_is_back(make_bench) -> None:
    bench = make_bench(DynamicBatching())
    bench.instances[0].batches_at_once = 2
    for _ in range(4):
        bench.submit(1.0)
    assert [execution.request_sizes for execution in bench.executions] == [(1,), (1,)]
    bench.executions[0].finish()
    assert bench.executions[2].request_sizes == (1, 1) and bench.scheduler.waiting == 0


def test_what_may_still_grow_waits_for_the_instance_that_is_about_to_be_done(make_bench, monkeypatch):
    monkeypatch.setattr(instances, "ROUND_TRIP_NS", 3600 * 10**9)
    bench = make_bench(DynamicBatching(), instances=2)
    answers = [bench.submit(value) for value in (1.0, 2.0, 3.0)]
    first, second = bench.instances
    assert [len(instance.executions) for instance in bench.instances] == [1, 0]
    first.executions[0].finish()
    assert first.executions[1].request_sizes == (1, 1)
    first.executions[1].finish()
    assert all(answer.response for answer in answers)
    assert not second.executions


def test_what_cannot_grow_does_not_wait(make_bench, monkeypatch):
    monkeypatch.setattr(instances, "ROUND_TRIP_NS", 3600 * 10**9)
    bench = make_bench(DynamicBatching(), max_batch_size=2, instances=2)
    bench.submit(1.0)
    bench.submit_in_one_turn(2.0, 3.0)
    assert [instance.executions[0].request_sizes for instance in bench.instances] == [(1,), (1, 1)]


def test_an_instance_that_is_not_done_in_time_is_waited_for_no_longer(make_bench, monkeypatch, wait_for):
    # Longer than the assumed time of an engine without measurements.
    monkeypatch.setattr(instances, "ROUND_TRIP_NS", 2 * instances.SEND_AHEAD_BELOW_NS)
    bench = make_bench(DynamicBatching(), instances=2)
    for value in (1.0, 2.0):
        bench.submit(value)
    wait_for(lambda: bench.instances[1].executions)


@pytest.mark.parametrize("engine_ns", [instances.ROUND_TRIP_NS, 10**9])
def test_instances_of_other_models_do_not_wait_for_each_other(make_bench, engine_ns):
    bench = make_bench(DynamicBatching(), instances=2)
    for _ in range(3):
        bench.submit(0.0)
        bench.executions[-1].engine_ns = engine_ns
        bench.executions[-1].finish()
    for value in (1.0, 2.0):
        bench.submit(value)
    assert [len(instance.executions) for instance in bench.instances] == [4, 1]


MOST_LEVELS = 2**64 - 1
LIMITS = QueueLimits(max_requests=1000)


class Plan:
    """The part of a request's plan that the queue reads."""

    timeout_microseconds = 0

    def __init__(self, priority: int) -> None:
        self.priority = priority


@pytest.fixture
def queue() -> RequestQueue:
    return RequestQueue(DynamicBatching(priority_levels=MOST_LEVELS, default_priority_level=7), LIMITS)


def entry(queue: RequestQueue, priority: int) -> InferRequest:
    made = InferRequest(RequestHead("m", "", ()), "", [])
    made.plan, made.nbytes, made.queue_start_ns = Plan(priority), 0, 0
    made.exchange = Exchange(Nobody())
    queue.admit(made, 0.0)
    return made


def test_the_most_levels_of_the_type_keep_their_order(queue: RequestQueue) -> None:
    priorities = [MOST_LEVELS, 3, 1, 0, MOST_LEVELS - 1, 3, 1 << 40]
    entries = [entry(queue, priority) for priority in priorities]
    for one in entries:
        queue.push(one)
    assert [one.level for one in queue.take(len(priorities))] == [1, 3, 3, 7, 1 << 40, MOST_LEVELS - 1, MOST_LEVELS]
    assert not queue


def test_a_level_that_is_not_there_is_the_default_one(queue: RequestQueue) -> None:
    assert entry(queue, MOST_LEVELS + 1).level == 7


def test_empty_levels_do_not_pile_up(queue: RequestQueue) -> None:
    for number in range(1, 500):
        queue.push(entry(queue, number))
    removed = entry(queue, 10_000)
    queue.push(removed)
    queue.remove(removed)
    while queue:
        queue.take(1)
    assert list(queue._levels) == [7]
    assert queue._order == [7]


def test_requests_that_a_full_queue_refuses_leave_no_levels(queue: RequestQueue) -> None:
    for _ in range(LIMITS.max_requests):
        queue.push(entry(queue, 1))
    for number in range(2, 300):
        with pytest.raises(QueueFull):
            queue.push(entry(queue, number))
    assert list(queue._levels) == [1]


def test_each_level_has_its_policy() -> None:
    batching = DynamicBatching(
        priority_levels=MOST_LEVELS,
        default_priority_level=1,
        default_queue_policy=QueuePolicy(max_queue_size=2),
        priority_queue_policy={MOST_LEVELS: QueuePolicy(max_queue_size=1)},
    )
    queue = RequestQueue(batching, LIMITS)
    queue.push(entry(queue, MOST_LEVELS))
    with pytest.raises(QueueFull):
        queue.push(entry(queue, MOST_LEVELS))
    queue.push(entry(queue, 1))
    queue.push(entry(queue, 1))
    with pytest.raises(QueueFull):
        queue.push(entry(queue, 1))
