"""What of latencies is kept, and what --metrics-config says of it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from rocserve.core.latencies import (
    BATCH_SIZE_HISTOGRAM,
    CACHE_HIT_SUMMARY,
    CACHE_MISS_SUMMARY,
    FIRST_RESPONSE_HISTOGRAM,
    INFER_SUMMARY,
    QUEUE_HISTOGRAM,
    QUEUE_SUMMARY,
    REQUEST_HISTOGRAM,
    REQUEST_SUMMARY,
    LatencyOptions,
    LatencyReadings,
    read_latency_options,
)
from rocserve.core.model_config import ModelConfig
from rocserve.core.statistics import Execution, ModelStatistics, PhaseTotals

CONFIG = ModelConfig(name="m")
ALL = LatencyOptions(summaries=True, histograms=True, quantiles=(0.5,))
MS = 1_000_000


def counted(config: ModelConfig = CONFIG) -> tuple[ModelStatistics, int]:
    """Statistics, and a time to count from."""
    return ModelStatistics(ALL.distributions(config)), time.monotonic_ns()


def readings(statistics: ModelStatistics) -> LatencyReadings:
    found = statistics.snapshot().latencies
    assert found is not None
    return found


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    assert LatencyOptions().distributions(CONFIG) is None
    assert ModelStatistics().snapshot().latencies is None


def test_a_batch_in_summaries_and_histograms() -> None:
    statistics, now = counted()
    statistics.record_batch(
        Execution(now + 4 * MS, now + 5 * MS, now + 9 * MS, now + 9 * MS, [now, now + 2 * MS], now + 10 * MS, 6)
    )
    found = readings(statistics)
    totals = {name: (summary.count, summary.total) for name, summary in found.summaries.items()}
    assert totals[REQUEST_SUMMARY] == (2, 18_000)
    assert totals[QUEUE_SUMMARY] == (2, 6_000)
    assert totals[INFER_SUMMARY] == (2, 8_000)
    assert CACHE_HIT_SUMMARY not in totals
    assert found.histograms[REQUEST_HISTOGRAM].total == pytest.approx(18.0)
    assert found.histograms[QUEUE_HISTOGRAM].count == 2
    assert (found.histograms[BATCH_SIZE_HISTOGRAM].count, found.histograms[BATCH_SIZE_HISTOGRAM].total) == (1, 6)
    assert FIRST_RESPONSE_HISTOGRAM not in found.histograms


def test_with_the_cache_there_is_no_summary_of_requests_as_in_triton() -> None:
    statistics, now = counted(replace(CONFIG, response_cache=True))
    statistics.record_cache_hit(now, now + MS)
    statistics.record_cache_miss(2 * MS)
    found = readings(statistics)
    assert REQUEST_SUMMARY not in found.summaries
    assert found.summaries[CACHE_HIT_SUMMARY].total == 1_000
    assert found.summaries[CACHE_MISS_SUMMARY].total == 2_000
    assert found.summaries[QUEUE_SUMMARY].count == 1
    assert found.histograms[REQUEST_HISTOGRAM].count == 1


def test_an_ensemble_and_the_first_response_of_a_decoupled_model() -> None:
    statistics, now = counted(replace(CONFIG, decoupled=True))
    statistics.record_ensemble(now, now, now + 3 * MS, 2, PhaseTotals())
    statistics.record_first_response(700 * MS)
    found = readings(statistics)
    assert found.summaries[REQUEST_SUMMARY].total == 3_000
    assert found.histograms[FIRST_RESPONSE_HISTOGRAM].cumulative == (0, 0, 1, 1)


def test_a_model_has_buckets_of_its_own() -> None:
    config = replace(CONFIG, histogram_buckets={BATCH_SIZE_HISTOGRAM: (3.0,)})
    statistics, now = counted(config)
    statistics.record_ensemble(now, now, now, 4, PhaseTotals())
    assert readings(statistics).histograms[BATCH_SIZE_HISTOGRAM].bounds == (3.0,)


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
        "other=1: there is no such setting, only counter_latencies, summary_latencies, histogram_latencies,"
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
