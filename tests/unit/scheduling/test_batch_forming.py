"""Which of the waiting requests share a batch: Triton's rules, case by case."""

from __future__ import annotations

import pytest

from rocserve.core.model_config import DynamicBatching, QueuePolicy

_LONG = 30_000_000
"""Microseconds: a delay that does not pass."""


def formed(bench, rows: list[int]) -> list[tuple[int, ...]]:
    """The batches that requests of these many rows make which wait while another runs, once it is done."""
    bench.submit(0.0, rows=8)
    assert len(bench.executions) == 1
    for count in rows:
        bench.submit(1.0, count)
    done = 0
    while done < len(bench.executions):
        bench.executions[done].engine_ns = 10_000_000
        bench.executions[done].finish()
        done += 1
    return [execution.request_sizes for execution in bench.executions[1:]]


@pytest.mark.parametrize(
    ("preferred", "rows", "batches"),
    [
        ((), [1, 1, 1], [(1, 1, 1)]),
        ((), [1] * 10, [(1,) * 8, (1, 1)]),
        ((), [5, 5, 2], [(5,), (5, 2)]),
        ((4,), [1] * 10, [(1,) * 4, (1,) * 4, (1, 1)]),
        ((4,), [3, 3, 2], [(3,), (3,), (2,)]),
        ((4,), [3, 1, 2], [(3, 1), (2,)]),
        ((4,), [6, 1], [(6,), (1,)]),
        ((2, 4), [1] * 7, [(1,) * 4, (1, 1), (1,)]),
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
    done = 0
    while done < len(bench.executions):
        bench.executions[done].engine_ns = 10_000_000
        bench.executions[done].finish()
        done += 1
    assert [execution.request_sizes for execution in bench.executions] == batches


def test_the_delay_over_a_batch_is_as_large_as_can_be(make_bench) -> None:
    bench = make_bench(DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_microseconds=30_000))
    bench.submit(0.0, 8)
    for _ in range(6):
        bench.submit(1.0)
    bench.loop.run(0.05)
    bench.executions[0].engine_ns = 10_000_000
    bench.executions[0].finish()
    assert bench.executions[1].request_sizes == (1,) * 6


def test_another_shape_is_not_waited_for(make_bench) -> None:
    bench = make_bench(DynamicBatching(preferred_batch_sizes=(8,), max_queue_delay_microseconds=_LONG))
    bench.submit(1.0)
    bench.submit(1.0)
    assert not bench.executions
    bench.submit(1.0, width=5)
    assert bench.executions[0].request_sizes == (1, 1)


def test_what_is_sent_ahead_could_not_have_grown(make_bench) -> None:
    bench = make_bench(DynamicBatching(preferred_batch_sizes=(2, 4)))
    for _ in range(20):
        # The engine has to show that it is quick.
        bench.submit(0.0, 4)
        bench.executions[-1].finish()
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
    for _ in range(20):
        bench.submit(0.0, 8)
        bench.executions[-1].finish()
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
    assert bench.executions[2].request_sizes == (1, 1) and bench.scheduler.waiting == 2
