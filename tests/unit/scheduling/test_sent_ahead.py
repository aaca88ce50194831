"""Requests that wait in a worker behind others: they have not begun, so they expire and are cancelled in time."""

from __future__ import annotations

import time

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.model_config import DynamicBatching, QueuePolicy
from rocserve.workers.instance import WorkerGone


@pytest.fixture
def bench(make_bench):
    """A scheduler whose engine has been fast; a batch is sent ahead once it has 8 rows."""
    bench = make_bench(DynamicBatching())
    bench.warm_up(rows=8)
    bench.executions.clear()
    bench.answered.clear()
    return bench


def test_its_timeout_is_kept_though_the_engine_is_stuck(bench) -> None:
    bench.submit(1.0, 8)
    started = time.monotonic()
    doomed = bench.submit(2.0, 8, timeout=30_000)
    assert len(bench.executions) == 2
    assert doomed.done.wait(PATIENCE_SECONDS)
    assert time.monotonic() - started >= 0.03
    assert (doomed.error.code, doomed.error.text) == (StatusCode.UNAVAILABLE, "Request timeout expired")
    before = bench.statistics.snapshot()
    bench.executions[0].finish()
    bench.executions[1].finish()
    after = bench.statistics.snapshot()
    assert after.success.count - before.success.count == 1
    assert (after.fail.count, after.reject.count) == (1, 1)


def test_the_one_in_the_engine_is_left_to_its_end(bench) -> None:
    running = bench.submit(1.0, 8, timeout=20_000)
    bench.loop.run(0.1)
    assert not running.done.is_set()
    bench.executions[0].finish()
    assert running.number == 2.0


def test_one_that_has_begun_since_is_left_to_its_end(bench) -> None:
    bench.submit(1.0, 8)
    begun = bench.submit(2.0, 8, timeout=100_000)
    bench.executions[0].finish()
    bench.loop.run(0.2)
    assert not begun.done.is_set()
    bench.executions[1].finish()
    assert begun.number == 4.0


def test_what_an_engine_runs_at_the_same_time_has_begun(bench) -> None:
    bench.instances[0].batches_at_once = 2
    bench.submit(1.0, 8)
    begun = bench.submit(2.0, 8, timeout=20_000)
    doomed = bench.submit(3.0, 8, timeout=20_000)
    assert len(bench.executions) == 3
    assert bench.scheduler.waiting == 1
    assert doomed.done.wait(PATIENCE_SECONDS)
    assert not begun.done.is_set()
    bench.executions[1].finish()
    assert begun.number == 4.0


def test_its_company_is_answered(bench) -> None:
    bench.submit(1.0, 8)
    # One waits in the queue until the second completes a full batch.
    first, second = bench.submit(2.0, 4, timeout=50_000), bench.submit(3.0, 4)
    assert first.done.wait(PATIENCE_SECONDS)
    bench.executions[0].finish()
    bench.executions[1].finish()
    assert second.number == 6.0


def test_its_client_may_leave(bench) -> None:
    bench.submit(1.0, 8)
    left = bench.submit(2.0, 8)
    bench.loop.wait_for(lambda: left.leave is not None)
    left.leave()
    assert left.done.wait(PATIENCE_SECONDS)
    assert left.error.code is StatusCode.CANCELLED
    bench.executions[0].finish()
    bench.executions[1].finish()
    assert bench.statistics.snapshot().cancel.count == 1


def test_a_client_deadline_is_kept_too(bench) -> None:
    bench.submit(1.0, 8)
    doomed = bench.submit(2.0, 8, deadline=time.monotonic() + 0.03)
    assert doomed.done.wait(PATIENCE_SECONDS)
    assert doomed.error.code is StatusCode.DEADLINE_EXCEEDED


def test_it_counts_as_waiting(bench) -> None:
    bench.submit(1.0, 8)
    bench.submit(2.0, 4)
    bench.submit(2.0, 4)
    bench.submit(3.0, 1)
    assert bench.scheduler.waiting == 3
    bench.executions[0].finish()
    assert bench.scheduler.waiting == 1


def test_what_was_dropped_does_not_come_back_from_a_dead_worker(bench) -> None:
    bench.submit(1.0, 8)
    doomed = bench.submit(2.0, 8, timeout=30_000)
    assert doomed.done.wait(PATIENCE_SECONDS)
    instance = bench.instances[0]
    instance.closed = True
    bench.scheduler.detach(instance)
    bench.executions[0].finish(error=internal("the worker ended"))
    bench.executions[1].finish(error=WorkerGone("gone"))
    successor = bench.new_instance()
    bench.scheduler.attach(successor)
    assert not successor.executions


@pytest.mark.parametrize("has_deadline", [False, True])
def test_what_has_expired_in_a_dead_worker_runs_on_no_other(make_bench, has_deadline: bool) -> None:
    """The server took it for running, so its time did not stop it; but the worker had not read it."""
    bench = make_bench(instances=2)
    limit = {"deadline": time.monotonic() + 0.03} if has_deadline else {"timeout": 30_000}
    doomed = bench.submit(1.0, **limit)
    lost, idle = sorted(bench.instances, key=lambda one: not one.executions)
    bench.loop.run(0.1)
    assert not doomed.done.is_set()
    lost.closed = True
    lost.executions[0].finish(error=WorkerGone("gone"))
    assert not idle.executions
    assert doomed.error.code is (StatusCode.DEADLINE_EXCEEDED if has_deadline else StatusCode.UNAVAILABLE)


def test_a_timeout_that_only_delays_refuses_nobody_in_a_worker(make_bench) -> None:
    policy = QueuePolicy(delays_timed_out=True, default_timeout_microseconds=30_000)
    bench = make_bench(DynamicBatching(default_queue_policy=policy))
    bench.warm_up(rows=1)
    bench.executions.clear()
    answers = bench.loop.turning(lambda: [bench._submit(1.0, width=width) for width in (2, 3, 4)])()
    (group,) = bench.executions
    assert group.is_grouped
    bench.loop.run(0.1)
    group.finish()
    assert [answer.number for answer in answers] == [2.0] * 3


def test_a_delayed_request_keeps_its_deadline_in_a_worker(make_bench) -> None:
    policy = QueuePolicy(delays_timed_out=True, default_timeout_microseconds=30_000)
    bench = make_bench(DynamicBatching(default_queue_policy=policy))
    bench.warm_up(rows=1)
    bench.executions.clear()
    deadline = time.monotonic() + 0.06
    running, doomed = bench.loop.turning(
        lambda: [bench._submit(1.0, width=width, deadline=deadline) for width in (2, 3)]
    )()
    assert bench.executions[0].is_grouped
    assert doomed.done.wait(PATIENCE_SECONDS)
    assert doomed.error.code is StatusCode.DEADLINE_EXCEEDED
    assert not running.done.is_set()


def test_grouped_requests_keep_deadlines_of_those_that_have_not_begun(make_bench) -> None:
    bench = make_bench(width=2)
    bench.warm_up(rows=1)
    bench.executions.clear()
    running, *ahead = bench.loop.turning(lambda: [bench._submit(1.0, timeout=30_000) for _ in range(5)])()
    (group,) = bench.executions
    assert group.is_grouped
    for answer in ahead:
        assert answer.done.wait(PATIENCE_SECONDS)
        assert answer.error.text == "Request timeout expired"
    assert not running.done.is_set()


def test_a_thousand_deadlines_are_forgotten_with_their_requests(bench) -> None:
    for _ in range(1000):
        bench.submit(1.0, 8, deadline=time.monotonic() + 1000)
        bench.submit(1.0, 8, deadline=time.monotonic() + 1000)
        bench.executions[-1].finish()
        bench.executions[-2].finish()
        bench.executions.clear()
    assert len(bench.scheduler._deadlines._heap) < 600


def test_the_error_of_a_batch_is_for_those_that_are_left(bench) -> None:
    bench.submit(1.0, 8)
    doomed, other = bench.submit(2.0, 4, timeout=30_000), bench.submit(3.0, 4)
    assert doomed.done.wait(PATIENCE_SECONDS)
    bench.executions[0].finish()
    bench.executions[1].finish(error=ServeError(StatusCode.INTERNAL, "broken"))
    assert (doomed.error.text, other.error.text) == ("Request timeout expired", "broken")
