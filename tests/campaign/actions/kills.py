"""Kills: workers that end or stop without a word. What was inside is lost, everything else goes on."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress

import psutil
from support.repository_index import index_of
from support.server import RocserveProcess, wait_until

from campaign import models
from campaign.action import Kind
from campaign.stage import Stage

RECOVERY_SECONDS = 30.0
LONGEST_STOP_SECONDS = 2.0
ON_POLL = (models.CACHED, models.PYTHON, models.DECOUPLED, models.SUMS, "digits_classifier", *models.SWAPPED)
ON_EXPLICIT = (models.CALLED, models.PYTHON)


def workers_of(server: RocserveProcess, model: str) -> list[psutil.Process]:
    return [worker for worker in server.workers() if _name(worker) == models.process_name(model)]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def choose(stage: Stage, random: random.Random) -> tuple[RocserveProcess, str]:
    if random.random() < 0.7:
        return stage.poll, random.choice(ON_POLL)
    return stage.explicit, random.choice(ON_EXPLICIT)


def wait_until_served(server: RocserveProcess, model: str) -> None:
    """The index has no warning of the version that serves."""

    def is_well() -> bool:
        return ("READY", "") in index_of(server, model).values() and bool(workers_of(server, model))

    wait_until(is_well, RECOVERY_SECONDS, f"{model} served again by a worker")


def kill_workers(stage: Stage, server: RocserveProcess, model: str) -> None:
    for worker in workers_of(server, model):
        stage.damage.killed(model)
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def worker(stage: Stage, random: random.Random) -> None:
    server, model = choose(stage, random)
    kill_workers(stage, server, model)
    wait_until_served(server, model)


def zygote(stage: Stage, random: random.Random) -> None:
    """Workers go on without it, and what is loaded next has another."""
    server = random.choice((stage.poll, stage.explicit))
    if found := server.zygote():
        found.kill()


def zygote_and_worker(stage: Stage, random: random.Random) -> None:
    server, model = choose(stage, random)
    if found := server.zygote():
        found.kill()
    kill_workers(stage, server, model)
    wait_until_served(server, model)


def stop(stage: Stage, random: random.Random) -> None:
    """SIGSTOP, for a moment: requests wait, others' do not."""
    server, model = choose(stage, random)
    stopped = workers_of(server, model)
    for each in stopped:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGSTOP)
    try:
        time.sleep(random.uniform(0.1, LONGEST_STOP_SECONDS))
    finally:
        for each in stopped:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)


KINDS = (
    Kind("kill.worker", worker, 6),
    Kind("kill.zygote", zygote, 2),
    Kind("kill.zygote-and-worker", zygote_and_worker, 2),
    Kind("kill.stop", stop, 3),
)
