"""Several models in one worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

import psutil
import pytest
from support.waiting import PATIENCE_SECONDS, until
from support.workers import OwnChildren, Workshop, add_sub_inputs, config_of, pids, run_add_sub, running, submit

from rocserve.core.errors import ServeError, StatusCode
from rocserve.settings import TimeLimits
from rocserve.workers.version_workers import VersionWorkers


async def serving(workshop: Workshop, name: str, behaviour: str = "add_sub", **changes: object) -> VersionWorkers:
    """A model of the group."""
    config = config_of(behaviour, name=name)
    return await workshop.serving(config=config, shared_worker="small", **changes)


async def sums(group: VersionWorkers, value: int) -> None:
    answer = await run_add_sub(group.instances[0], value=value)
    assert answer.error is None and answer.outputs[0]["SUM"][0, 0] == value + 3


async def test_models_of_a_group_are_in_one_process(workshop: Workshop, own_children: OwnChildren) -> None:
    groups = [await serving(workshop, f"m{number}") for number in range(20)]
    assert len({pid for group in groups for pid in pids(group)}) == 1
    await asyncio.gather(*(sums(group, number) for number, group in enumerate(groups)))
    other = await workshop.serving(config=config_of("add_sub", name="alone"))
    assert pids(other) != pids(groups[0])
    assert len(own_children()) == 2


async def test_models_that_load_at_once_start_one_process(workshop: Workshop) -> None:
    groups = await asyncio.gather(*(serving(workshop, f"m{number}") for number in range(8)))
    assert len({pid for group in groups for pid in pids(group)}) == 1


async def test_a_model_that_is_unloaded_leaves_the_others_alone(workshop: Workshop, own_children: OwnChildren) -> None:
    first, second = await serving(workshop, "first"), await serving(workshop, "second")
    (pid,) = pids(first)
    files = psutil.Process(pid).num_fds()
    third = await serving(workshop, "third")
    await third.stop(PATIENCE_SECONDS)
    await until(lambda: psutil.Process(pid).num_fds() <= files)
    await first.stop(PATIENCE_SECONDS)
    await sums(second, 5)
    assert pids(second) == [pid] and not workshop.events.restarts
    await second.stop(PATIENCE_SECONDS)
    assert not running(pid)
    again = await serving(workshop, "first")
    assert pids(again) != [pid]
    await sums(again, 6)


async def test_one_that_comes_as_the_last_other_goes_is_served(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a folder is renamed. The process, without a model for a moment, was ended."""
    first, connect = await serving(workshop, "first"), asyncio.open_unix_connection
    begun, ended = asyncio.Event(), asyncio.Event()

    async def late(**given: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        begun.set()
        await ended.wait()
        return await connect(**given)

    monkeypatch.setattr(asyncio, "open_unix_connection", late)
    pid, loading = pids(first), asyncio.create_task(serving(workshop, "second"))
    await begun.wait()
    await first.stop(PATIENCE_SECONDS)
    ended.set()
    second = await loading
    await sums(second, 5)
    assert pids(second) == pid


async def test_one_that_does_not_end_is_let_go_of(workshop: Workshop) -> None:
    stuck, other = await serving(workshop, "stuck", "stuck"), await serving(workshop, "other")
    answer = run_add_sub(stuck.instances[0])
    await workshop.until_stuck()
    await stuck.stop(0.2)
    error = (await answer).error
    assert error is not None and error.code is StatusCode.UNAVAILABLE
    await asyncio.sleep(1.5)  # Longer than the wait for a broken one.
    await sums(other, 7)
    assert not workshop.events.restarts


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ("load_fails", StatusCode.INTERNAL, "the file makes no sense at byte 7"),
        ("load_refuses", StatusCode.FAILED_PRECONDITION, "no such device"),
        ("warm_up_fails", StatusCode.INTERNAL, "too cold"),
        ("load_slow", StatusCode.UNAVAILABLE, "the worker did not load within 0.5 s (load_timeout_secs) and was ended"),
    ],
)
async def test_one_that_cannot_be_loaded_leaves_the_others_alone(
    workshop: Workshop, behaviour: str, code: StatusCode, text: str
) -> None:
    other = await serving(workshop, "other")
    limits = TimeLimits(load_timeout_seconds=0.5 if behaviour == "load_slow" else 0)
    with pytest.raises(ServeError) as caught:
        await serving(workshop, "bad", behaviour, limits=limits)
    assert (caught.value.code, caught.value.text) == (code, text)
    await sums(other, 1)
    assert not workshop.events.restarts


async def test_its_death_fails_what_was_in_it_and_restarts_all(workshop: Workshop) -> None:
    stuck, other = await serving(workshop, "stuck", "stuck"), await serving(workshop, "other")
    alone = await workshop.serving(config=config_of("add_sub", name="alone"))
    (pid,) = pids(other)
    answer = run_add_sub(stuck.instances[0])
    await workshop.until_stuck()
    os.kill(pid, signal.SIGKILL)
    error = (await answer).error
    assert error is not None and error.text == (
        "shared worker 'small' of model 'stuck' version 1 ended unexpectedly (killed by signal 9); the request was in"
        " it; the model is being restarted"
    )
    await until(lambda: workshop.events.recoveries == 2)
    assert pids(stuck) == pids(other) != [pid]
    assert {reason for reason, _ in workshop.events.restarts} == {
        "shared worker 'small' ended unexpectedly (killed by signal 9)"
    }
    await sums(other, 2)
    await sums(alone, 3)
    assert (stuck.restarts, other.restarts, alone.restarts) == (1, 1, 0)


async def test_who_hangs_is_named_to_all(workshop: Workshop) -> None:
    limits = TimeLimits(hang_timeout_seconds=0.5)
    stuck = await serving(workshop, "stuck", "stuck", limits=limits)
    await serving(workshop, "other")
    run_add_sub(stuck.instances[0])
    await until(lambda: workshop.events.recoveries == 2)
    assert {reason for reason, _ in workshop.events.restarts} == {
        "shared worker 'small' was killed: model 'stuck' version 1: it hung for 0.5 s (hang_timeout_secs)"
    }


async def test_each_restart_of_a_crasher_comes_later(workshop: Workshop) -> None:
    """Models that have answered come back immediately."""
    crasher, other = await serving(workshop, "crasher", "crash"), await serving(workshop, "other")
    for round_ in range(3):
        await until(lambda: crasher.instances and other.instances)
        await sums(other, round_)
        before = workshop.events.recoveries
        submit(crasher.instances[0], add_sub_inputs(), ("SUM",), (1,))
        await until(lambda before=before: workshop.events.recoveries == before + 2)
    delays = [delay for _, delay in workshop.events.restarts]
    assert sorted(delays) == [0.0, 0.0, 0.0, 0.0, 0.1, 0.2]


async def test_what_is_logged_names_the_model(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    raising = await serving(workshop, "raising", "raise")
    await run_add_sub(raising.instances[0])
    line = "shared worker 'small': raising:1: the model failed to run a batch"
    await until(lambda: line in caplog.text)


async def test_models_that_come_and_go_leave_no_descriptor_or_thread(
    workshop: Workshop, own_children: Callable[[], list[psutil.Process]]
) -> None:
    stays = await serving(workshop, "stays")
    process = psutil.Process(pids(stays)[0])
    for _ in range(10):
        await (await serving(workshop, "goes")).stop(PATIENCE_SECONDS)
    await until(lambda: process.num_threads() <= 3)
    files = process.num_fds()
    for _ in range(30):
        await (await serving(workshop, "goes")).stop(PATIENCE_SECONDS)
    await until(lambda: process.num_threads() <= 3 and process.num_fds() <= files)
