"""Requests that a model reschedules."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import (
    OldestStrategy,
)
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceTag

from .conftest import Answer, Row

OLDEST = OldestStrategy(max_candidate_sequences=4)


def reschedule(bench) -> None:
    """Do what the answerer does when the model wants the only request of the batch again."""
    (batch,) = bench.scheduler.inner._pool.in_flight[bench.instance]
    (request,) = batch.requests
    bench.loop.turning(request.on_reschedule)(request)


@pytest.mark.parametrize("strategy", [{}, {"oldest": OLDEST}], ids=["direct", "oldest"])
def test_iterative_requests_of_one_id_run_one_after_the_other(make_bench, strategy):
    bench = make_bench(iterative=True, **strategy)
    first = bench.ask(1, 10, start=True)
    more = [bench.ask(1, 11), bench.ask(1, 12, start=True, end=True), bench.ask(1, 13, start=True)]
    order = []
    for answer, value in zip((first, *more), (10, 11, 12, 13), strict=True):
        for _ in range(2):
            order.append(bench.rows)
            reschedule(bench)
            bench.instance.last.finish()
        order.append(bench.rows)
        bench.instance.last.finish()
        assert answer.value == value
    assert order == [
        [Row(value, start if not run else 0, end if not run else 0, 1, 1)]
        for value, start, end in ((10, 1, 0), (11, 0, 0), (12, 1, 1), (13, 1, 0))
        for run in range(3)
    ]
    with pytest.raises(ServeError, match="must specify the START flag"):
        bench.ask(1)


def test_an_iterative_request_without_an_id_does_not_end_a_clients_sequence(make_bench):
    bench = make_bench(iterative=True)
    first, alone, second = bench.ask(1, 10, start=True), bench.ask(0, 20), bench.ask(1, 11)
    for _ in range(3):
        bench.instance.last.finish()
    assert [answer.value for answer in (first, alone, second)] == [10, 20, 11]
    assert [row.value for batch in bench.instance.executions for row in batch.rows if row.sequence == 1] == [10, 11]


def test_a_request_that_leaves_its_sequence_does_not_stop_the_one_that_runs(make_bench):
    bench = make_bench(iterative=True)
    running, behind = bench.ask(1, 10, start=True), bench.ask(1, 11)
    bench.loop.wait_for(lambda: behind.leave is not None)
    behind.leave()
    assert behind.error.code is StatusCode.CANCELLED
    other = bench.ask(1, 12, start=True)
    for _ in range(2):
        reschedule(bench)
        bench.instance.last.finish()
        assert [row.value for row in bench.rows] == [10]
    bench.instance.last.finish()
    assert running.value == 10
    bench.instance.last.finish()
    assert other.value == 12


def test_an_iterative_request_is_not_run_again_if_its_client_has_left_while_it_ran(make_bench):
    """Even if each run is shorter than the time after which clients are watched."""
    bench = make_bench(iterative=True)
    running, behind = bench.ask(1, 10, start=True), bench.ask(1, 11)
    other = bench.ask(1, 12, start=True)
    reschedule(bench)
    bench.instance.last.finish()
    assert running.leave is not None
    running.leave()
    assert not running.done.is_set()
    reschedule(bench)
    bench.instance.last.finish()
    assert running.error.code is StatusCode.CANCELLED
    assert behind.error.code is StatusCode.CANCELLED
    assert bench.rows == [Row(12, 1, 0, 1, 1)]
    bench.instance.last.finish()
    assert other.value == 12


def test_the_deadline_of_an_iterative_request_holds_while_it_waits_to_run_again(make_bench):
    bench = make_bench(iterative=True)
    late = bench.ask(1, 10, start=True, deadline=time.monotonic() + 0.05)
    reschedule(bench)
    # The instance is busy with the rest of its batch.
    assert late.done.wait(PATIENCE_SECONDS)
    assert late.error.code is StatusCode.DEADLINE_EXCEEDED


def test_the_client_of_an_iterative_request_is_watched_once_and_heard_at_any_time(make_bench):
    """Its model may reschedule it thousands of times, with new states each time: no cancellation callback of an earlier
    run is kept."""
    bench = make_bench(iterative=True)
    watching = []

    class Watched(Answer):
        def watch_cancellation(self, callback):
            watching.append(callback)
            super().watch_cancellation(callback)

    request = InferRequest(bench.head, "r", [np.int32(5).tobytes()], sequence=SequenceTag(1, starts=True))
    bench.validator.validate(request)
    bench.scheduler.submit(request, Exchange(answer := Watched(bench.loop)))
    for _ in range(3):
        reschedule(bench)
        bench.loop.run(0.03)
        assert len(watching) == 1
        bench.instance.last.finish()
    reschedule(bench)
    answer.leave()
    assert answer.error.code is StatusCode.CANCELLED
    assert not bench.scheduler.waiting


def test_the_slot_of_an_iterative_sequence_is_free_when_its_last_answer_is_sent(make_bench):
    """A client may send the next request immediately: it takes the first row, not one after an empty row."""
    bench = make_bench(iterative=True)

    class Impatient(Answer):
        def send(self, response, final=True):
            super().send(response, final)
            bench.ask(2, 7, start=True)

    request = InferRequest(bench.head, "r", [np.int32(5).tobytes()], sequence=SequenceTag(1, starts=True))
    bench.validator.validate(request)
    bench.scheduler.submit(request, Exchange(Impatient(bench.loop)))
    bench.instance.last.finish()
    assert [row.value for row in bench.rows] == [7]


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("strategy", [{}, {"oldest": OLDEST}])
def test_an_iterative_request_runs_to_its_end_after_its_sequence_has_ended(make_bench, strategy, end):
    """A model may generate for minutes after its version's unload, or after a request with the END flag."""
    bench = make_bench(iterative=True, **strategy)
    answer, drained = bench.ask(1, 5, start=True, end=end), []
    bench.scheduler.close(lambda: drained.append(True))
    for _ in range(3):
        reschedule(bench)
        bench.instance.last.finish()
    assert answer.error is None and not drained
    bench.instance.last.finish()
    assert answer.value == 5 and drained
