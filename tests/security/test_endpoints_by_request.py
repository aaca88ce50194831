"""Endpoints that clients ask for (AMD Inference Server's worker_load): which clients may, and how many endpoints there
may be."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from support.models import add_constant, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS

from rocserve.protocol import grpc_service_pb2 as pb

MODEL = "net/1/model.onnx"
MOST = 3


def ask(server: RocserveProcess, method: str, request: object) -> tuple[str, str | bytes]:
    """The status, and the text of the error or the answer's bytes."""
    with grpc.insecure_channel(server.address) as channel:
        send = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        try:
            return "OK", send(request.SerializeToString(), timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return error.code().name, error.details()


def worker_load(server: RocserveProcess, **parameters: str | int | bool) -> tuple[str, str]:
    request = pb.WorkerLoadRequest(name="onnx")
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    status, answer = ask(server, "WorkerLoad", request)
    return status, answer if isinstance(answer, str) else pb.WorkerLoadResponse.FromString(answer).endpoint


def post(server: RocserveProcess, path: str, body: object) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)) as connection:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endpoints") / "repository"
    drop(folder, "net", add_constant(1))
    return folder


@pytest.fixture(scope="module")
def bounded(start: Start, models: Path) -> RocserveProcess:
    flags = ("--allow-amd-endpoints=true", f"--max-amd-endpoints={MOST}")
    return start(models, *flags)


@pytest.fixture(scope="module")
def default(start: Start, models: Path) -> RocserveProcess:
    return start(models)


def test_by_default_no_client_starts_workers(default: RocserveProcess) -> None:
    before = len(default.workers())
    text = (
        "workers are not loaded by request; start the server with --model-control-mode=explicit, or with"
        " --allow-amd-endpoints=true"
    )
    assert worker_load(default, model=MODEL) == ("UNAVAILABLE", text)
    assert post(default, "/v2/workers/onnx/load", {"model": MODEL}) == (
        503,
        json.dumps({"error": text}, separators=(",", ":")),
    )
    assert len(default.workers()) == before
    # Reading calls still work, and so does loading what is already served.
    assert ask(default, "ModelLoad", pb.ModelLoadRequest(name="net"))[0] == "OK"
    assert ask(default, "ModelUnload", pb.ModelUnloadRequest(name="net"))[0] == "UNAVAILABLE"
    assert ask(default, "WorkerUnload", pb.WorkerUnloadRequest(name="none"))[0] == "OK"
    status, answer = ask(default, "ModelList", pb.ModelListRequest())
    assert (status, list(pb.ModelListResponse.FromString(answer).models)) == ("OK", ["net"])
    assert ask(default, "HasHardware", pb.HasHardwareRequest(name="cpu", num=1))[0] == "OK"


def test_endpoints_are_bounded_and_the_same_for_the_same_parameters(bounded: RocserveProcess) -> None:
    before = len(bounded.workers())
    assert {worker_load(bounded, model=MODEL, batch=4) for _ in range(5)} == {("OK", "onnx")}
    with ThreadPoolExecutor(8) as threads:
        others = list(threads.map(lambda batch: worker_load(bounded, model=MODEL, batch=batch), range(10, 20)))
    full = (
        "RESOURCE_EXHAUSTED",
        f"there are already {MOST} endpoints, the most allowed; unload one, or start the server with a larger"
        " --max-amd-endpoints",
    )
    assert sorted(status for status, _ in others) == ["OK"] * (MOST - 1) + ["RESOURCE_EXHAUSTED"] * (11 - MOST)
    assert {outcome for outcome in others if outcome[0] != "OK"} == {full}
    assert worker_load(bounded, model=MODEL, batch=4) == ("OK", "onnx"), "what is there is no further one"
    assert worker_load(bounded, model=MODEL, batch=4, share=False) == full, "a further instance is"
    assert len(bounded.workers()) == before + MOST
    for status, endpoint in others:
        if status == "OK":
            assert ask(bounded, "WorkerUnload", pb.WorkerUnloadRequest(name=endpoint))[0] == "OK"
    assert worker_load(bounded, model=MODEL, batch=4, share=False) == ("OK", "onnx")
    for _ in range(2):
        ask(bounded, "WorkerUnload", pb.WorkerUnloadRequest(name="onnx"))


@pytest.mark.parametrize("model", [".", "..", "/", "", "net", "net/1/.", "net/" + "x" * 300, "net\0"])
def test_what_is_no_file_is_answered_in_words(bounded: RocserveProcess, model: str) -> None:
    status, text = worker_load(bounded, model=model)
    expected = {
        "": "INVALID_ARGUMENT",
        "net\0": "INVALID_ARGUMENT",
        "..": "PERMISSION_DENIED",
        "/": "PERMISSION_DENIED",
    }
    assert status == expected.get(model, "NOT_FOUND"), text
    codes = {"NOT_FOUND": 404, "INVALID_ARGUMENT": 400, "PERMISSION_DENIED": 403}
    assert post(bounded, "/v2/workers/onnx/load", {"model": model})[0] == codes[status]
    assert "Traceback" not in bounded.log_text
