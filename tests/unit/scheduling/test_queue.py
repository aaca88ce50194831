"""The queue's priority levels: as many as a configuration may ask for, at the cost of those that requests come for."""

from __future__ import annotations

import pytest

from rocserve.core.model_config import DynamicBatching, QueuePolicy
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.scheduling.queue import QueueFull, QueueLimits, RequestQueue

MOST_LEVELS = 2**64 - 1
LIMITS = QueueLimits(max_requests=1000)


class Plan:
    """All that the queue reads of a request's plan."""

    timeout_microseconds = 0

    def __init__(self, priority: int) -> None:
        self.priority = priority


@pytest.fixture
def queue() -> RequestQueue:
    return RequestQueue(DynamicBatching(priority_levels=MOST_LEVELS, default_priority_level=7), LIMITS)


def entry(queue: RequestQueue, priority: int) -> InferRequest:
    made = InferRequest(RequestHead("m", "", ()), "", [])
    made.plan, made.nbytes, made.queue_start_ns = Plan(priority), 0, 0
    queue.admit(made, 0.0)
    return made


def test_the_most_levels_of_the_type_keep_their_order(queue: RequestQueue) -> None:
    priorities = [MOST_LEVELS, 3, 1, 0, MOST_LEVELS - 1, 3, 1 << 40]
    entries = [entry(queue, priority) for priority in priorities]
    for each in entries:
        queue.push(each)
    assert [each.level for each in queue.take(len(priorities))] == [1, 3, 3, 7, 1 << 40, MOST_LEVELS - 1, MOST_LEVELS]
    assert not queue


def test_a_level_that_is_not_there_is_the_default_one(queue: RequestQueue) -> None:
    assert entry(queue, MOST_LEVELS + 1).level == 7


def test_empty_levels_do_not_pile_up(queue: RequestQueue) -> None:
    for number in range(1, 500):
        queue.push(entry(queue, number))
    removed = entry(queue, 10_000)
    queue.push(removed)
    assert queue.remove(removed)
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
