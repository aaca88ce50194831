"""Traces of the same requests, as both servers write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.parity.differences import DELIBERATE_DIFFERENCES
from support.parity.exchange import Asked, Call, Exchange, HttpCall, Local, Step, Stream
from support.parity.inference import infer, raw_input
from support.parity.models import ParityModel, add_sub_tensors, ensemble, python, step, tensor, write_model
from support.parity.pair import Pair, Paired, running_servers
from support.waiting import wait_until
from tritonclient.grpc import service_pb2 as pb

from benchmarks.triton_peer import TritonPeer

TENSORS = add_sub_tensors()
MODELS = (
    ParityModel("plain", python(TENSORS), "add_sub"),
    ParityModel("batched", python(TENSORS, more="dynamic_batching { }\n"), "add_sub"),
    ParityModel("cached", python(TENSORS, more="response_cache { enable: true }\n"), "add_sub"),
    ParityModel(
        "chain",
        ensemble(
            TENSORS,
            step("plain", {"INPUT0": "INPUT0", "INPUT1": "INPUT1"}, {"OUTPUT0": "A", "OUTPUT1": "B"}),
            step("batched", {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "OUTPUT0", "OUTPUT1": "OUTPUT1"}),
        ),
    ),
    ParityModel(
        "faults", python(tensor("input", "MODE", "STRING", [1]) + tensor("output", "OUT", "FP32", [1])), "faults"
    ),
    ParityModel(
        "repeat",
        python(
            tensor("input", "IN", "INT32", [1]) + tensor("output", "OUT", "INT32", [1]),
            0,
            "model_transaction_policy { decoupled: true }\n",
        ),
        "repeat",
    ),
)
SETTINGS = ("rate=1", "level=TIMESTAMPS", "level=TENSORS", "triton,log-frequency=1", "triton,file=<folder>/<server>")
FLAGS = (*(f"--trace-config={setting}" for setting in SETTINGS), "--load-model=*", "--cache-config=local,size=1048576")
ROW = [[3, 3, 3, 3]]


def add_sub(model: str, request_id: str, row: list[list[int]] = ROW) -> pb.ModelInferRequest:
    return infer(model, raw_input("INPUT0", row), raw_input("INPUT1", row), request_id=request_id)


def over_http(model: str, request_id: str) -> HttpCall:
    inputs = [{"name": f"INPUT{index}", "shape": [1, 4], "datatype": "INT32", "data": ROW} for index in (0, 1)]
    return HttpCall("POST", f"/v2/models/{model}/infer", json.dumps({"id": request_id, "inputs": inputs}).encode())


ASKED: dict[str, list[Step]] = {
    "grpc": [Call("ModelInfer", add_sub("plain", "grpc"))],
    "http": [over_http("plain", "http")],
    "batched": [Call("ModelInfer", add_sub("batched", "batched"))],
    "steps": [Call("ModelInfer", add_sub("chain", "steps"))],
    "miss": [Call("ModelInfer", add_sub("cached", "miss"))],
    "hit": [Call("ModelInfer", add_sub("cached", "hit", [[7, 7, 7, 7]]))] * 2,
    "failed": [Call("ModelInfer", infer("faults", raw_input("MODE", [[b"error"]], "object"), request_id="failed"))],
    "streamed": [Stream([add_sub("plain", "streamed")])],
    "many": [Stream([infer("repeat", raw_input("IN", [3]), request_id="many")])],
}
"""Request id -> the steps that cause its traces."""


def written(prefix: Path) -> dict[str, list[dict[str, Any]]]:
    """By the client's id: the traces of its requests and of the requests that they caused, each with head, timestamps
    and tensors."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        try:
            entries = json.loads(path.read_text())
        except ValueError:
            continue  # It is being written.
        by_id: dict[int, dict[str, Any]] = {}
        for entry in entries:
            trace = by_id.setdefault(entry["id"], {"moments": set(), "tensors": set()})
            if "timestamps" in entry:
                trace["moments"] |= {stamp["name"] for stamp in entry["timestamps"]}
            elif "activity" in entry:
                trace["tensors"].add(json.dumps([entry["activity"], entry["tensor"]], sort_keys=True))
            else:
                trace |= {key: value for key, value in entry.items() if key != "id"}
        for trace in by_id.values():
            trace |= {name: sorted(trace[name]) for name in ("moments", "tensors")}
            parent = by_id.get(trace.pop("parent_id", 0))
            trace["parent"] = parent and parent["model_name"]
        for trace in by_id.values():
            found.setdefault(trace["request_id"], []).append(trace)
    for traces in found.values():
        traces.sort(key=lambda trace: (trace["parent"] or "", trace["model_name"], len(trace["moments"])))
    return found


@pytest.fixture(scope="module")
def own_pair(peer: TritonPeer | None, paired: Paired, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("traces")
    repository = folder / "models"
    repository.mkdir()
    for model in MODELS:
        write_model(repository, model)
    with (
        running_servers(peer, [repository], folder, FLAGS) as servers,
        paired(servers, DELIBERATE_DIFFERENCES) as running,
    ):
        yield running


@pytest.mark.parametrize("request_id", ASKED)
def test_the_traces_of_a_request(own_pair: Pair, request_id: str) -> None:
    def traces(server: Asked) -> list[dict[str, Any]]:
        prefix = own_pair.scratch.with_name(server.name)
        wait_until(
            lambda: len(written(prefix).get(request_id, ())) >= len(ASKED[request_id]),
            f"the traces {request_id} of {server.name}",
        )
        return written(prefix)[request_id]

    steps = [*ASKED[request_id], Local(traces)]
    own_pair.compare(Exchange(f"traces: {request_id}", steps, ordered=request_id != "steps"))
