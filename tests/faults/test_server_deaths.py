"""The server's process dies: another takes its place, and clients only see their connections break."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.load import ConstantLoad
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.server import RocserveProcess, wait_until
from tritonclient.utils import InferenceServerException

DEATHS = 5
MOST_SUPERVISOR_BYTES = 15 << 20


def kill_and_wait(server: RocserveProcess, number: int = signal.SIGKILL) -> float:
    """Seconds until it is ready again."""
    killed = server.server_process()
    began = time.monotonic()
    killed.send_signal(number)
    killed.wait(10)
    wait_until(lambda: is_ready(server), 30, f"readiness; the log says:\n{server.log_text}")
    assert server.server_process() != killed
    return time.monotonic() - began


def is_ready(server: RocserveProcess) -> bool:
    with server.client() as client, suppress(InferenceServerException):
        return bool(client.is_server_ready())
    return False


@pytest.mark.parametrize("front_ends", [0, 2])
def test_deaths_under_load(serve, repository: Path, front_ends: int) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository, f"--front-ends={front_ends}")
    ports = server.port, server.http_port
    with ConstantLoad(server.address, "m", {1.0}) as load:
        for death in range(DEATHS):
            load.wait_until_answered_by(1.0, times=20)
            took = kill_and_wait(server, signal.SIGSEGV if death % 2 else signal.SIGKILL)
            print(f"ready again after {took:.2f} s")
        load.wait_until_answered_by(1.0, times=20)
    assert (server.port, server.http_port) == ports
    assert load.wrong == []
    assert {status for status, _ in load.failures} == {"StatusCode.UNAVAILABLE"}
    assert "the server's process was killed by SIGSEGV" in server.log_text
    assert server.process is not None
    assert psutil.Process(server.process.pid).memory_info().rss < MOST_SUPERVISOR_BYTES
    assert server.terminate() == 0


def test_all_end_with_a_killed_supervisor(serve, repository: Path) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository, "--front-ends=1")
    kill_and_wait(server)
    family = server.family()
    assert len(family) >= 4
    server.kill()
    assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_the_end_while_another_is_being_started(serve, repository: Path, seconds: float) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository)
    family = server.family()
    server.server_process().kill()
    time.sleep(seconds)
    # The signal may come before the supervisor knows of the death: then that is what the server ended with.
    assert server.terminate() in (0, 128 + signal.SIGKILL)
    assert psutil.wait_procs([*family, *server.family()], timeout=5)[1] == []


def test_a_third_signal_ends_it_whatever_it_is_doing(serve, repository: Path) -> None:
    server: RocserveProcess = serve(repository)
    family = server.family()
    server.server_process().suspend()
    assert server.process is not None
    for _ in range(3):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert server.process.wait(5) == -signal.SIGTERM
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_a_death_before_it_serves_is_the_end(repository: Path) -> None:
    command = [sys.executable, "-m", "rocserve.cli", "serve", f"--model-repository={repository}", "--grpc-port=0"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        supervisor = psutil.Process(process.pid)
        wait_until(supervisor.children, 10, "the server's process")
        supervisor.children()[0].kill()
        assert process.wait(10) == 128 + signal.SIGKILL


def test_a_model_that_was_broken_since_keeps_no_other_from_being_served(serve, repository: Path) -> None:
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server: RocserveProcess = serve(repository, "--exit-on-error=true", "--strict-readiness=false")
    drop(repository, "broken", b"no ONNX")
    wait_until(lambda: "failed to load 'broken'" in server.log_text, 20, "the failed load")
    kill_and_wait(server)
    with ConstantLoad(server.address, "m", {1.0}, 1) as load:
        load.wait_until_answered_by(1.0)
