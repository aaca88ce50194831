"""The counters of the statistics extension."""

from __future__ import annotations

from rocserve.core.statistics import ModelStatistics


def test_each_request_of_a_batch_is_charged_the_whole_batch():
    statistics = ModelStatistics()
    statistics.record_batch(100, 110, 150, 160, queue_starts=[40, 80], request_end=200, batch_size=5)
    counted = statistics.snapshot()
    assert (counted.inference_count, counted.execution_count) == (5, 1)
    assert (counted.success.count, counted.success.ns) == (2, 160 + 120)
    assert (counted.queue.count, counted.queue.ns) == (2, 60 + 20)
    assert (counted.compute_input.ns, counted.compute_infer.ns, counted.compute_output.ns) == (20, 80, 20)
    assert counted.batches[5].compute_infer.count == 1
    assert counted.batches[5].compute_infer.ns == 40
    assert counted.last_inference_ms > 0


def test_failures_count_as_failures_only():
    statistics = ModelStatistics()
    statistics.record_failure(10, 30)
    statistics.record_rejection(10, 15)
    statistics.record_cancellation(10, 17)
    counted = statistics.snapshot()
    assert (counted.fail.count, counted.fail.ns) == (3, 32)
    assert counted.success.count == counted.inference_count == counted.execution_count == 0
