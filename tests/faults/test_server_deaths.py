"""The server's process dies: another one takes its place, and clients only lose their connections."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.delegated_cgroup import delegated_cgroup, python_within
from support.infer_inputs import infer_input
from support.load import ConstantLoad
from support.metrics import FLAGS, port_of, scrape
from support.models import ADD_CONSTANT_CONFIG, add_constant, answering, drop, slow_sum
from support.processes import has_ended, name_of, send, wait_until_ended
from support.repository_index import models_of
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

DEATHS = 9
SLACK = 8
"""Descriptors of clients' connections and of workers that have had many batches: fewer than one for each death."""
VALUES = np.array([[1.0, 2.0]], np.float32)
PYTHON_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 1, 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 2 ] }
"""
ADDS = answering("X", "Y", "x + 2")
SLOW_CONFIG = """
platform: "onnx_onnxv1"
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 256 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 256 ] }
"""
CHAIN = """
platform: "ensemble"
input { name: "X" data_type: TYPE_FP32 dims: [ 1, 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 2 ] }
ensemble_scheduling {
  step { model_name: "m" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "BETWEEN" } }
  step {
    model_name: "python" model_version: -1
    input_map { key: "X" value: "BETWEEN" } output_map { key: "Y" value: "Y" }
  }
}
"""
# After a negative number it stays in `execute` until a file exists, or for ever.
STAYS = """
import pathlib
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        folder = pathlib.Path(__file__).parents[3]
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if not (folder / "go").exists():
                (folder / "inside").touch()
                while not (folder / "go").exists():
                    time.sleep(0.01)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", values + 2)]))
        return responses
"""


def kill_and_wait(server: RocserveProcess, number: int = signal.SIGKILL) -> None:
    """Kill the server's process, and wait until another one is ready."""
    killed = server.server_process()
    killed.send_signal(number)
    killed.wait(PATIENCE_SECONDS)
    wait_until(lambda: is_ready(server), f"readiness; the log says:\n{server.log_text}")
    assert server.server_process() != killed


def is_ready(server: RocserveProcess) -> bool:
    with server.client() as client, suppress(InferenceServerException):
        return bool(client.is_server_ready())
    return False


def ask(server: RocserveProcess, model: str, values: np.ndarray = VALUES) -> list[list[float]]:
    entry = infer_input("X", values)
    with server.client() as client:
        return client.infer(model, [entry], client_timeout=PATIENCE_SECONDS).as_numpy("Y").tolist()


def refusal(server: RocserveProcess, model: str) -> str:
    try:
        ask(server, model)
    except InferenceServerException as error:
        assert error.status() == "StatusCode.UNAVAILABLE"
        return str(error.message())
    return ""


def pids(server: RocserveProcess) -> set[int]:
    return {worker.pid for worker in server.workers()}


def holdings(server: RocserveProcess) -> dict[str, int]:
    """The number of all processes, and their descriptors."""
    descriptors = []
    for process in server.family():
        with suppress(psutil.NoSuchProcess):
            descriptors.append(process.num_fds())
    return {"processes": len(descriptors), "descriptors": sum(descriptors)}


def steady(server: RocserveProcess) -> dict[str, int]:
    """Measure once front ends have started and connections of former clients are closed."""
    last: dict[str, int] = {}
    while (now := holdings(server)) != last:
        last = now
        time.sleep(1.0)
    return now


@pytest.mark.parametrize("front_ends", [0, 1])
def test_deaths_under_load(serve, repository: Path, front_ends: int) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop(repository, "python", ADDS, PYTHON_CONFIG + "instance_group { count: 2 kind: KIND_CPU }")
    drop(repository, "chain", None, CHAIN)
    server: RocserveProcess = serve(repository, f"--front-ends={front_ends}")
    ports, workers = (server.port, server.http_port), pids(server)
    assert len(workers) == 3
    # What workers and the server need once for such a load, they have after the first death.
    die_under_load(server, [signal.SIGKILL])
    before = steady(server)
    die_under_load(server, [signal.SIGSEGV if death % 2 else signal.SIGKILL for death in range(DEATHS)])
    assert pids(server) == workers
    assert (server.port, server.http_port) == ports
    assert "the server's process was killed by SIGSEGV" in server.log_text

    def is_as_before() -> bool:
        now = holdings(server)
        return now["processes"] == before["processes"] and now["descriptors"] <= before["descriptors"] + SLACK

    wait_until(is_as_before, f"{before}, and {SLACK} descriptors at most")
    assert server.terminate() == 0


def die_under_load(server: RocserveProcess, deaths: Sequence[signal.Signals]) -> None:
    with ExitStack() as running:
        loads = [
            (running.enter_context(ConstantLoad(server.address, model, {constant}, 2)), constant)
            for model, constant in (("m", 1.0), ("python", 2.0), ("chain", 3.0))
        ]
        for number in deaths:
            for load, constant in loads:
                load.wait_until_answered_by(constant, times=20)
            kill_and_wait(server, number)
        for load, constant in loads:
            load.wait_until_answered_by(constant, times=20)
    assert [wrong for load, _ in loads for wrong in load.wrong] == []
    assert {status for load, _ in loads for status, _ in load.failures} == {"StatusCode.UNAVAILABLE"}


def test_all_end_with_a_killed_supervisor(serve, repository: Path) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository, "--front-ends=1")
    kill_and_wait(server)
    family = server.family()
    assert len(family) >= 4
    server.kill()
    wait_until_ended(family)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_the_end_while_another_is_being_started(serve, repository: Path, seconds: float) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository)
    family = server.family()
    server.server_process().kill()
    time.sleep(seconds)
    # If the signal comes before the supervisor knows of the death, the server has ended with that status.
    assert server.terminate() in (0, 128 + signal.SIGKILL)
    wait_until_ended([*family, *server.family()])


def test_a_third_signal_ends_it_whatever_it_is_doing(serve, repository: Path) -> None:
    server: RocserveProcess = serve(repository)
    family = server.family()
    server.server_process().suspend()
    process = server.process
    assert process is not None
    supervisor = psutil.Process(process.pid)

    def has_ended_by_signals() -> bool:
        # The kernel keeps one of several signals for a process that does not run.
        send(supervisor, signal.SIGTERM)
        return process.poll() is not None

    wait_until(has_ended_by_signals, "the supervisor's end")
    assert process.returncode == -signal.SIGTERM
    wait_until_ended(family)


def test_a_death_before_it_serves_is_the_end(repository: Path) -> None:
    # It never serves: its model hangs.
    drop(repository, "hangs", "import time\n\ntime.sleep(600)\n", PYTHON_CONFIG)
    flags = ("--grpc-port=0", "--http-port=0", "--allow-metrics=false", "--listen-when-loaded")
    command = [sys.executable, "-m", "rocserve.cli", "serve", f"--model-repository={repository}", *flags]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        supervisor = psutil.Process(process.pid)
        wait_until(supervisor.children, "the server's process")
        supervisor.children()[0].kill()
        assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGKILL


def test_a_model_that_was_broken_since_keeps_no_other_from_being_served(serve, repository: Path) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository, "--exit-on-error=true", "--strict-readiness=false")
    drop(repository, "broken", b"no ONNX")
    wait_until(lambda: "failed to load 'broken'" in server.log_text, "the failed load")
    kill_and_wait(server)
    with ConstantLoad(server.address, "m", {1.0}, 1) as load:
        load.wait_until_answered_by(1.0)


def ask_in_background(server: RocserveProcess, model: str, values: np.ndarray = VALUES) -> threading.Thread:
    def run() -> None:
        with suppress(InferenceServerException):
            ask(server, model, values)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("is_released", [True, False])
def test_a_worker_that_is_at_a_request(serve, repository: Path, is_released: bool) -> None:
    """It is taken over once its request has ended, and killed if the request does not end."""
    drop(repository, "stays", STAYS, PYTHON_CONFIG)
    server: RocserveProcess = serve(repository)
    workers = pids(server)
    ask_in_background(server, "stays")
    wait_until((repository.parent / "inside").exists, "the request in the model")
    server.server_process().kill()
    if is_released:
        wait_until(lambda: "this one takes its place" in server.log_text, "the next server")
        (repository.parent / "go").touch()
    else:
        # It listens before the model is served again, and must not answer that there is no such model.
        wait_until(lambda: refusal(server, "stays").endswith("unknown model: 'stays' has no available versions"))
    wait_until(lambda: is_ready(server), "readiness")
    assert (pids(server) == workers) == is_released
    text = "that was left could not be taken over: it has not answered within 10 s"
    assert (text in server.log_text) != is_released
    assert "failed to load" not in server.log_text
    (repository.parent / "go").touch()
    assert ask(server, "stays") == [[3.0, 4.0]]


def test_what_has_changed_or_ended_meanwhile_is_loaded_again(serve, repository: Path) -> None:
    for name in ("same", "changed", "ended", "gone"):
        drop(repository, name, add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository)
    by_name = {worker.name(): worker for worker in server.workers()}
    assert server.process is not None
    supervisor = psutil.Process(server.process.pid)
    supervisor.suspend()
    server.server_process().kill()
    by_name["rocserve:ended"].kill()
    drop(repository, "changed", add_constant(2.0), ADD_CONSTANT_CONFIG)
    shutil.rmtree(repository / "gone")
    time.sleep(3.0)
    supervisor.resume()
    wait_until(lambda: is_ready(server), "readiness")
    wait_until(lambda: len(server.workers()) == 3, "the end of what nobody claims")
    kept = {name_of(worker) for worker in server.workers()} & {
        name for name, worker in by_name.items() if not has_ended(worker.pid)
    }
    assert kept == {"rocserve:same"}
    assert [ask(server, name) for name in ("same", "changed", "ended")] == [[[2.0, 3.0]], [[3.0, 4.0]], [[2.0, 3.0]]]


def test_models_that_requests_loaded_make_room_for_each_other_afterwards_too(serve, repository: Path) -> None:
    names = ("pinned", "first", "second", "third")
    for name in names:
        drop(repository, name, add_constant(1.0), ADD_CONSTANT_CONFIG)
    flags = ("--model-control-mode=explicit", "--load-model=pinned", "--max-loaded-models=2")
    server: RocserveProcess = serve(repository, *flags)
    with server.client() as client:
        for name in names[1:]:
            client.load_model(name)
    kill_and_wait(server)
    for _ in range(2):
        assert [ask(server, name) for name in names] == [[[2.0, 3.0]]] * 4
    index = models_of(server)
    assert {state for state, _ in index.values()} == {"READY"}
    assert index["pinned"] == ("READY", "")


def test_models_that_share_a_process_under_load(serve, repository: Path) -> None:
    """The process outlives the server, with each of its models that has not changed."""
    names = ("same", "other", "changed", "gone")
    for name in names:
        drop(repository, name, add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository, "--shared-workers=1")
    workers = pids(server)
    assert len(workers) == 1
    with ExitStack() as running:
        loads = [running.enter_context(ConstantLoad(server.address, name, {1.0, 2.0}, 2)) for name in names[:3]]
        for death in (1, 2, 3):
            for load in loads:
                load.wait_until_answered_by(1.0, times=20)
            kill_and_wait(server)
            assert pids(server) == workers
            assert server.log_text.count("is still loaded") == death * len(names)
        threads = server.workers()[0].num_threads()
        assert server.process is not None
        supervisor = psutil.Process(server.process.pid)
        supervisor.suspend()
        server.server_process().kill()
        drop(repository, "changed", add_constant(2.0), ADD_CONSTANT_CONFIG)
        shutil.rmtree(repository / "gone")
        supervisor.resume()
        loads[2].wait_until_answered_by(2.0, times=20)
        for load in loads[:2]:
            load.wait_until_answered_by(1.0, times=20)
    assert [wrong for load in loads for wrong in load.wrong] == []
    assert {status for load in loads for status, _ in load.failures} == {"StatusCode.UNAVAILABLE"}
    assert pids(server) == workers
    # The descriptors of its session and of its instance.
    wait_until(lambda: server.workers()[0].num_threads() <= threads - 2, "the end of the model that is gone")


def test_models_that_share_a_process_that_is_at_a_request(serve, repository: Path) -> None:
    """A process that is busy when the next server comes is loaded again next to the old one, which ends when it has
    finished."""
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop(repository, "slow", slow_sum(2000), SLOW_CONFIG)
    server: RocserveProcess = serve(repository, "--shared-workers=1")
    (worker,) = server.workers()
    threads, seconds = worker.num_threads(), worker.cpu_times().user
    ask_in_background(server, "slow", np.ones((2048, 256), np.float32))
    wait_until(lambda: worker.cpu_times().user > seconds + 0.2, "the request in the model")
    kill_and_wait(server)
    assert server.workers() == [worker]
    assert ask(server, "m") == [[2.0, 3.0]]
    wait_until(lambda: worker.num_threads() <= threads, "the end of the one that was left")


def test_a_zygote_that_dies_with_the_server(serve, repository: Path) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository)
    workers, zygote = pids(server), server.zygote()
    assert zygote is not None
    zygote.kill()
    wait_until(lambda: "the zygote, which starts workers, has ended" in server.log_text, "the zygote's end")
    for _ in range(2):
        # Nobody holds the first server's workers; the next server's workers are held by its own zygote.
        kill_and_wait(server)
        assert ask(server, "m") == [[2.0, 3.0]]
        wait_until(lambda: not pids(server) & workers, "the end of the first one's workers")
        assert len(server.workers()) == 1


def test_a_worker_that_was_taken_over_is_watched(serve, repository: Path) -> None:
    """Its end is noticed, its last output is in the log, and another worker takes its place."""
    source = ADDS.replace(
        "    def execute", "    def initialize(self, args):\n        print('ready to add')\n\n    def execute"
    )
    drop(repository, "python", source, PYTHON_CONFIG)
    server: RocserveProcess = serve(repository)
    kill_and_wait(server)
    (worker,) = server.workers()
    worker.kill()
    wait_until(lambda: "ended unexpectedly (killed by signal 9)" in server.log_text, "the end in the log")
    wait_until(lambda: pids(server) - {worker.pid}, "another worker")
    wait_until(lambda: server.client().is_model_ready("python"), "the model's return")
    assert ask(server, "python") == [[3.0, 4.0]]
    wait_until(lambda: server.log_text.count("ready to add") == 2, "the new worker's line")


def test_cgroups_of_workers_go_on_and_go(repository: Path, tmp_path: Path) -> None:
    bounded = 'parameters { key: "worker_memory_bytes" value { string_value: "4000000000" } }'
    drop(repository, "python", ADDS, PYTHON_CONFIG + bounded)
    with delegated_cgroup() as folder:
        program = python_within(folder, tmp_path / "python")
        with RocserveProcess([repository], log=tmp_path / "server.log", python=program) as server:
            server.wait_until_ready()
            workers, groups = pids(server), sorted(folder.glob("worker-*"))
            assert len(groups) == 1
            for _ in range(3):
                kill_and_wait(server)
            assert (pids(server), sorted(folder.glob("worker-*"))) == (workers, groups)
            assert server.terminate() == 0
        assert list(folder.glob("worker-*")) == []


def test_models_that_requests_loaded_and_unloaded(serve, repository: Path) -> None:
    for name in ("kept", "at_start", "asked", "gone"):
        drop(repository, name, add_constant(1.0), ADD_CONSTANT_CONFIG)
    flags = ("--model-control-mode=explicit", "--load-model=kept", "--load-model=at_start")
    server: RocserveProcess = serve(repository, *flags)
    with server.client() as client:
        client.load_model("asked")
        client.load_model("gone")
        client.unload_model("at_start")
    wait_until(lambda: len(server.workers()) == 3, "the end of the unloaded model's worker")
    shutil.rmtree(repository / "gone")
    kill_and_wait(server)
    with server.client() as client:
        ready = [name for name in ("kept", "at_start", "asked", "gone") if client.is_model_ready(name)]
    assert ready == ["kept", "asked"]
    # So does the server after that.
    kill_and_wait(server)
    with server.client() as client:
        assert client.is_model_ready("asked")
        assert not client.is_model_ready("at_start")


@pytest.mark.parametrize("flag", ["--front-ends=1", "--shared-workers=2"])
def test_more_models_than_are_loaded_at_once(serve, repository: Path, flag: str) -> None:
    """Pinned models, and models that are asked for before the next server serves, are taken over; all other workers
    end."""
    most, names = 4, [f"m{number}" for number in range(12)]
    pinned = 'parameters { key: "pinned" value { string_value: "true" } }'
    for number, name in enumerate(names):
        config = ADD_CONSTANT_CONFIG + (pinned if name == "m0" else "")
        drop(repository, name, add_constant(float(number)), config)
    server: RocserveProcess = serve(repository, f"--max-loaded-models={most}", flag, *FLAGS)

    def resident() -> int:
        return int(float(scrape(port_of(server))["rocserve_models_resident"]))

    def ask_all(seed: int) -> None:
        """Send requests without retries."""
        order = np.random.default_rng(seed).permutation(len(names)).tolist()
        assert [ask(server, names[number]) for number in order] == [[[1.0 + n, 2.0 + n]] for n in order]

    with (
        ConstantLoad(server.address, "m0", {0.0}, 2) as to_pinned,
        ConstantLoad(server.address, "m1", {1.0}, 2) as to_busy,
        ThreadPoolExecutor(2) as askers,
    ):
        for death in (1, 2):
            list(askers.map(ask_all, range(2)))
            wait_until(lambda: 2 <= resident() <= most, "the models that are loaded")
            before = server.workers()
            in_hand = [ask_in_background(server, name) for name in names]
            kill_and_wait(server)
            # It is ready when all are registered again: from then on no request is lost.
            list(askers.map(ask_all, range(2)))
            for load, constant in ((to_pinned, 0.0), (to_busy, 1.0)):
                load.wait_until_answered_by(constant, times=20)
            for thread in in_hand:
                thread.join()
            assert server.log_text.count("model 'm0' version 1 is still loaded") == death, "what is pinned"
            wait_until(lambda: len(server.workers()) <= most, "the end of the workers that nobody has taken over")
            assert set(server.workers()) & set(before), "the process of what is pinned"
            wait_until(lambda: resident() <= most, "the end of further models")
    assert to_pinned.wrong + to_busy.wrong == []
    assert {status for load in (to_pinned, to_busy) for status, _ in load.failures} <= {"StatusCode.UNAVAILABLE"}
    assert "failed to load" not in server.log_text
    family = server.family()
    assert server.terminate() == 0
    wait_until_ended(family)
