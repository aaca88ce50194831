"""The server's start and end, health watches, explicit control, and flags."""

from __future__ import annotations

import itertools
import queue
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support import http_requests
from support.gated_models import drop_gated, waiting
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

from rocserve.cli import main


def ask(client: triton.InferenceServerClient, model: str, version: str = "") -> list[float]:
    entry = infer_input("X", np.array([[1, 2]], np.float32))
    return client.infer(model, [entry], model_version=version).as_numpy("Y")[0].tolist()


@pytest.mark.parametrize("whole_group", [False, True])
def test_loads_are_refused_and_sigterm_finishes_the_work_in_hand(serve, repository: Path, whole_group: bool):
    """The folders decide about loads. An open stream does not hold the end up."""
    gate = drop_gated(repository)
    drop(repository, "m", add_constant(1.0))
    server = serve(repository, flags=("--model-control-mode=poll", "--exit-timeout-secs=600"))
    server.wait_until_ready()
    client = server.client()
    refusal = "explicit model load / unload is not allowed if polling is enabled"
    for call, name in itertools.product((client.load_model, client.unload_model), ("m", "nowhere")):
        with pytest.raises(InferenceServerException) as raised:
            call(name)
        assert (raised.value.status(), raised.value.message()) == ("StatusCode.UNAVAILABLE", refusal)
    for verb in ("load", "unload"):
        answer = http_requests.ask(server, "POST", f"/v2/repository/models/m/{verb}", {})
        assert answer == (503, {"error": refusal})
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error))
    client.async_stream_infer("m", [infer_input("X", np.ones((1, 2), np.float32))])
    assert answers.get(timeout=PATIENCE_SECONDS) is None
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, server.client(), "gated") for _ in range(4)]
        wait_until(lambda: waiting(server) == 3, "one request that runs, and those that wait")
        server.begin_end(whole_group)
        gate.touch()
        assert server.process.wait(PATIENCE_SECONDS) == 0
        assert [one.result() for one in asked] == [[1, 2]] * 4
    assert "ended" in server.log_text


def test_switched_off_subjects_are_fine(serve, repository: Path):
    drop(repository, "a", add_constant(1.0))
    flags = ("--allow-http=false", "--http-port=8080", "--allow-metrics=false", "--metrics-port=9000")
    server = serve(repository, flags=flags)
    server.wait_until_ready()
    assert ask(server.client(), "a") == [2.0, 3.0]
    assert not any(service in server.log_text for service in ("HTTPService", "Metrics Service"))


def test_the_effective_config_is_printed(repository: Path, capsys: pytest.CaptureFixture[str]):
    folder = drop(repository, "m", add_constant(1.0))
    assert main(["config", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert 'platform: "onnx_onnxv1"' in printed
    assert "max_batch_size: 64" in printed
    (folder / "config.pbtxt").write_text("max_batchsize: 3")
    assert main(["config", str(folder)]) == 1
    assert "max_batchsize" in capsys.readouterr().err


def test_the_service_manager_hears_of_start_life_changes_and_end(repository: Path, tmp_path: Path):
    drop(repository, "a", add_constant(1.0))
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{folder}/notify")
        manager.settimeout(PATIENCE_SECONDS)
        lines: list[str] = []

        def wait_for(line: str) -> None:
            while line not in lines:
                lines.extend(manager.recv(4096).decode().splitlines())

        # Signs of life each second.
        environment = {"NOTIFY_SOCKET": f"{folder}/notify", "WATCHDOG_USEC": "3000000"}
        log = tmp_path / "server.log"
        with RocserveProcess([repository], "--exit-timeout-secs=600", log=log, environment=environment) as server:
            wait_for("READY=1")
            assert lines[0].startswith("EXTEND_TIMEOUT_USEC=")
            wait_for("STATUS=1 model served")
            drop(repository, "b", add_constant(1.0))
            wait_for("STATUS=2 models served")
            lines.clear()
            wait_for("WATCHDOG=1")
            server.begin_end()
            wait_for("STOPPING=1")
            wait_for("EXTEND_TIMEOUT_USEC=615000000")
            assert server.process.wait(PATIENCE_SECONDS) == 0
        manager.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                lines.extend(manager.recv(4096).decode().splitlines())
        last = lines[lines.index("STOPPING=1") :]
        assert [line for line in last if line.startswith("STATUS=")] == ["STATUS=finishing the work in flight"]
