"""The life of a model's workers: loading, failing, crashing, restarting, ending."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import resource
import signal

import numpy as np
import pytest
from support.waiting import PATIENCE_SECONDS, until
from support.workers import OwnChildren, Workshop, config_of, on_plane, open_descriptors, pids, run_add_sub, running

from rocserve.core.backoff import Backoff
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InstanceKind, WarmupInput, WarmupSample
from rocserve.links.entries import LONGEST_TEXT
from rocserve.settings import TimeLimits
from rocserve.workers.instance import WorkerGone
from rocserve.workers.messages import WorkerPlan
from rocserve.workers.version_workers import RESTARTS


async def test_load_reports_the_signature(workshop: Workshop) -> None:
    group = workshop.group()
    signature = await group.load()
    assert [spec.name for spec in signature.inputs] == ["A", "B"]
    assert signature.outputs[0].shape == (-1, 16) and signature.supports_batching
    await group.warm_up(config_of("add_sub"))
    assert workshop.events.opened == list(group.instances)


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ("load_fails", StatusCode.INTERNAL, "the file makes no sense at byte 7"),
        ("load_refuses", StatusCode.FAILED_PRECONDITION, "no such device"),
        ("load_refuses_at_length", StatusCode.INVALID_ARGUMENT, ("no such device " * 600)[:LONGEST_TEXT]),
        (
            "load_crashes",
            StatusCode.INTERNAL,
            "worker ended while loading (killed by signal 11); it last wrote: about to fall over",
        ),
        ("load_exits", StatusCode.INTERNAL, "worker ended while loading (exited with status 3)"),
        ("warm_up_fails", StatusCode.INTERNAL, "too cold"),
    ],
)
async def test_why_it_cannot_be_loaded(
    workshop: Workshop, own_children: OwnChildren, behaviour: str, code: StatusCode, text: str
) -> None:
    plans = [WorkerPlan(InstanceKind.CPU, None, 1)] * 2
    group = workshop.group(behaviour, plans=plans)
    with pytest.raises(ServeError) as caught:
        await group.load()
        await group.warm_up(config_of(behaviour))
    assert (caught.value.code, caught.value.text) == (code, text)
    assert not group.instances and not pids(group)
    await until(lambda: not own_children(), "the end of both workers")
    assert not workshop.events.restarts


async def test_a_file_that_goes_while_it_is_loaded_is_a_reason_and_no_traceback(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    group = workshop.group("load_misses_file")
    with pytest.raises(ServeError) as caught:
        await group.load()
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert caught.value.text == f"{workshop.folder / 'weights'} cannot be read: No such file or directory"
    await asyncio.sleep(0.1)
    assert "Traceback" not in caplog.text


async def test_an_engine_that_is_not_there(workshop: Workshop) -> None:
    group = workshop.group(engine="rocserve_no_such_engine")
    with pytest.raises(ServeError, match="No module named 'rocserve_no_such_engine'"):
        await group.load()


@pytest.mark.parametrize("behaviour", ["load_slow", "load_holds_gil"])
async def test_a_cancelled_load_ends_its_worker(workshop: Workshop, behaviour: str) -> None:
    group = workshop.group(behaviour)
    task = asyncio.create_task(group.load())
    await until(lambda: pids(group))
    (pid,) = pids(group)
    await workshop.until_stuck()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not running(pid))


async def test_warm_up_gets_the_samples_of_the_config(workshop: Workshop) -> None:
    (workshop.folder / "warmup").mkdir()
    (workshop.folder / "warmup" / "a").write_bytes(np.arange(16, dtype=np.int32).tobytes())
    inputs = {"A": WarmupInput(DataType.INT32, (16,), "file:a"), "B": WarmupInput(DataType.INT32, (16,), "zero")}
    config = config_of("facts", model_warmup=(WarmupSample("w", 2, inputs, count=3),), max_batch_size=0)
    group = workshop.group(config=config)
    await group.load()
    batching = config_of("facts", model_warmup=config.model_warmup)
    await group.warm_up(batching)
    answer = await run_add_sub(group.instances[0])
    assert answer.error is not None  # The facts are not rows of a batch.
    group = await workshop.serving(config=config)
    facts = (await run_add_sub(group.instances[0])).facts
    assert facts["warm_ups"].count("array([ 0,  1,  2,") == 3 and facts["warm_ups"].count("array([0, 0,") == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [("missing", "cannot be read: No such file"), ("../model.onnx", "is outside the model's folder"), ("short", "64")],
)
async def test_a_warm_up_file_that_will_not_do(workshop: Workshop, name: str, text: str) -> None:
    (workshop.folder / "warmup").mkdir()
    (workshop.folder / "warmup" / "short").write_bytes(b"123")
    inputs = {"A": WarmupInput(DataType.INT32, (16,), f"file:{name}")}
    config = config_of("add_sub", model_warmup=(WarmupSample("w", 1, inputs),))
    group = workshop.group(config=config)
    await group.load()
    with pytest.raises(ServeError, match=text) as caught:
        await group.warm_up(config)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


async def test_a_sample_that_fails_is_named(workshop: Workshop) -> None:
    inputs = {name: WarmupInput(DataType.INT32, (16,), "zero") for name in "AB"}
    config = config_of("warm_up_fails", model_warmup=(WarmupSample("w", 1, inputs),))
    group = workshop.group("warm_up_fails", config=config)
    await group.load()
    with pytest.raises(ServeError, match=r"^failed to run warmup sample 'w': too cold$") as caught:
        await group.warm_up(config)
    assert caught.value.code is StatusCode.INTERNAL


async def test_a_killed_worker_fails_what_is_in_it_and_comes_back(workshop: Workshop) -> None:
    group = await workshop.serving("stuck", plans=[WorkerPlan(InstanceKind.CPU, None, 2)])
    (pid,) = pids(group)
    first, second = group.instances
    in_engine, behind, elsewhere = run_add_sub(first), run_add_sub(first), run_add_sub(second)
    await workshop.until_stuck(2)
    os.kill(pid, signal.SIGKILL)
    # Requests behind the batch in the engine never ran, so they may run elsewhere.
    assert isinstance((await behind).error, WorkerGone)
    for answer in await asyncio.gather(in_engine, elsewhere):
        assert answer.error is not None and answer.error.code is StatusCode.UNAVAILABLE
        assert answer.error.text == (
            "worker of model 'm' version 1 ended unexpectedly (killed by signal 9); the request was in it;"
            " the model is being restarted"
        )
    assert first.closed
    with pytest.raises(WorkerGone):
        run_add_sub(first)
    await until(lambda: workshop.events.recoveries)
    assert workshop.events.lost == [first, second]
    assert workshop.events.restarts == [("worker ended unexpectedly (killed by signal 9)", 0.0)]
    assert workshop.events.opened == [first, second, *group.instances]
    assert pids(group) != [pid]


async def test_a_batch_that_crashes_its_worker(workshop: Workshop) -> None:
    group = await workshop.serving("crash")
    for round_number in range(3):
        await until(lambda count=round_number: len(group.instances) == 1 and workshop.events.recoveries == count)
        answer = await run_add_sub(group.instances[0])
        assert answer.error is not None and "killed by signal 9" in answer.error.text
    delays = [delay for _, delay in workshop.events.restarts]
    assert delays[:2] == [0.0, 0.1]


async def test_two_workers_only_one_crashes(workshop: Workshop) -> None:
    group = await workshop.serving(plans=[WorkerPlan(InstanceKind.CPU, None, 1)] * 2)
    survivor, victim = pids(group)
    os.kill(victim, signal.SIGKILL)
    await until(lambda: workshop.events.lost)
    # The victim's successor may have opened, too.
    instance = next(instance for instance in workshop.events.opened if instance not in workshop.events.lost)
    assert (await run_add_sub(instance)).error is None
    await until(lambda: workshop.events.recoveries == 1)
    assert pids(group)[0] == survivor and len(group.instances) == 2


async def test_an_instance_takes_no_batches_before_its_worker_has_restarted(workshop: Workshop) -> None:
    group = await workshop.serving("restarts_slowly")
    (pid,) = pids(group)
    os.kill(pid, signal.SIGKILL)
    await workshop.until_stuck()
    assert not group.instances and len(workshop.events.opened) == 1
    (workshop.folder / "open").touch()
    await until(lambda: workshop.events.recoveries)
    assert workshop.events.opened[1:] == group.instances


async def test_restarts_wait_longer_each_time(workshop: Workshop) -> None:
    group = await workshop.serving("crash_at_restart", backoff=Backoff(0.05, 30.0))
    await run_add_sub(group.instances[0])
    await until(lambda: len(workshop.events.restarts) >= 4)
    assert [delay for _, delay in workshop.events.restarts[:4]] == [0.0, 0.05, 0.1, 0.2]
    assert workshop.events.restarts[1][0] == "worker ended while warming up (exited with status 9)"
    (workshop.folder / "crashed").unlink()
    await until(lambda: workshop.events.recoveries == 1)
    assert len(group.instances) == 1


def test_the_delays_are_bounded() -> None:
    assert [RESTARTS.pause_seconds(count) for count in (0, 1, 2, 10, 9_999)] == [0.0, 0.1, 0.2, 30.0, 30.0]


async def test_a_worker_that_closes_its_socket_is_replaced(workshop: Workshop) -> None:
    group = await workshop.serving("close_socket")
    answer = await run_add_sub(group.instances[0])
    assert answer.error is not None
    # The server ends such a worker, unless the worker notices its closed socket first and ends by itself.
    assert re.search(r"ended unexpectedly \((.*socket; killed by signal 9|exited with status 70)\)", answer.error.text)
    await until(lambda: workshop.events.recoveries)


async def test_stop_lets_the_batch_in_flight_finish(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    group = await workshop.serving("gated")
    (instance,), (pid,) = group.instances, pids(group)
    answers = [run_add_sub(instance), run_add_sub(instance)]
    stopping = asyncio.create_task(group.stop(PATIENCE_SECONDS))
    await asyncio.sleep(0.1)
    assert not stopping.done()
    (workshop.folder / "open").touch()
    await stopping
    for answer in await asyncio.gather(*answers):
        assert answer.error is None
    assert not running(pid) and not group.instances and not pids(group)
    with pytest.raises(WorkerGone):
        run_add_sub(instance)
    assert not workshop.events.lost and not workshop.events.restarts
    assert "did not stop within" not in caplog.text


async def test_stop_does_not_wait_for_ever(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    group = await workshop.serving("stuck")
    (instance,), (pid,) = group.instances, pids(group)
    answer = run_add_sub(instance)
    await workshop.until_stuck()
    await group.stop(0.3)
    assert not running(pid)
    error = (await answer).error
    assert error is not None and error.text == "the worker of model 'm' version 1 was stopped; the request was in it"
    assert "the worker of model 'm' version 1 did not stop within 0.3 s of its unload and was killed" in caplog.text


async def test_one_of_two_workers_that_hangs_is_reported_and_replaced(workshop: Workshop) -> None:
    plans = [WorkerPlan(InstanceKind.CPU, None, 1)] * 2
    group = await workshop.serving("stuck", plans=plans, limits=TimeLimits(request_timeout_seconds=1.0))
    before = list(pids(group))
    hanging = run_add_sub(group.instances[0])
    await until(lambda: workshop.events.silences)
    assert re.fullmatch(r"1 of 2 instances has not answered for [01] s", workshop.events.silences[0])
    error = (await hanging).error
    assert error is not None
    assert error.text == (
        "worker of model 'm' version 1 was killed: it had not answered for 1 s (request_timeout_secs); the request was"
        " in it; the model is being restarted"
    )
    await until(lambda: workshop.events.recoveries)
    assert workshop.events.restarts[0] == ("worker was killed: it had not answered for 1 s (request_timeout_secs)", 0.0)
    assert workshop.events.silences[-1] == ""
    assert pids(group)[1] == before[1] and pids(group)[0] != before[0]


@pytest.mark.parametrize("behaviour", ["load_slow", "load_holds_gil"])
async def test_a_load_has_a_limit_of_time(workshop: Workshop, behaviour: str) -> None:
    group = workshop.group(behaviour, limits=TimeLimits(load_timeout_seconds=0.5))
    with pytest.raises(ServeError, match=r"did not load within 0\.5 s \(load_timeout_secs\) and was ended"):
        await group.load()
    assert not pids(group)


async def test_stop_between_two_restarts(workshop: Workshop, own_children: OwnChildren) -> None:
    group = await workshop.serving("crash_at_restart", backoff=Backoff(20.0, 30.0))
    await run_add_sub(group.instances[0])
    await until(lambda: len(workshop.events.restarts) >= 2)
    await group.stop(PATIENCE_SECONDS)
    await until(lambda: not own_children())


async def test_nothing_is_left_of_loads_and_unloads(workshop: Workshop) -> None:
    async def cycle() -> None:
        group = await workshop.serving(plans=[WorkerPlan(InstanceKind.CPU, None, 2)])
        await run_add_sub(group.instances[0])
        await group.stop(PATIENCE_SECONDS)
        # Before Python 3.13 an instance's mappings keep descriptors.
        workshop.events.opened.clear()

    await cycle()
    await asyncio.sleep(0.1)
    before = open_descriptors()
    for _ in range(5):
        await cycle()
    await until(lambda: open_descriptors() <= before)


async def test_when_descriptors_are_short_the_load_fails_with_that_reason(workshop: Workshop) -> None:
    await (await workshop.serving()).stop(1.0)
    on_plane(workshop.plane, lambda: None)  # The data plane's thread has closed the instance's descriptors before.
    before = open_descriptors()
    taken = {number for number, _ in before}
    limit = next(number for number in itertools.count() if number - len(taken & set(range(number))) == 9)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        group = workshop.group(plans=[WorkerPlan(InstanceKind.CPU, None, 4)])
        with pytest.raises(ServeError, match="Too many open files"):
            await group.load()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del group
    await until(lambda: open_descriptors() <= before)
