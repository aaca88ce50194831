"""The counters of the statistics extension."""

from __future__ import annotations

import time

from rocserve.core.latencies import WINDOW_NS
from rocserve.core.statistics import Execution, ModelStatistics


def test_each_request_of_a_batch_is_charged_the_whole_batch():
    statistics = ModelStatistics()
    statistics.record_batch(Execution(100, 110, 150, 160, queue_starts=[40, 80], request_end=200, rows=5))
    counted = statistics.snapshot()
    assert (counted.inference_count, counted.execution_count) == (5, 1)
    assert (counted.success.count, counted.success.ns) == (2, 160 + 120)
    assert (counted.queue.count, counted.queue.ns) == (2, 60 + 20)
    assert (counted.compute_input.ns, counted.compute_infer.ns, counted.compute_output.ns) == (20, 80, 20)
    assert counted.batches[5].compute_infer.count == 1
    assert counted.batches[5].compute_infer.ns == 40
    assert counted.last_inference_ms > 0


def test_requests_that_ran_one_by_one_are_an_execution_each_and_sizes_are_apart():
    statistics = ModelStatistics()
    statistics.record_batch(Execution(100, 110, 150, 160, [40, 80], 200, rows=3, is_grouped=True))
    statistics.record_batch(Execution(100, 104, 105, 106, [90], 200, rows=3))
    statistics.record_batch(Execution(300, 310, 350, 360, [290], 400, rows=8, absent_rows=7))
    counted = statistics.snapshot()
    assert (counted.inference_count, counted.execution_count) == (3 + 3 + 3 + 1, 4)
    assert (counted.success.count, counted.success.ns) == (4, 160 + 120 + 110 + 110)
    assert (counted.queue.count, counted.queue.ns) == (4, 60 + 20 + 10 + 10)
    # The two share what their batch took.
    assert (counted.compute_infer.count, counted.compute_infer.ns) == (4, 20 + 20 + 1 + 40)
    by_size = {size: (batch.compute_infer.count, batch.compute_infer.ns) for size, batch in counted.batches.items()}
    assert by_size == {3: (3, 41), 8: (1, 40)}


def test_failures_count_as_failures_only():
    statistics = ModelStatistics()
    statistics.record_failure(10, 30)
    statistics.record_rejection(10, 15)
    statistics.record_cancellation(10, 17)
    counted = statistics.snapshot()
    assert (counted.fail.count, counted.fail.ns) == (3, 32)
    assert counted.success.count == counted.inference_count == counted.execution_count == 0


def _answered(statistics: ModelStatistics, microseconds: int, end: int) -> None:
    start = end - 1000 * microseconds
    statistics.record_batch(Execution(start, start, end, end, [start], end, 1))


def test_latencies_are_counted_while_somebody_looks():
    statistics = ModelStatistics()
    now = time.monotonic_ns()
    _answered(statistics, 500, now)
    assert statistics.quantiles([0.5]).count == 0
    for microseconds in (100, 110, 120):
        _answered(statistics, microseconds, now)
    statistics.record_cache_hit(now - 50_000, now)
    reading = statistics.quantiles([0.5])
    assert (reading.count, reading.quantiles) == (4, ((0.5, 100.0),))
    _answered(statistics, 100, time.monotonic_ns() + WINDOW_NS + 1_000_000_000)
    statistics.snapshot()
    # Nobody has looked for a minute: it begins anew.
    assert statistics.quantiles([0.5]).count == 0


def test_the_last_failures_are_kept():
    statistics = ModelStatistics()
    for number in range(100):
        statistics.note_failure(f"{number} " + "x" * 10_000)
    assert [failure.text.split()[0] for failure in statistics.failures] == [str(number) for number in range(80, 100)]
    assert {len(failure.text) for failure in statistics.failures} == {500}
    assert statistics.snapshot().fail.count == 0
