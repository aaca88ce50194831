"""An engine's progress on its way to the server; and the time limit of a load, which covers all its parts except
compiling."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import closing

import pytest
from support.virtual_time import in_virtual_time
from support.waiting import PATIENCE_SECONDS, until
from support.workers import Workshop, config_of, running

from rocserve.core.errors import ServeError
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.settings import NO_TIME_LIMITS, TimeLimits
from rocserve.workers.load_limit import LoadLimit
from rocserve.workers.main import ControlSocket
from rocserve.workers.messages import LoadFailed, Progress, WorkerPlan
from rocserve.workers.version_workers import VersionWorkers

ENGINE = "rocserve_reporting_engine"
COMPILES = ["compiling batch size 1: parse, 0 s", "compiling batch size 1: compile, 1 s"]


def config(behaviour: str) -> ModelConfig:
    return config_of(behaviour, inputs=(), outputs=())


def group_of(
    workshop: Workshop, behaviour: str, workers: int = 1, limits: TimeLimits = NO_TIME_LIMITS
) -> VersionWorkers:
    plans = [WorkerPlan(InstanceKind.CPU, None, 1)] * workers
    return workshop.group(config=config(behaviour), engine=ENGINE, plans=plans, limits=limits)


async def test_a_load_says_what_it_is_at(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = group_of(workshop, "compiles")
    load = asyncio.create_task(group.load())
    lines = workshop.events.lines
    await until(lambda: "compiling batch size 1: compile, 2 s" in lines)
    assert lines == [*COMPILES, "compiling batch size 1: compile, 2 s"]
    (workshop.folder / "compiled").touch()
    await load
    assert lines[-1] == "" and workshop.events.properties == [{"target": "ref", "batch_sizes": "1"}]
    logged = [record.message for record in caplog.records if "compiling" in record.message]
    assert logged == [f"model 'm' version 1: {line}" for line in COMPILES]


async def test_compiling_does_not_count_as_loading(workshop: Workshop) -> None:
    group = group_of(workshop, "compiles", limits=TimeLimits(load_timeout_seconds=PATIENCE_SECONDS))
    load = asyncio.create_task(group.load())
    await until(lambda: "compiling batch size 1: compile, 2 s" in workshop.events.lines)
    timeout = group._workers[0].limit._timeout
    assert timeout is not None and timeout.when() is None
    (workshop.folder / "compiled").touch()
    await load


async def test_what_goes_on_beside_a_model_that_serves(workshop: Workshop) -> None:
    group = group_of(workshop, "goes_on")
    await group.load()
    await group.warm_up(config("goes_on"))
    assert group.instances
    events = workshop.events
    await until(lambda: events.lines[-1] == "compiling batch size 2: compile, 1 s")
    (workshop.folder / "second_compiled").touch()
    await until(lambda: events.lines[-1] == "")
    assert events.properties[-1] == {"target": "ref", "batch_sizes": "1, 2"}


async def test_several_workers_in_one_line(workshop: Workshop) -> None:
    group = group_of(workshop, "compiles", workers=2)
    load = asyncio.create_task(group.load())
    await until(lambda: "workers 1, 2 of 2: compiling batch size 1: compile, 2 s" in workshop.events.lines)
    assert any(
        line.startswith(("worker 1 of 2: compiling", "worker 2 of 2: compiling")) for line in workshop.events.lines
    )
    (workshop.folder / "compiled").touch()
    await load
    assert workshop.events.lines[-1] == ""


@pytest.mark.parametrize("behaviour", ["fails", "crashes"])
async def test_nothing_stays_of_a_load_that_failed(workshop: Workshop, behaviour: str) -> None:
    with pytest.raises(ServeError):
        await group_of(workshop, behaviour).load()
    assert workshop.events.lines == [COMPILES[0], ""]


async def test_a_load_that_is_called_off_ends_its_compilers(workshop: Workshop) -> None:
    group = group_of(workshop, "compiles")
    load = asyncio.create_task(group.load())
    await until(lambda: "compiling batch size 1: compile, 2 s" in workshop.events.lines)
    compiler = int((workshop.folder / "child").read_text())
    assert running(compiler)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    await until(lambda: not running(compiler))


async def test_a_flood_holds_up_neither_the_engine_nor_the_server(workshop: Workshop) -> None:
    group = group_of(workshop, "floods")
    await group.load()
    assert workshop.events.lines[-1] == ""


def connected() -> tuple[ControlSocket, socket.socket]:
    ours, servers = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return ControlSocket(ours), servers


def test_a_server_that_does_not_read_is_not_waited_for() -> None:
    control, server = connected()
    with server, closing(control):
        for number in range(1000):
            control.send_later(Progress(f"{number} {'x' * 100}"))
        reader, received = ControlSocket(server), []
        sending = threading.Thread(target=control.send, args=(LoadFailed(13, "why"),))
        sending.start()
        while not received or not isinstance(received[-1], LoadFailed):
            received.append(reader.receive())
        sending.join()
    # Whole messages, in order; of those that found no room only the last.
    texts = [message.text for message in received[:-1]]
    numbers = [int(text.split()[0]) for text in texts]
    assert numbers == [*range(len(numbers) - 1), 999] and len(numbers) < 1000


def test_progress_for_a_server_that_is_gone() -> None:
    control, server = connected()
    server.close()
    with closing(control):
        control.send_later(Progress("anybody there?"))
        with pytest.raises(OSError, match="Broken pipe"):
            control.send(LoadFailed(13, "why"))


@in_virtual_time
async def test_the_parts_of_a_load_share_its_time():
    limit = LoadLimit(0.3)
    async with limit.bounding():
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.3)
    with pytest.raises(TimeoutError):
        async with limit.bounding():
            await asyncio.sleep(0.2)
    with pytest.raises(TimeoutError):
        async with limit.bounding():
            await asyncio.sleep(0.2)


@in_virtual_time
async def test_what_is_compiled_is_not_counted_and_what_follows_is():
    limit = LoadLimit(0.3)
    with pytest.raises(TimeoutError):
        async with limit.bounding():
            await asyncio.sleep(0.2)
            limit.note("compiling")
            await asyncio.sleep(0.3)
            limit.note("compiling (1 s so far)")
            await asyncio.sleep(0.3)
            limit.note("")
            compiled = True
            await asyncio.sleep(0.3)
    assert compiled


async def test_without_a_limit_it_takes_as_long_as_it_takes():
    limit = LoadLimit(0)
    async with limit.bounding():
        limit.note("compiling")
        limit.note("")
        await asyncio.sleep(0.01)
