"""Traces of the same requests, as both servers write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from support.parity.models import ParityModel, add_sub_tensors, ensemble, python, step, tensor, write_model
from support.server import RocserveProcess, wait_until
from tritonclient.utils import InferenceServerException

from benchmarks.server_process import free_port
from benchmarks.triton_peer import TritonPeer

Trace = Mapping[str, Any]
ASKED = ("grpc", "http", "batched", "steps", "miss", "hit", "failed", "streamed", "many")


def write_models(repository: Path) -> None:
    tensors = add_sub_tensors()
    first = step("plain", {"INPUT0": "INPUT0", "INPUT1": "INPUT1"}, {"OUTPUT0": "A", "OUTPUT1": "B"})
    second = step("batched", {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "OUTPUT0", "OUTPUT1": "OUTPUT1"})
    many = tensor("input", "IN", "INT32", [1]) + tensor("output", "OUT", "INT32", [1])
    for model in (
        ParityModel("plain", python(tensors), "add_sub"),
        ParityModel("batched", python(tensors, more="dynamic_batching { }\n"), "add_sub"),
        ParityModel("cached", python(tensors, more="response_cache { enable: true }\n"), "add_sub"),
        ParityModel("chain", ensemble(tensors, first, second)),
        ParityModel("broken", python(tensors), "failing"),
        ParityModel("repeat", python(many, 0, "model_transaction_policy { decoupled: true }\n"), "repeat"),
    ):
        if model.script == "failing":
            folder = write_model(repository, ParityModel(model.name, model.config))
            (folder / "1" / "model.py").write_text(FAILING)
        else:
            write_model(repository, model)


FAILING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([], pb_utils.TritonError("no")) for _ in requests]
"""


def inputs(module: Any, *names: str, shape: tuple[int, ...] = (1, 4)) -> list[Any]:
    made = []
    for name in names or ("INPUT0", "INPUT1"):
        entry = module.InferInput(name, list(shape), "INT32")
        entry.set_data_from_numpy(np.full(shape, 3, np.int32))
        made.append(entry)
    return made


def send_all(grpc_address: str, http_address: str) -> None:
    """Each request with a name of ASKED as its id."""
    client = triton.InferenceServerClient(grpc_address)
    http = triton_http.InferenceServerClient(http_address)
    for model, request_id in (("plain", "grpc"), ("batched", "batched"), ("chain", "steps")):
        client.infer(model, inputs(triton), request_id=request_id)
    http.infer("plain", inputs(triton_http), request_id="http")
    for request_id in ("miss", "hit"):
        client.infer("cached", inputs(triton), request_id=request_id)
    with pytest.raises(InferenceServerException):
        client.infer("broken", inputs(triton), request_id="failed")
    ended: list[object] = []
    client.start_stream(lambda result, error: ended.append(error))
    client.async_stream_infer("plain", inputs(triton), request_id="streamed")
    client.async_stream_infer("repeat", inputs(triton, "IN", shape=(1,)), request_id="many")
    wait_until(lambda: len(ended) >= 4, what="the answers of the stream")
    client.stop_stream()
    http.close()


def written(prefix: Path) -> dict[str, list[Trace]]:
    """By the client's id: its request and those that came of it, each with its head, moments and tensors."""
    found: dict[str, list[Trace]] = {}
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        text = path.read_text()
        if not text.endswith("]"):
            continue
        by_id: dict[int, dict[str, Any]] = {}
        for entry in json.loads(text):
            trace = by_id.setdefault(entry["id"], {"moments": set(), "tensors": set()})
            if "timestamps" in entry:
                trace["moments"] |= {stamp["name"] for stamp in entry["timestamps"]}
            elif "activity" in entry:
                trace["tensors"].add((entry["activity"], *sorted(entry["tensor"].items())))
            else:
                trace |= {key: value for key, value in entry.items() if key != "id"}
        for trace in by_id.values():
            parent = by_id.get(trace.pop("parent_id", 0))
            trace["parent"] = parent and parent["model_name"]
        traces = sorted(by_id.values(), key=lambda trace: (trace["parent"] or "", trace["model_name"]))
        found[traces[0]["request_id"]] = traces
    return found


@pytest.fixture(scope="module")
def traces(triton_peer: TritonPeer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict, dict]]:
    folder = tmp_path_factory.mktemp("traces")
    repository = folder / "models"
    repository.mkdir()
    write_models(repository)

    def flags(name: str) -> list[str]:
        settings = ["rate=1", "level=TIMESTAMPS", "level=TENSORS", "triton,log-frequency=1"]
        settings.append(f"triton,file={folder / name}")
        return [*(f"--trace-config={setting}" for setting in settings), "--cache-config=local,size=1048576"]

    port, http_port = free_port(), free_port()
    fixed = ["--http-address=127.0.0.1", f"--http-port={http_port}", "--allow-metrics=false", "--exit-timeout-secs=1"]
    with (
        RocserveProcess([repository], *flags("rocserve"), log=folder / "rocserve.log") as ours,
        triton_peer.server("triton", repository, port, folder / "triton.log", [*flags("triton"), *fixed]) as theirs,
    ):
        ours.wait_until_ready()
        send_all(theirs.address, f"127.0.0.1:{http_port}")
        send_all(ours.address, ours.http_address)
        for name in ("triton", "rocserve"):
            prefix = folder / name
            wait_until(lambda prefix=prefix: set(ASKED) <= written(prefix).keys(), what=f"the traces of {name}")
        yield written(folder / "triton"), written(folder / "rocserve")


@pytest.mark.parametrize("request_id", ASKED)
def test_the_traces_of_a_request(traces: tuple[dict, dict], request_id: str) -> None:
    theirs, ours = (found[request_id] for found in traces)
    assert ours == theirs
