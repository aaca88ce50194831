"""A killed worker loses the requests inside it, and nothing else."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest
from support.load import ConstantLoad
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.repository_index import models_of
from support.waiting import wait_until

KILLS = 50
THREADS = 8


@pytest.mark.timeout(240)
def test_fifty_kills_under_load(serve, repository: Path):
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server = serve(repository)
    process = server.server_process()
    with ConstantLoad(server.address, "m", {1.0}, THREADS) as load:
        load.wait_until_answered_by(1.0)
        kill_and_wait(server, load)
        time.sleep(1.0)
        before = measure(process)
        for _ in range(KILLS):
            time.sleep(random.uniform(0.0, 0.05))
            kill_and_wait(server, load)
        time.sleep(1.0)
        after = measure(process)
    assert load.wrong == []
    assert load.failures, "fifty kills under load hit no request: the test did not test"
    # At most the requests inside: a batch of all clients' requests for each kill.
    assert len(load.failures) <= (KILLS + 1) * THREADS
    for status, text in load.failures:
        assert status == "StatusCode.UNAVAILABLE"
        assert "worker of model 'm' version 1" in text
        assert "signal 9" in text
    assert models_of(server) == {"m": ("READY", "")}
    assert after[0] <= before[0] + 2, "descriptors leaked"
    assert after[1] <= before[1] + 10, "mappings leaked"
    assert after[2] <= before[2], "threads leaked"


def kill_and_wait(server, load: ConstantLoad) -> None:
    """Kill the worker, and wait until another one answers."""
    (worker,) = server.workers()
    worker.kill()
    wait_until(lambda: {each.pid for each in server.workers()} - {worker.pid}, "the new worker")
    # Each client may still count one answer of the old worker.
    load.wait_until_answered_by(1.0, times=THREADS + 1)
    wait_until(lambda: len(server.workers()) == 1, "the end of the old worker")


def measure(process: psutil.Process) -> tuple[int, int, int]:
    """Descriptors, mappings and threads."""
    mappings = len(process.memory_maps(grouped=False))
    return process.num_fds(), mappings, process.num_threads()
