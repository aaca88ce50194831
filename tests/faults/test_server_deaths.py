"""The server's process dies: all that it has started ends with it, and the next server serves the same models."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from support.infer_inputs import infer_input
from support.load import ConstantLoad
from support.models import ADD_CONSTANT_CONFIG, add_constant, answering, drop
from support.processes import command_of
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

VALUES = np.array([[1.0, 2.0]], np.float32)
PYTHON_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 1, 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 2 ] }
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
# Starts a process, and at its first request stays for minutes in code that does not release the GIL.
STUCK = """
import ctypes
import pathlib
import subprocess

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.child = subprocess.Popen(["sleep", "600"])

    def execute(self, requests):
        (pathlib.Path(__file__).parents[3] / "inside").touch()
        ctypes.PyDLL(None).sleep(600)
"""


def ask(server: RocserveProcess, model: str) -> list[list[float]]:
    with server.client() as client:
        return client.infer(model, [infer_input("X", VALUES)]).as_numpy("Y").tolist()


def ask_in_background(server: RocserveProcess, model: str) -> None:
    def run() -> None:
        with suppress(InferenceServerException):
            ask(server, model)

    threading.Thread(target=run, daemon=True).start()


def test_deaths_under_load(serve, repository: Path) -> None:
    """Nothing stays of the server; clients lose the requests in flight, and no more once the next server listens."""
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop(repository, "python", answering("X", "Y", "x + 2"), PYTHON_CONFIG)
    drop(repository, "chain", None, CHAIN)
    drop(repository, "stuck", STUCK, PYTHON_CONFIG)
    server: RocserveProcess = serve(repository, "--front-ends=1", "--shared-workers=1", "--listen-when-loaded")
    ports = (server.port, server.http_port)
    ask_in_background(server, "stuck")
    wait_until((repository.parent / "inside").exists, "the request in the model")
    with ExitStack() as running:
        loads = [
            (running.enter_context(ConstantLoad(server.address, model, {constant}, 2, pause_seconds=0.0)), constant)
            for model, constant in (("m", 1.0), ("python", 2.0), ("chain", 3.0))
        ]
        for load, constant in loads:
            load.wait_until_answered_by(constant, times=20)
        family = server.family()
        assert server.zygote() in family and len(server.workers()) == 3
        assert any(command_of(process) == "sleep 600" for process in family)
        # Waits for the end of the whole family. Tensors lie in files without a name, which end with the last process
        # that has them. The next server listens on the same ports.
        server.restart(signal.SIGSEGV)
        for load, constant in loads:
            load.wait_until_answered_by(constant, times=20)
    assert (server.port, server.http_port) == ports
    assert [wrong for load, _ in loads for wrong in load.wrong] == []
    assert {status for load, _ in loads for status, _ in load.failures} == {"StatusCode.UNAVAILABLE"}
    assert server.terminate() == 0


def test_the_next_server_begins_with_the_repository_and_its_flags(serve, repository: Path) -> None:
    """It has what is in the files now, and not what requests have loaded or unloaded."""
    for name in ("named", "changed", "asked"):
        drop(repository, name, add_constant(1.0), ADD_CONSTANT_CONFIG)
    flags = ("--model-control-mode=explicit", "--load-model=named", "--load-model=changed")
    server: RocserveProcess = serve(repository, *flags)
    with server.client() as client:
        client.load_model("asked")
        client.unload_model("named")
    drop(repository, "changed", add_constant(2.0), ADD_CONSTANT_CONFIG)
    server.restart()
    server.wait_until_ready()
    assert [ask(server, name) for name in ("named", "changed")] == [[[2.0, 3.0]], [[3.0, 4.0]]]
    with server.client() as client:
        assert not client.is_model_ready("asked")
