"""Models that are loaded, unloaded, and fail to load leave nothing behind in the server."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.server import RocserveProcess, Start
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

SOFT_LIMIT = 64
"""Descriptors; twelve models take more."""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling {
  step [
    { model_name: "a" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "BETWEEN" } },
    { model_name: "b" model_version: -1 input_map { key: "X" value: "BETWEEN" } output_map { key: "Y" value: "Y" } }
  ]
}
"""


def ask(client: triton.InferenceServerClient, model: str, constant: float) -> None:
    for rows in (1, 3):
        values = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        assert (client.infer(model, [infer_input("X", values)]).as_numpy("Y") == values + constant).all()


def descriptors_when_idle(server: RocserveProcess) -> int:
    """The descriptors after the server, too, has noticed the end of its workers."""
    process, counts = server.server_process(), [-1]

    def is_idle() -> bool:
        counts.append(process.num_fds())
        time.sleep(0.2)
        return not server.workers() and counts[-2] == counts[-1]

    wait_until(is_idle, "the end of the workers")
    return counts[-1]


def check_growth(server: RocserveProcess, cycle: Callable[[], None]) -> None:
    for _ in range(3):
        cycle()
    before = descriptors_when_idle(server)
    for _ in range(10):
        cycle()
    wait_until(lambda: descriptors_when_idle(server) <= before, f"at most {before} descriptors")


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server without a loaded model before and after each test."""
    repository = tmp_path_factory.mktemp("cycles") / "repository"
    repository.mkdir()
    flags = ("--model-control-mode=explicit", "--allow-remote-files=true", "--allow-remote-models=true")
    return start(repository, *flags)


def test_loading_and_unloading_leaves_nothing_behind(server: RocserveProcess):
    repository = server.repositories[0]
    drop(repository, "a", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop(repository, "b", add_constant(2.0), ADD_CONSTANT_CONFIG)
    drop(repository, "both", None, ENSEMBLE)
    client = server.client()

    def cycle() -> None:
        client.load_model("both")
        ask(client, "both", 3.0)
        client.unload_model("both", unload_dependents=True)

    check_growth(server, cycle)


def test_failing_loads_leave_nothing_behind(server: RocserveProcess):
    client = server.client()
    config = json.dumps({"platform": "onnx_onnxv1", "backend": "onnxruntime", "max_batch_size": 8})
    files = {"file:1/model.onnx": b"this is no ONNX file" * 50_000}

    def cycle() -> None:
        with pytest.raises(InferenceServerException, match="load failed for model 'm'"):
            client.load_model("m", config=config, files=files)

    check_growth(server, cycle)


def test_a_model_costs_few_descriptors(server: RocserveProcess):
    # The process, its control socket, its output, the doorbell, and the heaps of its inputs and outputs.
    idle, asked = 6, 6
    names = [f"m{index}" for index in range(6)]
    for name in names:
        drop(server.repositories[0], name, add_constant(1.0), ADD_CONSTANT_CONFIG)
    client = server.client()

    process = server.server_process()

    def cycle(idle_most: float, asked_most: float) -> None:
        # For a moment a load has further descriptors.
        for name in names:
            client.load_model(name)
        wait_until(lambda: process.num_fds() <= idle_most, f"at most {idle_most} descriptors with idle models")
        for name in names:
            ask(client, name, 1.0)
        wait_until(lambda: process.num_fds() <= asked_most, f"at most {asked_most} descriptors with models")
        for name in names:
            client.unload_model(name)

    cycle(math.inf, math.inf)
    before = descriptors_when_idle(server)
    cycle(before + idle * len(names), before + asked * len(names))
    wait_until(lambda: descriptors_when_idle(server) <= before, f"at most {before} descriptors")


def test_many_models_fit_though_the_soft_limit_of_descriptors_is_low(repository: Path, tmp_path: Path):
    names = [f"m{index}" for index in range(12)]
    for name in names:
        drop(repository, name, add_constant(1.0), ADD_CONSTANT_CONFIG)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -S -n {SOFT_LIMIT}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with RocserveProcess([repository], log=tmp_path / "server.log", python=str(python)) as server:
        server.wait_until_ready()
        client = server.client()
        for name in names:
            ask(client, name, 1.0)
        assert server.server_process().num_fds() > SOFT_LIMIT, "they fit anyway: the test does not test"
