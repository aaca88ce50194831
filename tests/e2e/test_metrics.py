"""The metrics endpoint of a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from support.metrics import FLAGS, port_of, scrape
from support.models import add_constant, drop
from support.server import RocserveProcess, wait_until
from tritonclient.utils import InferenceServerException


def ask(client: triton.InferenceServerClient, shape: list[int]) -> None:
    entry = triton.InferInput("X", shape, "FP32")
    entry.set_data_from_numpy(np.ones(shape, np.float32))
    client.infer("m", [entry])


def test_requests_are_counted(serve, repository: Path) -> None:
    drop(repository, "m", add_constant(1.0))
    server: RocserveProcess = serve(repository, flags=FLAGS)
    server.wait_until_ready()
    client, port = server.client(), port_of(server)
    for _ in range(3):
        ask(client, [2, 2])
    try:
        ask(client, [1, 3])
    except InferenceServerException:
        pass
    # The numbers are written after the answers have gone.
    wait_until(lambda: scrape(port)['nv_inference_request_success{model="m",version="1"}'] == "3", what="the count")
    samples = scrape(port)
    labels = '{model="m",version="1"}'
    assert samples[f"nv_inference_count{labels}"] == "6"
    assert samples[f"nv_inference_exec_count{labels}"] == "3"
    assert samples['nv_inference_request_failure{model="m",version="1",reason="OTHER"}'] == "1"
    assert samples[f"nv_inference_pending_request_count{labels}"] == "0"
    assert int(samples[f"nv_inference_request_duration_us{labels}"]) > 0
    assert float(samples[f"nv_model_load_duration_secs{labels}"]) > 0
    assert samples['rocserve_model_engine_info{model="m",version="1",engine="onnxruntime",replaces=""}'] == "1"


def test_models_come_and_go(serve, repository: Path) -> None:
    folder = drop(repository, "m", add_constant(1.0))
    server: RocserveProcess = serve(repository, flags=(*FLAGS, "--model-control-mode=explicit"))
    port = port_of(server)
    assert not any('model="m"' in name for name in scrape(port))
    client = server.client()
    client.load_model("m")
    assert any('model="m"' in name for name in scrape(port))
    client.unload_model("m")
    wait_until(lambda: not any('model="m"' in name for name in scrape(port)), what="the end of the model's numbers")
    assert folder.is_dir()


def test_a_taken_port_is_said(serve, repository: Path) -> None:
    server: RocserveProcess = serve(repository, flags=FLAGS)
    port = port_of(server)
    command = [sys.executable, "-m", "rocserve.cli", "serve", f"--model-repository={repository}", "--grpc-port=0"]
    result = subprocess.run(
        [*command, "--allow-http=false", "--metrics-address=127.0.0.1", f"--metrics-port={port}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert (
        f"cannot serve metrics at 127.0.0.1:{port}: Address already in use; name another with --metrics-port, or switch"
        " metrics off with --allow-metrics=false" in result.stderr
    )


def test_without_metrics(serve, repository: Path) -> None:
    server: RocserveProcess = serve(repository, flags=("--allow-metrics=false",))
    server.wait_until_ready()
    assert "Metrics Service" not in server.log_text
