"""Instances of models whose engine takes next to no time: batches are as large as waiting for a moment makes them."""

from __future__ import annotations

import pytest

from rocserve.core.model_config import DynamicBatching
from rocserve.scheduling import instances


def test_what_may_still_grow_waits_for_the_instance_that_is_about_to_be_done(make_bench, monkeypatch):
    monkeypatch.setattr(instances, "BRIEF_NS", 3600 * 10**9)
    bench = make_bench(DynamicBatching(), instances=2)
    answers = [bench.submit(value) for value in (1.0, 2.0, 3.0)]
    first, second = bench.instances
    assert [len(instance.executions) for instance in bench.instances] == [1, 0]
    first.executions[0].finish()
    assert first.executions[1].request_sizes == (1, 1)
    first.executions[1].finish()
    assert all(answer.response for answer in answers)
    assert not second.executions


def test_what_cannot_grow_does_not_wait(make_bench, monkeypatch):
    monkeypatch.setattr(instances, "BRIEF_NS", 3600 * 10**9)
    bench = make_bench(DynamicBatching(), max_batch_size=2, instances=2)
    bench.submit(1.0)
    bench.submit_in_one_turn(2.0, 3.0)
    assert [instance.executions[0].request_sizes for instance in bench.instances] == [(1,), (1, 1)]


def test_an_instance_that_is_not_done_in_time_is_waited_for_no_longer(make_bench, monkeypatch, wait_for):
    # Longer than an engine is taken to need of which nothing is known yet.
    monkeypatch.setattr(instances, "BRIEF_NS", 2 * instances.SHORT_NS)
    bench = make_bench(DynamicBatching(), instances=2)
    for value in (1.0, 2.0):
        bench.submit(value)
    wait_for(lambda: bench.instances[1].executions)


@pytest.mark.parametrize("engine_ns", [instances.BRIEF_NS, 10**9])
def test_instances_of_other_models_do_not_wait_for_each_other(make_bench, engine_ns):
    bench = make_bench(DynamicBatching(), instances=2)
    for _ in range(3):
        bench.submit(0.0)
        bench.executions[-1].engine_ns = engine_ns
        bench.executions[-1].finish()
    for value in (1.0, 2.0):
        bench.submit(value)
    assert [len(instance.executions) for instance in bench.instances] == [4, 1]
