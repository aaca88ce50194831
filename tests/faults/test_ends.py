"""Every way in which a server gets the order to end, or loses its processes: nothing is left behind, and the exit
status says how it ended."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.infer_inputs import infer_input
from support.load import ConstantLoad
from support.models import add_constant, drop
from support.processes import wait_until_ended
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from support.workers import running
from tritonclient.utils import InferenceServerException

STORMS = int(os.environ.get("STORMS", "1"))
"""Ends that are tried, each at another moment of the server's first second; `STORMS=50 pytest
tests/faults/test_ends.py` tries fifty."""
PORTS = ("--grpc-port=0", "--http-port=0")

# Starts a process, writes its number next to the repository, and stays in `execute` when it gets a request.
STAYS = """
import pathlib
import subprocess
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = pathlib.Path(__file__).parents[3]
        started = subprocess.Popen(["sleep", "600"])
        (self.folder / "started.tmp").write_text(str(started.pid))
        (self.folder / "started.tmp").rename(self.folder / "started")

    def execute(self, requests):
        (self.folder / "inside").touch()
        time.sleep(600)
"""
# Starts a process whose parent ends immediately, and which ends when a file exists.
ORPHANS = """
import pathlib
import subprocess


class TritonPythonModel:
    def initialize(self, args):
        folder = pathlib.Path(__file__).parents[3]
        waits = f"while [ ! -e {folder}/end ]; do sleep 0.05; done"
        subprocess.run(["sh", "-c", f"({waits}) & echo $! > {folder}/orphan"], check=True)

    def execute(self, requests):
        raise NotImplementedError
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def ask_in_background(server: RocserveProcess, model: str, errors: list[str]) -> threading.Thread:
    def ask() -> None:
        entry = infer_input("IN", np.array([1], np.int32))
        try:
            server.client().infer(model, [entry])
        except InferenceServerException as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def rename_without_pause(repository: Path, elsewhere: Path, stop: threading.Event) -> None:
    """Rename folders all the time, so that watched folders lose their names."""
    while not stop.is_set():
        for index in range(10):
            here, other = repository / f"m{index}", repository / f"n{index}"
            first, second = elsewhere / f"{index}a", elsewhere / f"{index}b"
            for source, target in ((first, here), (here, first), (second, here), (here, other), (other, second)):
                source.rename(target)


def test_the_end_comes_through_storms_of_renames(repository: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    for index in range(10):
        for letter in "ab":
            (elsewhere / f"{index}{letter}" / "files" / "deep").mkdir(parents=True)
    drop(repository, "kept", add_constant(1.0))
    for storm in range(STORMS):
        with RocserveProcess([repository], "--repository-settle-secs=0.1", log=tmp_path / f"{storm}.log") as server:
            server.wait_until_ready()
            family = psutil.Process(server.process.pid).children(recursive=True)
            stop = threading.Event()
            renaming = threading.Thread(target=rename_without_pause, args=(repository, elsewhere, stop))
            renaming.start()
            time.sleep((1 + storm) / STORMS)
            try:
                status = server.terminate()
            finally:
                stop.set()
                renaming.join()
            assert status == 0, f"storm {storm}:\n{server.log_text}"
            wait_until(lambda log=server: "ended" in log.log_text, "the last line of the log")
            wait_until_ended(family)


def test_a_second_signal_ends_at_once_and_leaves_nothing(serve: Callable[..., RocserveProcess], repository: Path):
    drop(repository, "stays", STAYS, CONFIG)
    server = serve(repository, "--exit-timeout-secs=600")
    errors: list[str] = []
    asking = ask_in_background(server, "stays", errors)
    wait_until((repository.parent / "inside").exists, "the request in the model")
    family = psutil.Process(server.process.pid).children(recursive=True)
    started = int((repository.parent / "started").read_text())
    assert started in {process.pid for process in family}
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "finishing the work in flight" in server.log_text, "the first signal's line")
    assert server.terminate() == 1
    wait_until_ended(family)
    asking.join(PATIENCE_SECONDS)
    assert len(errors) == 1
    assert "Traceback" not in server.log_text


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server that the tests leave running."""
    repository = tmp_path_factory.mktemp("ends") / "repository"
    drop(repository, "m", add_constant(1.0))
    drop(repository, "stays", STAYS, CONFIG)
    drop(repository, "orphans", ORPHANS, CONFIG)
    return start(repository)


def test_orphans_of_workers_are_reaped(server: RocserveProcess):
    """In a container nobody else would do it."""
    folder, zygote = server.repositories[0].parent, server.zygote()
    assert zygote is not None
    orphan = psutil.Process(int((folder / "orphan").read_text()))
    wait_until(lambda: orphan.parent() == zygote, "the end of its parent")
    (folder / "end").touch()
    wait_until(lambda: not orphan.is_running(), "the orphan's end")
    assert server.client().is_model_ready("orphans")


def test_sighup_reloads_and_disturbs_nobody(server: RocserveProcess):
    zygote = server.zygote()
    assert zygote is not None
    family = [process.pid for process in (server.server_process(), zygote, *server.workers())]
    with ConstantLoad(server.address, "m", {1.0}, threads=2) as load:
        load.wait_until_answered_by(1.0)
        # Like the end of a terminal, the signal goes to all processes.
        for pid in family:
            os.kill(pid, signal.SIGHUP)
        wait_until(lambda: "SIGHUP: scanning the model repositories" in server.log_text, "the line of the log")
        load.wait_until_answered_by(1.0, times=20)
    assert load.failures == load.wrong == []
    assert all(running(pid) for pid in family)


def test_what_a_model_started_ends_with_its_worker_though_the_zygote_is_gone(server: RocserveProcess):
    started = int((server.repositories[0].parent / "started").read_text())
    (worker,) = server.workers("stays")
    zygote = worker.parent()
    assert zygote == server.zygote()
    zygote.kill()
    wait_until(lambda: "the zygote, which starts workers, has ended" in server.log_text, "the zygote's end")
    assert running(started)
    worker.kill()
    wait_until(lambda: not running(started), "the end of what the model had started")
    wait_until(lambda: server.client().is_model_ready("stays"), "the model's return")


def test_the_end_comes_though_the_folder_of_the_log_has_gone(repository: Path, tmp_path: Path):
    drop(repository, "m", add_constant(1.0))
    folder = tmp_path / "folder"
    folder.mkdir()
    log = folder / "log"
    words = [f"--model-repository={repository}", f"--log-file={log}", "--allow-metrics=false", *PORTS]
    command = [sys.executable, "-m", "rocserve.cli", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: log.exists() and "1 model served" in log.read_text(), "the start")
        shutil.rmtree(folder)
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "SIGTERM: finishing the work in flight" in errors


def test_signals_that_are_ignored_at_the_start(repository: Path, tmp_path: Path):
    """SIGHUP stays so, as under nohup; SIGCHLD hides no process's end."""
    drop(repository, "m", add_constant(1.0))
    program = tmp_path / "python"
    ignoring = (
        "import os, sys; from signal import *; signal(SIGCHLD, SIG_IGN); signal(SIGHUP, SIG_IGN);"
        " os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = shlex.join([sys.executable, "-c", ignoring, sys.executable])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    with RocserveProcess([repository], log=tmp_path / "server.log", python=str(program)) as server:
        server.wait_until_ready()
        server.server_process().send_signal(signal.SIGHUP)
        zygote = server.zygote()
        assert zygote is not None
        zygote.kill()
        wait_until(lambda: "the zygote, which starts workers, has ended (killed by signal 9)" in server.log_text)
        assert server.terminate() == 0
        assert "SIGHUP" not in server.log_text


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_a_signal_during_the_start(repository: Path, tmp_path: Path, seconds: float):
    drop(repository, "m", add_constant(1.0))
    server = RocserveProcess([repository], log=tmp_path / "server.log")
    server.begin()
    time.sleep(seconds)
    family = server.family()
    # Python itself takes a moment before it can take a signal.
    assert server.terminate() in (0, -signal.SIGTERM)
    wait_until_ended([*family, *server.family()])
    assert "Traceback" not in server.log_text


def test_a_server_without_standard_streams_serves(repository: Path, tmp_path: Path):
    drop(repository, "m", add_constant(1.0))
    log = tmp_path / "log"
    words = [f"--model-repository={repository}", f"--log-file={log}", "--allow-metrics=false", *PORTS]
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "rocserve.cli", "serve", *words]
    with subprocess.Popen(command) as process:
        wait_until(lambda: log.exists() and "1 model served" in log.read_text(), "the start")
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert "the server failed unexpectedly" not in log.read_text()
