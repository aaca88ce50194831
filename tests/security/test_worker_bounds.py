"""Models that take more memory or processes than they may: they are ended with a reason, and other models are served as
before. The server checks their processes or, if it may make cgroups, lets the kernel keep the bounds. The models limit
themselves in case the bounds fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from support.delegated_cgroup import delegated_cgroup, python_within
from support.infer_inputs import infer_input
from support.models import drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

CONFIG = """
backend: "python"
input { name: "TAKES" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'

MEMORY_BYTES = 300_000_000
TASKS = 40

# Once a file allows it, in steps, up to 1 GB.
HOG = """
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        if pb_utils.get_input_tensor_by_name(requests[0], "TAKES").as_numpy()[0]:
            while not (pathlib.Path(__file__).parents[3] / "takes").exists():
                time.sleep(0.01)
            held = []
            for _ in range(50):
                held.append(np.ones(20_000_000, np.uint8))
                time.sleep(0.02)
            time.sleep(30)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.int32))]) for _ in requests]
"""

# As the other, up to 120 processes, some of them orphans; they end after half a minute.
BOMB = """
import os
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        if pb_utils.get_input_tensor_by_name(requests[0], "TAKES").as_numpy()[0]:
            while not (pathlib.Path(__file__).parents[3] / "takes").exists():
                time.sleep(0.01)
            for number in range(120):
                try:
                    child = os.fork()
                except BlockingIOError:
                    break
                if child == 0:
                    if number % 3:
                        os.setsid()
                    open("/proc/self/comm", "w").write("fromabomb")
                    time.sleep(30)
                    os._exit(0)
                time.sleep(0.002)
            time.sleep(30)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.int32))]) for _ in requests]
"""


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """A server that checks the processes of its models."""
    with serving(tmp_path_factory.mktemp("bounds"), "--worker-cgroups=false") as server:
        yield server


@pytest.fixture(scope="module")
def grouping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """A server that lets the kernel keep the bounds. It leaves no worker's cgroup behind."""
    place = tmp_path_factory.mktemp("bounds")
    with delegated_cgroup() as folder:
        with serving(place, python=python_within(folder, place / "python")) as server:
            assert f"are kept by the kernel, in cgroups below {folder}" in server.log_text
            assert len(worker_groups(folder)) == 3
            yield server
            # Ended workers have been cleaned up, and new ones have taken their places.
            wait_until(lambda: len(worker_groups(folder)) == 3, "a cgroup for each worker")
            server.terminate()
        assert worker_groups(folder) == []
        # The zygote ended with the server, and its children a moment later.
        wait_until(lambda: "populated 0" in (folder / "cgroup.events").read_text(), "the end of all processes")


@pytest.fixture(scope="module", params=["watching", "grouping"])
def server(request: pytest.FixtureRequest) -> RocserveProcess:
    server: RocserveProcess = request.getfixturevalue(request.param)
    return server


def worker_groups(folder: Path) -> list[Path]:
    return list(folder.glob("worker-*"))


@contextmanager
def serving(place: Path, *flags: str, python: str = sys.executable) -> Iterator[RocserveProcess]:
    drop(place / "models", "hog", HOG, CONFIG)
    drop(place / "models", "bomb", BOMB, CONFIG + PARAMETER.format("worker_tasks", TASKS))
    # More than the flag allows.
    drop(place / "models", "other", HOG, CONFIG + PARAMETER.format("worker_memory_bytes", 10**12))
    with RocserveProcess(
        [place / "models"],
        f"--worker-memory-bytes={MEMORY_BYTES}",
        *flags,
        log=place / "server.log",
        python=python,
    ) as server:
        server.wait_until_ready()
        yield server


def infer(client: triton.InferenceServerClient, model: str) -> None:
    client.infer(model, [infer_input("TAKES", np.array([0], np.int32))], client_timeout=PATIENCE_SECONDS)


def fails_while_others_are_served(server: RocserveProcess, model: str) -> str:
    """The error of a request to a model that takes too much; another model answers meanwhile."""
    client, other = server.client(), server.client()
    entry = infer_input("TAKES", np.array([1], np.int32))
    answers: list[InferenceServerException | None] = []
    client.async_infer(model, [entry], lambda result, error: answers.append(error), client_timeout=PATIENCE_SECONDS)
    infer(other, "other")
    assert not answers
    takes = server.repositories[0].parent / "takes"
    takes.touch()
    while not answers:
        infer(other, "other")
        time.sleep(0.02)
    takes.unlink()
    (error,) = answers
    assert error is not None and error.status() == "StatusCode.UNAVAILABLE", error
    return str(error.message())


def test_memory_beyond_the_bound_ends_the_model_alone(server: RocserveProcess):
    text = fails_while_others_are_served(server, "hog")
    assert f"worker of model 'hog' version 1 was killed: memory limit of {MEMORY_BYTES} bytes exceeded" in text
    # It is restarted as after a crash.
    infer(server.client(), "hog")


def bomb_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "fromabomb":
            found.append(process)
    return found


def test_processes_beyond_the_bound_end_with_the_model(server: RocserveProcess):
    text = fails_while_others_are_served(server, "bomb")
    assert f"worker of model 'bomb' version 1 was killed: limit of {TASKS} tasks exceeded" in text
    wait_until(lambda: not bomb_processes(), "the end of what the model has started")
    infer(server.client(), "bomb")


def test_the_kernel_keeps_a_worker_in_a_cgroup_of_its_own(grouping: RocserveProcess):
    (worker,) = grouping.workers("bomb")
    folder = Path("/sys/fs/cgroup") / Path(f"/proc/{worker.pid}/cgroup").read_text().strip().removeprefix("0::/")
    assert (folder / "cgroup.procs").read_text().split() == [str(worker.pid)]
    assert (folder / "pids.max").read_text().strip() == str(TASKS)
    # In whole pages.
    assert 0 <= MEMORY_BYTES - int((folder / "memory.max").read_text()) < 65_536


def test_processes_that_a_model_leaves_behind_end_with_its_cgroup(grouping: RocserveProcess):
    """Also processes in separate sessions, of a model that is killed for another reason."""
    client = grouping.client()
    entry = infer_input("TAKES", np.array([1], np.int32))
    (grouping.repositories[0].parent / "takes").touch()
    client.async_infer("bomb", [entry], lambda result, error: None, client_timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(bomb_processes()) >= 8, "children")
    grouping.workers("bomb")[0].kill()
    wait_until(lambda: not bomb_processes(), "the end of what the model has started")
    infer(grouping.client(), "bomb")


def test_a_bound_that_is_no_number_fails_the_load(watching: RocserveProcess):
    drop(watching.repositories[0], "wrong", HOG, CONFIG + PARAMETER.format("worker_tasks", "many"))
    text = "parameter 'worker_tasks': expected a whole number, 0 for no bound, got 'many'"
    wait_until(lambda: text in watching.log_text, "the reason")
