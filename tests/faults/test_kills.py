"""A killed worker loses the requests inside it, and nothing else."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import psutil
from support.load import ConstantLoad
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.repository_index import models_of
from support.waiting import wait_until

KILLS = 15
THREADS = 8


def test_kills_under_load(serve, repository: Path):
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server = serve(repository)
    process = server.server_process()
    with ConstantLoad(server.address, "m", {1.0}, THREADS, pause_seconds=0.0) as load:
        load.wait_until_answered_by(1.0)
        kill_and_wait(server, load)
        before, kills, chance = measure(process), 0, random.Random(1)
        # On a busy machine kills may miss the requests.
        while kills < KILLS or not load.failures:
            time.sleep(chance.uniform(0.0, 0.05))
            kill_and_wait(server, load)
            kills += 1
    assert load.wrong == []
    # At most the requests inside: a batch of all clients' requests for each kill.
    assert len(load.failures) <= (kills + 1) * THREADS
    for status, text in load.failures:
        assert status == "StatusCode.UNAVAILABLE"
        assert re.search("worker of model 'm' version 1|model 'm' has no worker", text), text
        assert "signal 9" in text
    wait_until(lambda: models_of(server) == {"m": ("READY", "")}, "the end of the reason")
    # A leak of one with each kill is more than this; pools may have grown meanwhile.
    most = [count + KILLS - 5 for count in before]
    wait_until(
        lambda: all(count <= bound for count, bound in zip(measure(process), most, strict=True)),
        f"at most {most} descriptors, mappings and threads",
    )


def kill_and_wait(server, load: ConstantLoad) -> None:
    """Kill the worker, and wait until another one answers."""
    (worker,) = server.workers()
    worker.kill()
    wait_until(lambda: {one.pid for one in server.workers()} - {worker.pid}, "the new worker")
    # Each client may still count one answer of the old worker.
    load.wait_until_answered_by(1.0, times=THREADS + 1)
    wait_until(lambda: len(server.workers()) == 1, "the end of the old worker")


def measure(process: psutil.Process) -> tuple[int, int, int]:
    """Descriptors, mappings and threads."""
    mappings = len(process.memory_maps(grouped=False))
    return process.num_fds(), mappings, process.num_threads()
