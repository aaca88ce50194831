"""Sequences whose worker ends, or whose version is replaced."""

from __future__ import annotations

import gc
import weakref

import pytest
from support.hand_loop import Flag

from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.model_config import (
    OldestStrategy,
)
from rocserve.scheduling.sequence.router import SequenceRouter

from .conftest import Row


def test_sequences_are_lost_with_their_worker(make_bench):
    bench = make_bench(instances=2)
    running, other = bench.ask(1, 1, start=True), bench.ask(2, 2, start=True)
    queued = bench.ask(1, 3)
    bench.scheduler.detach(bench.instance)
    assert queued.text == (
        "sequence 1 of model 'm' has been lost with the worker that ran it, start it again: the worker has ended"
    )
    bench.instance.last.finish(error=unavailable("crashed"))
    assert running.text == "crashed"
    with pytest.raises(ServeError) as caught:
        bench.ask(1)
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert "sequence 1 of model 'm' has been lost with the worker that ran it, start it again" in caught.value.text
    bench.instances[1].last.finish()
    assert other.value == 2
    # The sequence can begin again on the instance that is left.
    bench.ask(1, 5, start=True)
    assert bench.instances[1].last.rows[-1] == Row(5, 1, 0, 1, 1)


def test_a_sequence_that_has_not_begun_is_not_lost_with_the_worker_of_the_previous_one_of_its_id(make_bench):
    bench = make_bench(instances=2)
    lost = bench.ask(1, 1, start=True)
    again = bench.ask(1, 2, start=True, end=True)
    bench.scheduler.detach(bench.instance)
    bench.instance.last.finish(error=unavailable("crashed"))
    assert lost.text == "crashed"
    bench.instances[1].last.finish()
    assert again.value == 2


def test_a_sequence_that_has_not_begun_is_not_lost_with_the_worker_of_its_slot(make_bench):
    bench = make_bench(instances=2, max_batch_size=1)
    lost = bench.ask(1, 1, start=True, end=True)
    moved, other = bench.ask(2, 2, start=True), bench.ask(3, 3, start=True, end=True)
    behind, second = bench.ask(4, 4, start=True, end=True), bench.ask(2, 5, end=True)
    bench.scheduler.detach(bench.instance)
    bench.instance.last.finish(error=unavailable("crashed"))
    assert lost.text == "crashed"
    for _ in range(4):
        bench.instances[1].last.finish()
    assert [answer.value for answer in (other, moved, second, behind)] == [3, 2, 5, 4]
    ran = [row.value for batch in bench.instances[1].executions for row in batch.rows]
    assert ran == [3, 4, 2, 5], "the fourth sequence had the slot behind the third"


def test_a_worker_that_ends_unnoticed_loses_its_sequences(make_bench):
    bench = make_bench()
    bench.instance.closed = True
    assert "has been lost with the worker that ran it" in bench.ask(1, start=True).text
    replacement = type(bench.instance)(bench.loop)
    bench.scheduler.attach(replacement)
    bench.ask(1, 4, start=True)
    assert replacement.last.rows == [Row(4, 1, 0, 1, 1)]


def test_without_a_worker_sequences_wait_until_that_is_hopeless(make_bench):
    bench = make_bench()
    bench.scheduler.detach(bench.instance)
    waiting = bench.ask(1, start=True)
    bench.scheduler.fail_queue(unavailable("no worker"))
    assert waiting.text == "no worker"
    with pytest.raises(ServeError, match="no worker"):
        bench.ask(2, start=True)


def test_a_version_without_a_successor_ends_its_sequences(make_bench):
    bench = make_bench()
    running, queued = bench.ask(1, 1, start=True), bench.ask(1, 2)
    drained = Flag(bench.loop)
    bench.scheduler.close(drained.set)
    bench.instance.last.finish()
    assert not drained.is_set()
    bench.instance.last.finish()
    assert (running.value, queued.value) == (1, 2)
    assert drained.is_set()


def test_a_version_without_a_successor_also_ends_the_sequences_that_wait_for_a_slot(make_bench):
    bench = make_bench(oldest=OldestStrategy(max_candidate_sequences=1))
    answers = [bench.ask(sequence, sequence, start=True) for sequence in (1, 2, 3)]
    drained = Flag(bench.loop)
    bench.scheduler.close(drained.set)
    for execution in range(3):
        bench.instance.executions[execution].finish()
    assert [answer.value for answer in answers] == [1, 2, 3]
    assert drained.is_set()


def two_versions(make_bench):
    """Return a version that has begun sequence 1, and its successor."""
    router = SequenceRouter()
    old, new = make_bench(router=router), make_bench(router=router)
    old.ask(1, 1, start=True)
    old.instance.last.finish()
    return old, new


def test_a_replaced_version_goes_on_with_its_sequences(make_bench):
    old, new = two_versions(make_bench)
    drained = Flag(old.loop)
    old.scheduler.close(drained.set)
    # Requests come to the new version, which passes those of old sequences back.
    new.ask(2, 2, start=True)
    assert new.rows == [Row(2, 1, 0, 1, 2)]
    answer = new.ask(1, 3, end=True)
    assert old.rows == [Row(3, 0, 1, 1, 1)]
    assert not drained.is_set()
    old.instance.last.finish()
    assert answer.value == 3
    assert drained.is_set()
    with pytest.raises(ServeError, match="must specify the START flag"):
        new.ask(1)


def test_a_sequence_that_starts_again_in_the_next_version_is_over_in_the_replaced_one(make_bench):
    old, new = two_versions(make_bench)
    last = old.ask(1, 2)
    drained = Flag(old.loop)
    old.scheduler.close(drained.set)
    new.ask(1, 3, start=True, end=True)
    with pytest.raises(ServeError, match="must specify the START flag"):
        new.ask(1, 4)
    old.instance.last.finish()
    assert last.value == 2
    assert drained.is_set()


def test_a_version_that_is_about_to_be_replaced_has_its_sequences(make_bench):
    old, new = two_versions(make_bench)
    # The new version is already offered, and the old one has not been informed yet.
    new.ask(1, 2)
    assert old.rows == [Row(2, 0, 0, 1, 1)]
    with pytest.raises(ServeError, match="must specify the START flag"):
        new.ask(2)


def test_a_lost_instance_leaves_nothing_behind(make_bench):
    """Not even until the next garbage collection: it keeps the memory that the server shared with its worker."""
    bench = make_bench(slot_delay_microseconds=60_000_000, slot_utilization=1.0)
    waiting = bench.ask(1, start=True)
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(bench.instance)
        bench.scheduler.detach(bench.instance)
        assert not waiting.done.is_set()
        bench.instances.clear()
        assert gone() is None
    finally:
        gc.enable()
