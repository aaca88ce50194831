"""Small models that share a process, seen by a client and by an operator."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.infer_inputs import infer_input
from support.models import ADD_CONSTANT_CONFIG, add_constant, answering, drop
from support.processes import name_of
from support.repository_index import models_of
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from support.workers import running

Serve = Callable[..., RocserveProcess]

GROUP = 'parameters {{ key: "shared_worker" value {{ string_value: "{}" }} }}\n'
IDENTITY = answering("X", "Y")


def add_python(folder: Path, name: str, parameters: str = "") -> None:
    config = ADD_CONSTANT_CONFIG.replace('platform: "onnx_onnxv1"', 'backend: "python"')
    drop(folder, name, IDENTITY, config + parameters)


def ask(server: RocserveProcess, name: str) -> list[float]:
    tensor = infer_input("X", np.zeros((1, 2), np.float32))
    with server.client() as client:
        return client.infer(name, [tensor], client_timeout=PATIENCE_SECONDS).as_numpy("Y")[0].tolist()


def workers(server: RocserveProcess) -> dict[str, list[int]]:
    """The process ids of workers, by their titles, of which Linux keeps 15 bytes."""
    found: dict[str, list[int]] = {}
    for process in server.workers():
        found.setdefault(name_of(process), []).append(process.pid)
    return found


def test_small_models_share_processes_and_come_back_together(serve: Serve, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for number in range(8):
        drop(repository, f"m{number}", add_constant(number), config=ADD_CONSTANT_CONFIG)
    drop(repository, "alone", add_constant(8), config=ADD_CONSTANT_CONFIG + GROUP.format(""))
    add_python(repository, "python")
    server = serve(repository, flags=("--shared-workers=2",))
    server.wait_until_ready()
    assert [ask(server, f"m{number}") for number in range(8)] == [[number, number] for number in range(8)]
    assert (ask(server, "alone"), ask(server, "python")) == ([8, 8], [0, 0])
    before = workers(server)
    shared = before["rocserve:shared"]
    assert len(shared) == 2 and len(before["rocserve:alone"]) == len(before["rocserve:python"]) == 1
    for pid in shared:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(running, shared)))
    assert [ask(server, f"m{number}") for number in range(8)] == [[number, number] for number in range(8)]
    wait_until(lambda: set(models_of(server).values()) == {("READY", "")})
    assert workers(server)["rocserve:alone"] == before["rocserve:alone"]


def refusal(server: RocserveProcess, model: str) -> str:
    """Wait for the model's refusal; return its reason."""
    seen: list[tuple[str, str]] = []

    def is_refused() -> bool:
        seen.append(models_of(server).get(model, ("", "")))
        return seen[-1][0] == "UNAVAILABLE"

    wait_until(is_refused, "the refusal")
    return seen[-1][1]


def test_who_cannot_share_and_names_a_group_is_refused(serve: Serve, tmp_path: Path) -> None:
    first, second, group = tmp_path / "first", tmp_path / "second", GROUP.format("g")
    add_python(first, "python", group)
    bound = 'parameters { key: "worker_tasks" value { string_value: "100" } }\n'
    drop(first, "bounds", add_constant(1), config=ADD_CONSTANT_CONFIG + group + bound)
    drop(second, "cores", add_constant(1), config=ADD_CONSTANT_CONFIG + group)
    server, on_cores = serve(first), serve(second, flags=("--host-policy=cpu,cpu-cores=0-0",))
    for running_server, model, reason in (
        (server, "python", "engine python runs each model in a separate process"),
        (server, "bounds", "it sets bounds for its process"),
        (on_cores, "cores", "a host policy keeps its instances to CPU cores"),
    ):
        text = f"Invalid argument: model '{model}' cannot be in the shared worker 'g': {reason};"
        assert refusal(running_server, model).startswith(f"{text} remove parameter 'shared_worker'")
