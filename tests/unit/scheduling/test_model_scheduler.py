"""Queue, batches, instances, deadlines, cancellation and the end of a version."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
from support.hand_instances import Answer
from support.hand_loop import Flag
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import DynamicBatching
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.scheduling.batch_policy import CALM_REQUESTS
from rocserve.scheduling.queue import QueueLimits
from rocserve.workers.instance import WorkerGone

MS = 1_000_000


def test_without_batching_one_request_runs_at_a_time(make_bench):
    bench = make_bench()
    answers = [bench.submit(value) for value in (1.0, 2.0, 3.0)]
    for index in range(3):
        assert len(bench.executions) == index + 1
        assert bench.executions[index].request_sizes == (1,)
        # The server would send requests ahead to a fast engine.
        bench.executions[index].engine_ns = 10_000_000
        bench.executions[index].finish()
    assert [answer.number for answer in answers] == [2.0, 4.0, 6.0]
    counted = bench.statistics.snapshot()
    assert (counted.execution_count, counted.inference_count, counted.success.count) == (3, 3, 3)


def test_an_answered_request_is_let_go_of_long_before_its_deadline(make_bench):
    """Its data may be large, and its client may have set a deadline in hours."""

    class Data(bytearray):
        """An object that can be weakly referenced."""

    bench = make_bench()
    bench.submit(1.0)
    data = Data(np.full((1, 2), 2.0, np.float32).tobytes())
    head = RequestHead("m", "", (InputHead("IN", "FP32", (1, 2)),))
    request = InferRequest(head, "", [data], time.monotonic() + 3600)
    bench.validator.validate(request)
    bench.scheduler.submit(request, Exchange(answer := Answer(bench.loop)))
    for execution in bench.executions:
        execution.finish()
    assert answer.number == 4.0
    bench.executions.clear()
    gone = weakref.ref(data)
    del data, request, execution
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("width", [2, -1])
def test_waiting_requests_of_a_quick_model_travel_together_and_run_one_by_one(make_bench, width: int):
    bench = make_bench(width=width)
    for value in range(CALM_REQUESTS + 40):
        bench.submit(float(value))
    # The model must first prove that it is fast and ends no worker; until then each request runs alone.
    alone = 0
    while not bench.executions[alone].is_grouped:
        bench.executions[alone].finish()
        alone += 1
    assert alone >= CALM_REQUESTS
    group = bench.executions[alone]
    assert len(group.request_sizes) > 1
    before = bench.statistics.snapshot()
    failed = ServeError(StatusCode.INTERNAL, "only this one")
    group.finish(failures={1: failed})
    after = bench.statistics.snapshot()
    answered = bench.answered[-len(group.requests) :]
    assert [answer.error for answer in answered] == [None, failed] + [None] * (len(answered) - 2)
    for answer, request in zip(answered, group.requests, strict=True):
        if answer.error is None:
            assert answer.number == 2 * np.frombuffer(request[0], np.float32)[0]
    # Each was an execution.
    assert after.execution_count - before.execution_count == len(answered) - 1
    assert set(after.batches) == {1}


def test_idle_instances_share_the_requests_of_a_group(make_bench):
    bench = make_bench(width=2, instances=2)
    bench.warm_up(rows=1)
    before = [len(instance.executions) for instance in bench.instances]
    bench.submit_in_one_turn(*map(float, range(7)))
    groups = [instance.executions[count:] for instance, count in zip(bench.instances, before, strict=True)]
    assert [[one.request_sizes for one in group] for group in groups] == [[(1,) * 4], [(1,) * 3]]
    assert all(one.is_grouped for group in groups for one in group)


def test_of_a_group_only_what_had_begun_fails_with_its_worker(make_bench):
    bench = make_bench(width=2, instances=2)
    bench.warm_up(rows=1)
    first, second = (instance.executions for instance in bench.instances)
    bench.submit_in_one_turn(*map(float, range(8)))
    dying = second[-1]
    assert dying.is_grouped and len(dying.requests) == 4
    bench.answered.clear()
    bench.instances[1].closed = True
    place = len(first) - 1
    dying.finish(unavailable("the worker died"), begun=2)
    while place < len(first):
        first[place].finish()
        place += 1
    died = [answer.error is not None for answer in bench.answered]
    assert died == [True] * 2 + [False] * 6
    assert [answer.number for answer in bench.answered[2:]] == [0.0, 2.0, 4.0, 6.0, 12.0, 14.0]
    # Until as many requests as before have left their worker alive, each runs alone.
    assert [one.is_grouped for one in first[-2:]] == [False, False]


def test_a_slow_request_ends_the_groups_of_a_quick_model(make_bench):
    bench = make_bench(width=2)
    bench.warm_up(rows=1)
    bench.submit(0.0)
    bench.executions[-1].engine_ns = 30_000_000
    bench.executions[-1].finish()
    for _ in range(60):
        bench.submit(0.0)
        bench.executions[-1].finish()
    place = start = len(bench.executions)
    bench.submit_in_one_turn(*map(float, range(8)))
    while place < len(bench.executions):
        bench.executions[place].finish()
        place += 1
    assert [(one.is_grouped, one.request_sizes) for one in bench.executions[start:]] == [(False, (1,))] * 8


def test_requests_of_a_slow_model_go_each_for_itself(make_bench):
    bench = make_bench(width=2)
    for value in range(8):
        bench.submit(float(value))
    assert bench.finish_all(engine_ns=10_000_000) == [(1,)] * 8


def test_different_heads_do_not_travel_together(make_bench):
    bench = make_bench(width=2)
    for _ in range(30):
        bench.submit(1.0, rows=1)
        bench.submit(1.0, rows=2)
    assert len(bench.finish_all()) == 60


@pytest.mark.parametrize(
    ("delay", "engine_ns", "batches"),
    [
        # Two of one shape share a batch.
        (0, 1_000, [(1, 1, 1), (1, 1), (1, 1), (2,)]),
        (0, 10_000_000, [(1,), (1,), (1,), (1, 1), (1,), (1,), (2,)]),
        # With a delay requests wait for others of their shape; the last one still does.
        (1, 1_000, [(1,), (1,), (1,), (1, 1), (1,), (1,)]),
    ],
)
def test_requests_of_unlike_shapes_travel_together_to_a_quick_model(make_bench, delay, engine_ns, batches):
    bench = make_bench(DynamicBatching(max_queue_delay_microseconds=delay))
    bench.warm_up(8, engine_ns)
    for _ in range(3):
        # No more is sent ahead.
        bench.submit(0.0, rows=8)
    answers = [bench.submit(float(width), width=width) for width in (2, 3, 2, 3, 3, 4, 2)]
    bench.submit(9.0, rows=2, width=5)
    assert [*map(sum, bench.finish_all(engine_ns)[CALM_REQUESTS : CALM_REQUESTS + 3])] == [8, 8, 8]
    formed = bench.executions[CALM_REQUESTS + 3 :]
    assert [execution.request_sizes for execution in formed] == batches
    assert [execution.is_grouped for execution in formed[:3]] == [len(batches[0]) > 1, False, len(batches[0]) > 1]
    assert [answer.number for answer in answers] == [4.0, 6.0, 4.0, 6.0, 6.0, 8.0, 4.0]


def test_requests_that_come_in_one_turn_run_together(make_bench):
    bench = make_bench(DynamicBatching())
    bench.submit_in_one_turn(1.0, 2.0)
    assert [execution.request_sizes for execution in bench.executions] == [(1, 1)]


def test_what_can_run_takes_no_room_from_what_comes_in_the_same_turn(make_bench):
    bench = make_bench(limits=QueueLimits(max_requests=1))
    bench.submit_in_one_turn(1.0, 2.0)
    assert len(bench.executions) == 1
    assert bench.scheduler.waiting == 1
    with pytest.raises(ServeError, match="Exceeds maximum queue size"):
        bench.submit_in_one_turn(3.0)


def test_instances_work_beside_each_other(make_bench):
    bench = make_bench(instances=2)
    answers = [bench.submit(value) for value in (1.0, 2.0, 3.0)]
    assert [len(instance.executions) for instance in bench.instances] == [1, 1]
    busy = [instance.executions[0] for instance in bench.instances]
    busy[0].finish()
    busy[1].finish()
    bench.loop.wait_for(lambda: sum(len(instance.executions) for instance in bench.instances) == 3)
    for instance in bench.instances:
        if len(instance.executions) == 2:
            instance.executions[1].finish()
    assert sorted(answer.number for answer in answers) == [2.0, 4.0, 6.0]


def test_a_failed_request_leaves_its_company_alone(make_bench):
    bench = make_bench(DynamicBatching())
    bench.submit(0.0)
    answers = [bench.submit(value) for value in (1.0, 2.0, 3.0)]
    bench.executions[0].finish()
    bench.executions[1].finish(failures={1: ServeError(StatusCode.INVALID_ARGUMENT, "bad image")})
    assert [answers[0].number, answers[2].number] == [2.0, 6.0]
    assert answers[1].error.text == "bad image"
    counted = bench.statistics.snapshot()
    assert (counted.success.count, counted.fail.count) == (3, 1)


def test_a_queue_full_of_bytes_refuses_at_once(make_bench):
    bench = make_bench(limits=QueueLimits(max_bytes=20))
    bench.submit(1.0)
    bench.submit(2.0)
    bench.submit(3.0)
    with pytest.raises(ServeError, match="Exceeds maximum queue size"):
        bench.submit(4.0)


def test_the_timeout_parameter_is_kept_exactly(make_bench):
    bench = make_bench()
    bench.submit(0.0)
    started = time.monotonic()
    doomed = bench.submit(1.0, timeout=30_000)
    patient = bench.submit(2.0)
    assert doomed.done.wait(PATIENCE_SECONDS)
    assert time.monotonic() - started >= 0.03
    assert (doomed.error.code, doomed.error.text) == (StatusCode.UNAVAILABLE, "Request timeout expired")
    bench.executions[0].finish()
    bench.executions[1].finish()
    assert patient.number == 4.0


def test_a_request_whose_client_left_is_dropped(make_bench):
    bench = make_bench()
    bench.submit(0.0)
    left = bench.submit(1.0)
    bench.loop.wait_for(lambda: left.leave is not None)
    left.leave()
    assert left.error.code is StatusCode.CANCELLED
    bench.executions[0].finish()
    assert len(bench.executions) == 1
    assert bench.statistics.snapshot().cancel.count == 1


def test_a_request_whose_worker_is_gone_is_dropped_when_its_client_leaves(make_bench, clock: list[int]):
    """While it was in the engine its client was not watched, because it could not be stopped there."""
    bench = make_bench()
    answer = bench.submit(1.0)
    clock[0] += 50 * MS
    bench.loop.turn()
    assert answer.leave is None
    bench.instances[0].closed = True
    bench.executions[0].finish(WorkerGone("gone"))
    for _ in range(2):
        clock[0] += 20 * MS
        bench.loop.turn()
    answer.leave()
    assert answer.error.code is StatusCode.CANCELLED


def test_watching_clients_costs_the_same_however_many_requests_wait(
    make_bench, clock: list[int], monkeypatch: pytest.MonkeyPatch
):
    visits = 0

    def count(request: InferRequest, name: str) -> object:
        nonlocal visits
        visits += 1
        return object.__getattribute__(request, name)

    def visits_with(waiting: int) -> int:
        """While one more request comes in each 20 ms."""
        nonlocal visits
        bench = make_bench()
        answers = [bench.submit(float(value)) for value in range(1 + waiting)]
        for _ in range(3):
            clock[0] += 20 * MS
            bench.loop.turn()
        assert [answer.leave is None for answer in answers] == [True] + waiting * [False]
        with monkeypatch.context() as patch:
            patch.setattr(InferRequest, "__getattribute__", count, raising=False)
            visits = 0
            for _ in range(5):
                late = bench.submit(0.0)
                for _ in range(3):
                    clock[0] += 10 * MS
                    bench.loop.turn()
                assert late.leave is not None
        return visits

    assert visits_with(10) == visits_with(500)


def test_a_batch_whose_worker_is_gone_waits_for_the_next(make_bench):
    bench = make_bench()
    bench.instances[0].closed = True
    answer = bench.submit(1.0)
    assert not answer.done.is_set()
    successor = bench.new_instance()
    bench.scheduler.attach(successor)
    successor.executions[0].finish()
    assert answer.number == 2.0


def test_a_request_that_came_back_from_a_dead_worker_still_expires(make_bench):
    bench = make_bench()
    doomed = bench.submit(1.0, timeout=50_000)
    (execution,) = bench.executions
    bench.instances[0].closed = True
    execution.finish(error=WorkerGone("gone"))
    assert doomed.done.wait(PATIENCE_SECONDS)
    assert doomed.error.text == "Request timeout expired"


def test_requests_inside_a_dying_worker_fail_and_those_behind_wait(make_bench):
    bench = make_bench()
    inside, behind = bench.submit(1.0), bench.submit(2.0)
    instance = bench.instances[0]
    instance.closed = True
    instance.executions[0].finish(error=unavailable("worker ended"))
    bench.scheduler.detach(instance)
    assert inside.error.text == "worker ended"
    assert not behind.done.is_set()
    successor = bench.new_instance()
    bench.scheduler.attach(successor)
    successor.executions[0].finish()
    assert behind.number == 4.0


def test_an_outage_answers_what_waits_and_what_comes_until_an_instance_is_back(make_bench):
    bench = make_bench(instances=0)
    waiting = bench.submit(1.0)
    bench.scheduler.fail_queue(unavailable("no worker"))
    assert waiting.error.text == "no worker"
    with pytest.raises(ServeError, match="no worker"):
        bench.submit(2.0)
    instance = bench.new_instance()
    bench.scheduler.attach(instance)
    back = bench.submit(3.0)
    instance.executions[0].finish()
    assert back.number == 6.0


def test_a_closed_scheduler_finishes_what_it_took(make_bench):
    bench = make_bench()
    first, second = bench.submit(1.0), bench.submit(2.0)
    drained = Flag(bench.loop)
    bench.scheduler.close(drained.set)
    bench.executions[0].finish()
    assert not drained.is_set()
    bench.executions[1].finish()
    assert drained.is_set()
    assert [first.number, second.number] == [2.0, 4.0]


def test_batches_that_cannot_be_handed_over_take_a_turn_each(make_bench, monkeypatch):
    bench = make_bench(instances=0)
    answers = [bench.submit(value) for value in (1.0, 2.0, 3.0)]
    instance = bench.new_instance()

    def execute(layout, requests, on_outcome) -> None:
        raise OSError("no room")

    monkeypatch.setattr(instance, "execute", execute)
    bench.scheduler.inner.attach(instance)
    for failed in range(1, 4):
        bench.scheduler.inner._pump()
        assert [answer.done.is_set() for answer in answers] == [True] * failed + [False] * (3 - failed)


def test_what_waits_behind_a_batch_that_cannot_be_handed_over_runs(make_bench, monkeypatch):
    bench = make_bench()
    instance = bench.instances[0]
    hand_over, values = instance.execute, []

    def execute(form, members, on_outcome) -> None:
        values.append(float(np.frombuffer(members[0][1][0], np.float32)[0]))
        if values[-1] in (2.0, 3.0):
            raise OSError("no room")
        hand_over(form, members, on_outcome)

    monkeypatch.setattr(instance, "execute", execute)
    running, *failing, waiting = [bench.submit(value) for value in (1.0, 2.0, 3.0, 4.0)]
    bench.executions[0].finish()
    assert running.number == 2.0
    for answer in failing:
        assert answer.done.wait(PATIENCE_SECONDS)
        assert answer.error.text == "the batch could not be handed to the worker: no room"
    bench.loop.wait_for(lambda: len(bench.executions) == 2)
    bench.executions[1].finish()
    assert waiting.number == 8.0
    drained = Flag(bench.loop)
    bench.scheduler.close(drained.set)
    assert drained.wait(PATIENCE_SECONDS)
