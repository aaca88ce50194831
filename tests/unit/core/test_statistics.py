"""The counters of the statistics extension; which latencies are kept, and the values of --metrics-config."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.latencies import (
    WINDOW_NS,
    Distribution,
    Histogram,
    LatencyOptions,
    SlidingSummary,
    read_latency_options,
)
from rocserve.core.model_config import ModelConfig
from rocserve.core.statistics import Execution, ModelStatistics, PhaseTotals


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


def test_counters_that_continue_keep_their_distributions():
    before, loaded = ModelStatistics(), ModelStatistics(LatencyOptions(summaries=True).distributions(ModelConfig("m")))
    before.record_refusal(unavailable("not loaded"), 0, 5)
    kept = loaded._latencies
    loaded.continue_from(before)
    assert loaded._latencies is kept is not None
    assert loaded.snapshot().fail.count == 1


def test_requests_that_ran_one_by_one_are_an_execution_each_and_sizes_are_apart():
    statistics = ModelStatistics()
    statistics.record_batch(Execution(100, 110, 150, 160, [40, 80], 200, rows=3, is_grouped=True))
    statistics.record_batch(Execution(100, 104, 105, 106, [90], 200, rows=3))
    statistics.record_batch(Execution(300, 310, 350, 360, [290], 400, rows=8, padding_rows=7))
    counted = statistics.snapshot()
    assert (counted.inference_count, counted.execution_count) == (3 + 3 + 3 + 1, 4)
    assert (counted.success.count, counted.success.ns) == (4, 160 + 120 + 110 + 110)
    assert (counted.queue.count, counted.queue.ns) == (4, 60 + 20 + 10 + 10)
    # The two requests share their batch's time.
    assert (counted.compute_infer.count, counted.compute_infer.ns) == (4, 20 + 20 + 1 + 40)
    by_size = {size: (batch.compute_infer.count, batch.compute_infer.ns) for size, batch in counted.batches.items()}
    assert by_size == {3: (3, 41), 8: (1, 40)}


def test_totals_are_a_copy_of_all_that_is_not_by_size() -> None:
    statistics, _ = counted()
    for rows in range(1, 100):
        statistics.record_batch(Execution(100, 110, 150, 160, [40], 200, rows))
    statistics.record_response(0, 1, 2, 3)
    statistics.record_failure(1, 5, by_backend=True)
    totals, snapshot = statistics.totals(), statistics.snapshot()
    assert (totals.batches, totals.responses) == ({}, {})
    assert snapshot.batches and snapshot.responses
    for name in {entry.name for entry in fields(totals)} - {"batches", "responses", "latencies"}:
        assert getattr(totals, name) == getattr(snapshot, name)
    assert totals.latencies
    statistics.record_failure(1, 5)
    assert (totals.fail.count, snapshot.fail.count, statistics.totals().fail.count) == (1, 1, 2)


def test_failures_count_as_failures_only():
    statistics = ModelStatistics()
    statistics.record_failure(10, 30)
    statistics.record_refusal(unavailable("the queue is full"), 10, 15)
    statistics.record_refusal(ServeError(StatusCode.CANCELLED, "gone"), 10, 17)
    counted = statistics.snapshot()
    assert (counted.fail.count, counted.fail.ns) == (3, 32)
    assert [text for _, text in statistics.failures] == ["the queue is full"]
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
    # Nobody has read it for a minute: it starts again.
    assert statistics.quantiles([0.5]).count == 0


def test_the_last_failures_are_kept():
    statistics = ModelStatistics()
    for number in range(100):
        statistics.note_failure(f"{number} " + "x" * 10_000)
    assert [text.split()[0] for _, text in statistics.failures] == [str(number) for number in range(80, 100)]
    assert {len(text) for _, text in statistics.failures} == {500}
    assert statistics.snapshot().fail.count == 0


SECOND = 10**9
QUANTILES = (0.5, 0.9, 0.99)


def test_a_histogram_counts_what_is_at_most_its_bounds() -> None:
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 1.0, 1.1, 2.5, 2.6, 100.0):
        histogram.observe(value)
    reading = histogram.read()
    assert (reading.bounds, reading.cumulative, reading.count) == ((1.0, 2.5), (2, 4), 6)
    assert reading.total == pytest.approx(107.7)


def test_quantiles_are_within_a_hundredth() -> None:
    values = np.random.default_rng(0).lognormal(8, 1, 20_000).astype(np.int64)
    summary = SlidingSummary()
    for value in values.tolist():
        summary.observe(value, 5 * SECOND)
    reading = summary.read(QUANTILES, 6 * SECOND)
    assert (reading.count, reading.total) == (20_000, values.sum())
    for quantile, value in reading.quantiles:
        assert value == pytest.approx(np.quantile(values, quantile), rel=0.012)


def test_zero_stays_zero_and_small_values_stay_distinct() -> None:
    summary = SlidingSummary()
    for value in (0, 0, 1, 3):
        summary.observe(value, 0)
    assert summary.read((0.0, 0.5, 0.75, 1.0), 0).quantiles == ((0.0, 0.0), (0.5, 0.0), (0.75, 1.0), (1.0, 3.0))


def test_several_at_once() -> None:
    summary = SlidingSummary()
    summary.observe(10, 0, times=9)
    summary.observe(1000, 0)
    reading = summary.read((0.9, 1.0), 0)
    assert (reading.count, reading.total) == (10, 1090)
    assert [value for _, value in reading.quantiles] == pytest.approx([10, 1000], rel=0.012)


def test_quantiles_forget_after_a_minute_and_sums_do_not() -> None:
    summary = SlidingSummary()
    summary.observe(100, 0)
    summary.observe(200, 30 * SECOND)
    assert summary.read((0.0,), 45 * SECOND).quantiles[0][1] == pytest.approx(100, rel=0.012)
    reading = summary.read((0.0,), 70 * SECOND)
    assert reading.quantiles[0][1] == pytest.approx(200, rel=0.012)
    assert (reading.count, reading.total) == (2, 300)
    assert math.isnan(summary.read((0.5,), 30 * SECOND + WINDOW_NS + 12 * SECOND).quantiles[0][1])


def test_what_is_kept_does_not_grow_with_the_values() -> None:
    summary = SlidingSummary()
    for step in range(300):
        for value in (1, 10, 100, 10**9):
            summary.observe(value, step * SECOND)
    assert sum(len(section) for section in summary._sections.values()) <= 5 * 4


CONFIG = ModelConfig(name="m")
ALL = LatencyOptions(summaries=True, histograms=True, quantiles=(0.5,))
MS = 1_000_000


def counted(config: ModelConfig = CONFIG) -> tuple[ModelStatistics, int]:
    """Statistics, and a time to count from."""
    return ModelStatistics(ALL.distributions(config)), time.monotonic_ns()


def readings(statistics: ModelStatistics) -> Mapping[str, Any]:
    return statistics.snapshot().latencies


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    assert LatencyOptions().distributions(CONFIG) is None
    assert not readings(ModelStatistics())


def test_a_batch_in_summaries_and_histograms() -> None:
    statistics, now = counted()
    statistics.record_batch(
        Execution(now + 4 * MS, now + 5 * MS, now + 9 * MS, now + 9 * MS, [now, now + 2 * MS], now + 10 * MS, 6)
    )
    found = readings(statistics)
    totals = {name: (summary.count, summary.total) for name, summary in found.items()}
    assert totals[Distribution.REQUEST_SUMMARY] == (2, 18_000)
    assert totals[Distribution.QUEUE_SUMMARY] == (2, 6_000)
    assert totals[Distribution.INFER_SUMMARY] == (2, 8_000)
    assert Distribution.CACHE_HIT_SUMMARY not in totals
    assert found[Distribution.REQUEST_HISTOGRAM].total == pytest.approx(18.0)
    assert found[Distribution.QUEUE_HISTOGRAM].count == 2
    assert (found[Distribution.BATCH_SIZE_HISTOGRAM].count, found[Distribution.BATCH_SIZE_HISTOGRAM].total) == (1, 6)
    # As in Triton since 26.01, also for a model that is not decoupled, whose only response is the first.
    assert (found[Distribution.FIRST_RESPONSE_HISTOGRAM].count, found[Distribution.FIRST_RESPONSE_HISTOGRAM].total) == (
        2,
        pytest.approx(18.0),
    )


def test_an_error_is_a_first_response() -> None:
    statistics, now = counted(CONFIG)
    statistics.record_failure(now, now + 600 * MS, by_backend=True)
    statistics.record_refusal(unavailable("full"), now, now + 50 * MS)
    statistics.record_cache_hit(now, now + MS)
    statistics.record_ensemble(now, now, now + 3000 * MS, 2, PhaseTotals())
    assert readings(statistics)[Distribution.FIRST_RESPONSE_HISTOGRAM].cumulative == (2, 2, 3, 4)


def test_with_the_cache_there_is_no_summary_of_requests_as_in_triton() -> None:
    statistics, now = counted(replace(CONFIG, response_cache=True))
    statistics.record_cache_hit(now, now + MS)
    statistics.record_cache_miss(2 * MS)
    found = readings(statistics)
    assert Distribution.REQUEST_SUMMARY not in found
    assert found[Distribution.CACHE_HIT_SUMMARY].total == 1_000
    assert found[Distribution.CACHE_MISS_SUMMARY].total == 2_000
    assert found[Distribution.QUEUE_SUMMARY].count == 1
    assert found[Distribution.REQUEST_HISTOGRAM].count == 1


def test_an_ensemble_and_the_first_response_of_a_decoupled_model() -> None:
    statistics, now = counted(replace(CONFIG, decoupled=True))
    statistics.record_ensemble(now, now, now + 3 * MS, 2, PhaseTotals())
    statistics.record_first_response(700 * MS)
    statistics.record_failure(now, now + 600 * MS)
    found = readings(statistics)
    assert found[Distribution.REQUEST_SUMMARY].total == 3_000
    assert found[Distribution.FIRST_RESPONSE_HISTOGRAM].cumulative == (0, 0, 1, 1)


def test_a_model_has_buckets_of_its_own() -> None:
    config = replace(CONFIG, histogram_buckets={Distribution.BATCH_SIZE_HISTOGRAM: (3.0,)})
    statistics, now = counted(config)
    statistics.record_ensemble(now, now, now, 4, PhaseTotals())
    assert readings(statistics)[Distribution.BATCH_SIZE_HISTOGRAM].bounds == (3.0,)


def test_options() -> None:
    given = {
        "summary_latencies": "true",
        "histogram_latencies": "True",
        "counter_latencies": "false",
        "summary_quantiles": "0.5:0.05,0.9:0.01",
    }
    assert read_latency_options(given) == (LatencyOptions(False, True, True, (0.5, 0.9)), [])
    assert read_latency_options({}) == (LatencyOptions(), [])


def test_what_is_wrong_is_passed_over_and_said() -> None:
    options, problems = read_latency_options(
        {"summary_quantiles": "0.5,2:0.1,0.25:0.01", "histogram_latencies": "maybe", "other": "1"}
    )
    assert options == LatencyOptions(quantiles=(0.25,))
    assert problems == [
        "summary_quantiles: expected <quantile>:<error> with a quantile from 0 to 1, got '0.5'",
        "summary_quantiles: expected <quantile>:<error> with a quantile from 0 to 1, got '2:0.1'",
        "histogram_latencies=maybe: expected true or false",
        "other=1: unknown setting, expected counter_latencies, summary_latencies, histogram_latencies,"
        " summary_quantiles",
    ]


def test_responses_of_a_decoupled_model_by_their_place() -> None:
    statistics = ModelStatistics()
    for _ in range(2):
        statistics.record_response(0, started_ns=10, made_ns=30, sent_ns=35)
    statistics.record_response(1, started_ns=35, made_ns=40, sent_ns=41, failed=True)
    statistics.record_empty_response(2, started_ns=41, made_ns=44)
    first, second, third = statistics.snapshot().responses.values()
    assert (first.compute_infer.count, first.compute_infer.ns, first.success.ns) == (2, 40, 50)
    assert (second.fail.count, second.fail.ns, second.success.count) == (1, 6, 0)
    assert (third.empty_response.count, third.empty_response.ns, third.compute_output.count) == (1, 3, 0)


def test_what_is_counted_of_a_stream_has_a_bound() -> None:
    statistics = ModelStatistics()
    for index in range(1500):
        statistics.record_response(index, started_ns=0, made_ns=2, sent_ns=3)
    statistics.record_empty_response(1500, started_ns=0, made_ns=4)
    responses = statistics.snapshot().responses
    assert len(responses) == 1000
    last = responses[999]
    assert (last.success.count, last.success.ns, last.empty_response.count) == (501, 1503, 1)
    assert responses[998].success.count == 1
