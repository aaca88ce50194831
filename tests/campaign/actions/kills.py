"""Kills: processes that end or stop without notice. With a worker the requests inside it are lost; with a front end or
the server's process, its clients' connections. Everything else goes on."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress

from support.front_ends import listens
from support.models import add_constant
from support.processes import send
from support.repository_index import index_of
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

from campaign import models
from campaign.action import Kind
from campaign.actions.swaps import file_of, new_constant
from campaign.stage import FRONT_ENDS, Stage
from campaign.watch.ending import UNLOADED, check_recovery, index_rows

RECOVERY_SECONDS = PATIENCE_SECONDS
LONGEST_STOP_SECONDS = 2.0
ON_POLL = (
    *(models.CACHED, models.PYTHON, models.DECOUPLED, models.SUMS, models.TEXTS, "digits_classifier"),
    *models.SWAPPED,
)
ON_EXPLICIT = (models.CALLED, models.PYTHON)


def choose(stage: Stage, random: random.Random) -> tuple[RocserveProcess, str]:
    if random.random() < 0.7:
        return stage.poll, random.choice(ON_POLL)
    return stage.explicit, random.choice(ON_EXPLICIT)


def wait_until_served(server: RocserveProcess, model: str) -> None:
    """Wait until a version is READY without a warning in the index, and the model has a worker."""

    def is_well() -> bool:
        return ("READY", "") in index_of(server, model).values() and bool(server.workers(model))

    wait_until(is_well, f"{model} served again by a worker", seconds=RECOVERY_SECONDS)


def kill_workers(stage: Stage, server: RocserveProcess, model: str) -> None:
    for worker in server.workers(model):
        stage.damage.killed(model)
        send(worker, signal.SIGKILL)


def kill_zygote(server: RocserveProcess) -> None:
    if found := server.zygote():
        send(found, signal.SIGKILL)


def worker(stage: Stage, random: random.Random) -> None:
    server, model = choose(stage, random)
    kill_workers(stage, server, model)
    wait_until_served(server, model)


def zygote(stage: Stage, random: random.Random) -> None:
    """Kill the zygote: workers go on, and the next load starts another zygote."""
    kill_zygote(random.choice((stage.poll, stage.explicit)))


def zygote_and_worker(stage: Stage, random: random.Random) -> None:
    server, model = choose(stage, random)
    kill_zygote(server)
    kill_workers(stage, server, model)
    wait_until_served(server, model)


def stop(stage: Stage, random: random.Random) -> None:
    """Stop a worker (SIGSTOP) for a moment: its requests wait, other models' requests do not."""
    server, model = choose(stage, random)
    stopped = server.workers(model)
    for one in stopped:
        send(one, signal.SIGSTOP)
    try:
        time.sleep(random.uniform(0.1, LONGEST_STOP_SECONDS))
    finally:
        for one in stopped:
            send(one, signal.SIGCONT)


def front_end(stage: Stage, random: random.Random) -> None:
    killed = random.choice(stage.explicit.front_ends())
    with stage.damage.outage("explicit"):
        killed.kill()
        killed.wait(RECOVERY_SECONDS)
        wait_until(lambda: has_front_ends(stage), "the next front end", seconds=RECOVERY_SECONDS)


def has_front_ends(stage: Stage) -> bool:
    server = stage.explicit
    return all(
        [listens(front_end, port) for front_end in server.front_ends()] == [True] * FRONT_ENDS
        for port in (server.port, server.http_port)
    )


def kill_server(stage: Stage, name: str) -> None:
    """Kill the server's process: all of its processes end, and the next server serves the same models."""
    server = stage.servers[name]
    rows = index_rows(server)
    # Models whose processes were killed before must be served again, too.
    models = {place: ("READY", "") for place, state in rows.items() if state != UNLOADED}
    with stage.damage.outage(name):
        server.restart()
        wait_until(lambda: is_ready(server), f"{name} ready again", seconds=RECOVERY_SECONDS)
        if name == "explicit":
            wait_until(lambda: has_front_ends(stage), "its front ends", seconds=RECOVERY_SECONDS)
        check_recovery(stage, name, models)


def is_ready(server: RocserveProcess) -> bool:
    with server.client() as client, suppress(InferenceServerException):
        return bool(client.is_server_ready())
    return False


def server(stage: Stage, random: random.Random) -> None:
    kill_server(stage, random.choice(tuple(stage.servers)))


def server_and_swap(stage: Stage, random: random.Random) -> None:
    """Kill the server's process just after the files of a model have changed."""
    model = random.choice(models.COPIED)
    with new_constant(stage, model, random) as constant:
        file_of(stage, model).write_bytes(add_constant(constant))
        kill_server(stage, "poll")


KINDS = (
    Kind("kill.worker", worker, 6),
    Kind("kill.zygote", zygote, 2),
    Kind("kill.zygote-and-worker", zygote_and_worker, 2),
    Kind("kill.stop", stop, 3),
    Kind("kill.front-end", front_end, 3, is_alone=True),
    Kind("kill.server", server, 3, is_alone=True),
    Kind("kill.server-and-swap", server_and_swap, 2, is_alone=True),
)
