"""The HTTP front end of a real server, asked by Triton's own clients and by plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import gzip
import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.http.aio as aio_client
import tritonclient.utils.shared_memory as shared_memory
from support.metrics import FLAGS as METRICS
from support.metrics import port_of, scrape
from support.models import add_constant, drop
from support.parity.models import parity_models, write_model
from support.server import RocserveProcess, wait_until
from tritonclient.utils import InferenceServerException

PYTHON_MODELS = Path(__file__).parents[1] / "data" / "python-models"
MODELS = ("add_sub", "types", "seen", "repeat", "faults", "labelled")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """One server for the tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("http")
    repository = folder / "repository"
    repository.mkdir()
    for model in parity_models():
        if model.name in MODELS:
            write_model(repository, model)
    shutil.copytree(PYTHON_MODELS / "patient", repository / "patient")
    flags = (
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
        "--http-header-forward-pattern=^x-forwarded-.*",
        "--http-max-input-size=1000000",
        *METRICS,
    )
    with RocserveProcess([repository], *flags, log=folder / "server.log") as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def client(server: RocserveProcess) -> Iterator[http_client.InferenceServerClient]:
    with http_client.InferenceServerClient(server.http_address, concurrency=4) as asking:
        yield asking


def ask(
    server: RocserveProcess, verb: str, path: str, body: Any = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Status and body of an answer; the body as plain values where it is JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(verb, path, data or None, dict(headers or {}))
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    try:
        return response.status, json.loads(answer)
    except ValueError:
        return response.status, answer


LEFT = np.array([[1, 2, 3, 4]], dtype=np.int32)
RIGHT = np.array([[5, 5, 5, 5]], dtype=np.int32)


def add_sub_inputs(binary: bool = True) -> list[http_client.InferInput]:
    inputs = [http_client.InferInput(f"INPUT{index}", [1, 4], "INT32") for index in (0, 1)]
    for entry, array in zip(inputs, (LEFT, RIGHT), strict=True):
        entry.set_data_from_numpy(array, binary_data=binary)
    return inputs


def add_sub_body(**more: Any) -> dict[str, Any]:
    inputs = [
        {"name": f"INPUT{index}", "shape": [1, 4], "datatype": "INT32", "data": array.tolist()}
        for index, array in enumerate((LEFT, RIGHT))
    ]
    return {"inputs": inputs, **more}


def sums(answer: Any) -> list[int]:
    return next(output["data"] for output in answer["outputs"] if output["name"] == "OUTPUT0")


def test_what_there_is(client: http_client.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert client.is_model_ready("add_sub", "1")
    assert not client.is_model_ready("nowhere")
    metadata = client.get_server_metadata()
    assert metadata["name"] == "rocserve"
    assert "binary_tensor_data" in metadata["extensions"]
    assert client.get_model_metadata("add_sub", "1")["inputs"] == [
        {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 4]},
        {"name": "INPUT1", "datatype": "INT32", "shape": [-1, 4]},
    ]
    config = client.get_model_config("add_sub")
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (8, [4])
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nowhere' is not found"):
        client.get_model_metadata("nowhere")


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize(
    ("request_encoding", "response_encoding"), [(None, None), ("gzip", "deflate"), ("deflate", "gzip")]
)
def test_inference(
    client: http_client.InferenceServerClient,
    binary_in: bool,
    binary_out: bool,
    request_encoding: str | None,
    response_encoding: str | None,
) -> None:
    result = client.infer(
        "add_sub",
        add_sub_inputs(binary_in),
        outputs=[http_client.InferRequestedOutput("OUTPUT1", binary_data=binary_out)],
        request_id="seven",
        request_compression_algorithm=request_encoding,
        response_compression_algorithm=response_encoding,
    )
    assert result.as_numpy("OUTPUT1").tolist() == (LEFT - RIGHT).tolist()
    assert result.as_numpy("OUTPUT0") is None
    told = result.get_response()
    assert (told["id"], told["model_name"], told["model_version"]) == ("seven", "add_sub", "1")
    assert ("data" in told["outputs"][0]) is not binary_out


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "UINT64", "FP32", "FP64", "BYTES"])
@pytest.mark.parametrize("binary", [True, False])
def test_datatypes(client: http_client.InferenceServerClient, datatype: str, binary: bool) -> None:
    values: list[Any] = [1, 0, 1]
    if datatype == "BYTES":
        values = ["a", 'ü "\n', ""]
    array = np.array([values], dtype=np.object_ if datatype == "BYTES" else http_client.triton_to_np_dtype(datatype))
    entry = http_client.InferInput(f"INPUT_{datatype}", [1, 3], datatype)
    entry.set_data_from_numpy(array, binary_data=binary)
    wanted = http_client.InferRequestedOutput(f"OUTPUT_{datatype}", binary_data=binary)
    found = client.infer("types", [entry], outputs=[wanted]).as_numpy(f"OUTPUT_{datatype}")
    if datatype == "BYTES":
        told = [element.decode() if isinstance(element, bytes) else element for element in found.ravel()]
        assert told == values
    else:
        assert found.tolist() == array.tolist()


def test_half_precision_is_binary_only(server: RocserveProcess, client: http_client.InferenceServerClient) -> None:
    array = np.array([[0.5, 2.0]], dtype=np.float16)
    entry = http_client.InferInput("INPUT_FP16", [1, 2], "FP16").set_data_from_numpy(array)
    wanted = [http_client.InferRequestedOutput("OUTPUT_FP16")]
    assert client.infer("types", [entry], outputs=wanted).as_numpy("OUTPUT_FP16").tolist() == array.tolist()
    body = {"inputs": [{"name": "INPUT_FP16", "shape": [1, 1], "datatype": "FP16", "data": [1]}]}
    assert ask(server, "POST", "/v2/models/types/infer", body) == (
        400,
        {
            "error": "receiving FP16 data via JSON is not supported. Please use the binary data format for input"
            " INPUT_FP16"
        },
    )


def test_classification(client: http_client.InferenceServerClient) -> None:
    entry = http_client.InferInput("IN", [1, 3], "FP32")
    entry.set_data_from_numpy(np.array([[0.5, 3.0, 2.0]], dtype=np.float32))
    wanted = [http_client.InferRequestedOutput("OUT", class_count=2)]
    found = client.infer("labelled", [entry], outputs=wanted).as_numpy("OUT")
    assert found.tolist() == [[b"3.000000:1:pear", b"2.000000:2:plum"]]


def test_parameters_and_headers_reach_the_model(client: http_client.InferenceServerClient) -> None:
    entry = http_client.InferInput("IN", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))
    result = client.infer(
        "seen",
        [entry],
        request_id="r",
        sequence_id=7,
        parameters={"a": 1, "b": "x", "c": True},
        headers={"x-forwarded-user": "me", "x-other": "you"},
    )
    seen = json.loads(result.as_numpy("SEEN")[0])
    assert seen["parameters"] == {"a": 1, "b": "x", "c": True, "x-forwarded-user": "me"}
    assert (seen["request_id"], seen["correlation_id"]) == ("r", 7)


def test_a_body_without_a_head(server: RocserveProcess) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    body = np.zeros(3, np.float32).tobytes()
    status, answer = ask(server, "POST", "/v2/models/seen/infer", body, headers)
    assert status == 200
    assert b'[["IN", [3]]]' in answer


def test_many_at_once(server: RocserveProcess) -> None:
    async def run() -> None:
        async with aio_client.InferenceServerClient(server.http_address) as asking:
            inputs = [aio_client.InferInput(f"INPUT{index}", [1, 4], "INT32") for index in (0, 1)]
            for entry, array in zip(inputs, (LEFT, RIGHT), strict=True):
                entry.set_data_from_numpy(array)
            results = await asyncio.gather(*(asking.infer("add_sub", inputs, request_id=str(i)) for i in range(50)))
            assert [result.get_response()["id"] for result in results] == [str(i) for i in range(50)]
            assert all(result.as_numpy("OUTPUT0").tolist() == (LEFT + RIGHT).tolist() for result in results)

    asyncio.run(run())


def test_the_client_of_many_threads(client: http_client.InferenceServerClient) -> None:
    pending = [client.async_infer("add_sub", add_sub_inputs()) for _ in range(8)]
    for request in pending:
        assert request.get_result().as_numpy("OUTPUT0").tolist() == (LEFT + RIGHT).tolist()


def test_a_large_tensor(client: http_client.InferenceServerClient) -> None:
    """Only JSON is bound by --http-max-input-size."""
    array = np.random.default_rng(1).random((1, 1_500_000), dtype=np.float32)
    entry = http_client.InferInput("INPUT_FP32", array.shape, "FP32").set_data_from_numpy(array)
    wanted = [http_client.InferRequestedOutput("OUTPUT_FP32")]
    found = client.infer("types", [entry], outputs=wanted).as_numpy("OUTPUT_FP32")
    assert np.array_equal(found, array)


def test_a_large_answer_in_json(client: http_client.InferenceServerClient) -> None:
    array = np.arange(50_000, dtype=np.int32).reshape(1, -1)
    entry = http_client.InferInput("INPUT_INT32", array.shape, "INT32").set_data_from_numpy(array)
    wanted = [http_client.InferRequestedOutput("OUTPUT_INT32", binary_data=False)]
    found = client.infer("types", [entry], outputs=wanted).as_numpy("OUTPUT_INT32")
    assert np.array_equal(found, array)


def test_what_is_too_large(server: RocserveProcess) -> None:
    path = "/v2/models/add_sub/infer"
    status, answer = ask(server, "POST", path, b" " * 1_000_001)
    assert (status, answer["error"]) == (
        400,
        "request JSON size of 1000001 bytes exceeds the maximum allowed input size of 1000000 bytes. Use"
        " --http-max-input-size to increase the limit.",
    )
    status, answer = ask(server, "POST", path, bytes(1_000_001), {"Inference-Header-Content-Length": "0"})
    assert (status, answer["error"]) == (
        400,
        "Raw input has a byte_size (1000001 bytes) that exceeds the maximum allowed value of 1000000 bytes. Use"
        " --http-max-input-size to increase the limit.",
    )
    bomb = gzip.compress(b" " * 50_000_000)
    status, answer = ask(server, "POST", path, bomb, {"Content-Encoding": "gzip"})
    assert (status, answer["error"]) == (
        400,
        "Decompressed data size exceeds the maximum allowed value of 1000000 bytes. Use --http-max-input-size to"
        " increase the limit.",
    )
    assert ask(server, "POST", path, b"", {"Content-Encoding": "gzip"}) == (
        400,
        {"error": "nothing to be decompressed"},
    )
    assert ask(server, "POST", path, b"x", {"Content-Encoding": "br"}) == (
        501,
        {"error": "Unsupported compression type"},
    )
    status, answer = ask(server, "POST", path, b"no gzip", {"Content-Encoding": "gzip"})
    assert status == 400
    assert answer["error"].startswith("the request's body is not valid gzip or deflate data: ")


def test_bodies_that_come_piece_by_piece(server: RocserveProcess) -> None:
    body = json.dumps(add_sub_body()).encode()
    with socket.create_connection(("127.0.0.1", server.http_port)) as connection:
        head = b"POST /v2/models/add_sub/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 50):
            part = body[start : start + 50]
            connection.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        connection.sendall(b"0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert sums(json.loads(answer.partition(b"\r\n\r\n")[2])) == [6, 7, 8, 9]


def test_a_client_that_asks_before_it_sends(server: RocserveProcess) -> None:
    body = json.dumps(add_sub_body()).encode()
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as connection:
        connection.sendall(
            b"POST /v2/models/add_sub/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_system_shared_memory(client: http_client.InferenceServerClient) -> None:
    size = LEFT.nbytes
    memory = shared_memory.create_shared_memory_region("http_region", "/rocserve_test_http", 4 * size)
    try:
        shared_memory.set_shared_memory_region(memory, [LEFT, RIGHT])
        client.register_system_shared_memory("http_region", "/rocserve_test_http", 4 * size)
        told = client.get_system_shared_memory_status()
        assert told == [{"name": "http_region", "key": "/rocserve_test_http", "offset": 0, "byte_size": 4 * size}]
        inputs = [http_client.InferInput(f"INPUT{index}", [1, 4], "INT32") for index in (0, 1)]
        outputs = [http_client.InferRequestedOutput(f"OUTPUT{index}") for index in (0, 1)]
        for index in (0, 1):
            inputs[index].set_shared_memory("http_region", size, index * size)
            outputs[index].set_shared_memory("http_region", size, (2 + index) * size)
        result = client.infer("add_sub", inputs, outputs=outputs)
        told_output = result.get_output("OUTPUT0")
        assert told_output == {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 4]}
        found = shared_memory.get_contents_as_numpy(memory, np.int32, [1, 4], 2 * size)
        assert found.tolist() == (LEFT + RIGHT).tolist()
        client.unregister_system_shared_memory("http_region")
        assert client.get_system_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'http_region'"):
            client.infer("add_sub", inputs, outputs=outputs)
    finally:
        shared_memory.destroy_shared_memory_region(memory)
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException, match="failed to register CUDA shared memory region: 'c'"):
        client.register_cuda_shared_memory("c", base64.b64encode(bytes(64)), 0, 64)


def test_models_are_loaded_and_unloaded(client: http_client.InferenceServerClient) -> None:
    assert {row["name"]: row["state"] for row in client.get_model_repository_index()}["add_sub"] == "READY"
    client.unload_model("seen")
    assert not client.is_model_ready("seen")
    entry = http_client.InferInput("IN", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'seen' has no available versions"):
        client.infer("seen", [entry])
    client.load_model("seen")
    assert client.is_model_ready("seen")
    config = json.dumps({**client.get_model_config("add_sub"), "max_batch_size": 3})
    client.load_model("add_sub", config=config)
    assert client.get_model_config("add_sub")["max_batch_size"] == 3
    client.load_model("add_sub")
    with pytest.raises(
        InferenceServerException, match="failed to load 'nowhere', failed to poll from model repository"
    ):
        client.load_model("nowhere")
    given = {"backend": "onnxruntime"}
    client.load_model("given", config=json.dumps(given), files={"file:1/model.onnx": add_constant(1.0)})
    assert client.is_model_ready("given")
    client.unload_model("given", unload_dependents=True)


def test_settings_and_statistics(client: http_client.InferenceServerClient) -> None:
    client.infer("add_sub", add_sub_inputs())
    statistics = client.get_inference_statistics("add_sub")["model_stats"]
    assert statistics[0]["inference_stats"]["success"]["count"] >= 1
    assert isinstance(statistics[0]["last_inference"], int)
    assert {entry["name"] for entry in client.get_inference_statistics()["model_stats"]} >= {"add_sub", "types"}
    before = client.get_log_settings()
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert client.update_log_settings({"log_verbose_level": before["log_verbose_level"]}) == before
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings("add_sub", {"trace_rate": "5"})["trace_rate"] == "5"
    assert client.update_trace_settings("add_sub", {"trace_rate": None}) == client.get_trace_settings("add_sub")


@pytest.mark.parametrize(
    ("verb", "path", "body", "status", "text"),
    [
        ("GET", "/v2/nothing", b"", 404, "Not Found"),
        ("GET", "/v2/models/add_sub/", b"", 404, "Not Found"),
        ("GET", "/v2/models/add_sub/versions/x", b"", 404, "Not Found"),
        ("POST", "/v2", b"", 405, "Method Not Allowed"),
        ("GET", "/v2/models/add_sub/infer", b"", 405, "Method Not Allowed"),
        ("GET", "/v2/models/nowhere/ready", b"", 400, "Model version not ready"),
        ("GET", "/v2/models/nowhere/stats", b"", 400, "requested model 'nowhere' is not available"),
        ("GET", "/v2/systemsharedmemory/region/r/status", b"", 404, "Unable to find system shared memory region: 'r'"),
        (
            "POST",
            "/v2/repository/models/add_sub/load",
            {"parameters": {"other": "x"}},
            500,
            "unexpected error on creating Triton parameter",
        ),
        (
            "POST",
            "/v2/models/add_sub/infer",
            b"{",
            500,
            "failed to parse the request JSON buffer: Missing a name for object member. at 1",
        ),
        (
            "POST",
            "/v2/models/add_sub/infer",
            {},
            500,
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
        ),
        (
            "POST",
            "/v2/models/repeat/infer",
            {"inputs": []},
            501,
            "HTTP end point doesn't support models with decoupled transaction policy",
        ),
        (
            "POST",
            "/v2/models/faults/infer",
            {"inputs": [{"name": "MODE", "shape": [1], "datatype": "BYTES", "data": ["unavailable"]}]},
            503,
            "unavailable on purpose",
        ),
        (
            "POST",
            "/v2/models/repeat/generate",
            {"IN": 3},
            500,
            "generate expects model to produce exactly 1 response, use generate stream for model that generates various"
            " number of responses",
        ),
        ("POST", "/v2/models/add_sub/generate", {"INPUT0": [1, 2, 3, 4]}, 400, "expected 2 inputs but got 1 inputs"),
    ],
)
def test_errors(server: RocserveProcess, verb: str, path: str, body: Any, status: int, text: str) -> None:
    found, answer = ask(server, verb, path, body)
    assert found == status
    assert text in answer["error"]


def test_generate(server: RocserveProcess) -> None:
    assert ask(server, "POST", "/v2/models/repeat/generate", {"IN": 1, "id": "a"}) == (
        200,
        {"OUT": 0, "id": "a", "model_name": "repeat", "model_version": "1"},
    )
    status, answer = ask(server, "POST", "/v2/models/seen/generate", {"parameters": {"IN": [1.5, 2], "x": True}})
    assert status == 200
    assert json.loads(answer["SEEN"])["parameters"] == {"x": True}


def test_generate_streams(server: RocserveProcess) -> None:
    status, answer = ask(server, "POST", "/v2/models/repeat/generate_stream", {"IN": -2})
    assert status == 200
    assert [json.loads(event.removeprefix("data: ")) for event in answer.decode().split("\n\n")[:-1]] == [
        {"OUT": 0, "model_name": "repeat", "model_version": "1"},
        {"OUT": 1, "model_name": "repeat", "model_version": "1"},
        {"error": "no more after 2"},
    ]


def test_a_client_that_gives_up(server: RocserveProcess) -> None:
    def patient(wait: bool) -> bytes:
        body = {"inputs": [{"name": "WAIT", "shape": [1], "datatype": "BOOL", "data": [wait]}]}
        return json.dumps(body).encode()

    def give_up(path: str, body: bytes) -> None:
        waiting = server.log_text.count("waiting for a client to give up") + 1
        with socket.create_connection(("127.0.0.1", server.http_port)) as connection:
            connection.sendall(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
            )
            wait_until(
                lambda: server.log_text.count("waiting for a client to give up") == waiting, what="the model's turn"
            )

    give_up("/v2/models/patient/infer", patient(True))
    give_up("/v2/models/patient/generate_stream", b'{"WAIT": true}')
    status, answer = ask(server, "POST", "/v2/models/patient/infer", patient(False))
    assert (status, answer["outputs"][0]["data"]) == (200, [2])


def test_a_client_that_does_not_wait_for_the_end_of_its_answer(server: RocserveProcess) -> None:
    array = np.zeros((1, 4_000_000), dtype=np.float32)
    entry = {"name": "INPUT_FP32", "shape": array.shape, "datatype": "FP32"}
    entry["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as connection:
        connection.sendall(
            b"POST /v2/models/types/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(head), len(head) + array.nbytes, head)
        )
        connection.sendall(array.tobytes())
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
    assert ask(server, "GET", "/v2/health/live") == (200, b"")
    assert "Traceback" not in server.log_text


def test_what_is_no_http_leaves_the_server_as_it_is(server: RocserveProcess) -> None:
    for nonsense in (
        b"\x16\x03\x01\x00\r\n\r\n",
        b"GET /v2\r\n",
        b"POST /v2 HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"\r\n" * 50,
    ):
        with socket.create_connection(("127.0.0.1", server.http_port)) as connection:
            connection.sendall(nonsense)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(20)
            connection.recv(65536)
    assert ask(server, "GET", "/v2/health/live") == (200, b"")
    assert "Traceback" not in server.log_text


VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**32,
    2**64,
    1.5,
    "",
    "x",
    "\ud800",
    "\0",
    [],
    {},
    [1, 2, 3, 4],
    ["a"],
    [[]],
)
WORDS = (
    "id",
    "inputs",
    "outputs",
    "parameters",
    "name",
    "shape",
    "datatype",
    "data",
    "binary_data_size",
    "binary_data",
)
WORDS += ("shared_memory_region", "sequence_id", "timeout", "key", "offset", "byte_size", "ready", "raw_handle", "b64")
WORDS += ("INPUT0", "IN", "trace_rate", "log_format", "classification", "file:../x")


def nonsense(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random() if depth < 4 else 1.0
    if kind < 0.4:
        return {chance.choice(WORDS): nonsense(chance, depth + 1) for _ in range(4)}
    if kind < 0.6:
        return [nonsense(chance, depth + 1) for _ in range(3)]
    return chance.choice(VALUES)


def test_nonsense_is_refused_and_leaves_the_server_as_it_is(server: RocserveProcess) -> None:
    chance = random.Random(5)
    paths = ("models/add_sub/infer", "models/seen/generate", "models/seen/generate_stream", "repository/index")
    paths += ("systemsharedmemory/region/r/register", "cudasharedmemory/region/r/register", "trace/setting", "logging")
    paths += ("repository/models/nowhere/load", "repository/models/nowhere/unload")
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20)
    for number in range(400):
        data = bytearray(json.dumps(nonsense(chance)).encode())
        if number % 4 == 0:
            data[chance.randrange(len(data))] = chance.randrange(256)
        headers = (
            {"Inference-Header-Content-Length": chance.choice(["5", "-1", "x", "9" * 30])} if number % 5 == 0 else {}
        )
        connection.request("POST", f"/v2/{paths[number % len(paths)]}", bytes(data), headers)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200 or json.loads(body)["error"]
    connection.close()
    assert sums(ask(server, "POST", "/v2/models/add_sub/infer", add_sub_body())[1]) == [6, 7, 8, 9]
    assert "Traceback" not in server.log_text


def test_metrics_are_served_beside(server: RocserveProcess) -> None:
    assert any(name.startswith("nv_inference_request_success") for name in scrape(port_of(server)))


def test_http_alone_and_restricted(serve: Any, repository: Path) -> None:
    drop(repository, "a", add_constant(1.0))
    server: RocserveProcess = serve(
        repository,
        flags=(
            "--allow-grpc=false",
            "--http-restricted-api=model-repository,statistics:admin-key=secret",
            "--http-restricted-api=logging:other=x",
        ),
    )
    assert "GRPCInferenceService" not in server.log_text
    wait_until(lambda: ask(server, "GET", "/v2/health/ready")[0] == 200, what="readiness")
    refusal = 403, {"error": "This API is restricted, expecting header 'admin-key'"}
    assert ask(server, "POST", "/v2/repository/index") == refusal
    assert ask(server, "GET", "/v2/models/a/stats", headers={"admin-key": "wrong"}) == refusal
    assert ask(server, "GET", "/v2/logging", headers={"admin-key": "secret"})[0] == 403
    status, rows = ask(server, "POST", "/v2/repository/index", headers={"Admin-Key": "secret"})
    assert (status, rows) == (200, [{"name": "a", "version": "1", "state": "READY"}])
    assert ask(server, "GET", "/v2/models/a")[0] == 200


def test_grpc_alone(serve: Any, repository: Path) -> None:
    server: RocserveProcess = serve(repository, flags=("--allow-http=false",))
    assert grpc_client.InferenceServerClient(server.address).is_server_live()
    assert "HTTPService" not in server.log_text


def test_requests_in_hand_are_finished_at_the_end(serve: Any, repository: Path) -> None:
    shutil.copytree(PYTHON_MODELS / "patient", repository / "patient")
    server: RocserveProcess = serve(repository, flags=("--exit-timeout-secs=30",))
    server.wait_until_ready()
    answers: list[tuple[int, Any]] = []
    body = {"inputs": [{"name": "WAIT", "shape": [1], "datatype": "BOOL", "data": [False]}]}
    # A client whose request is under way, and one whose connection is open.
    idle = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20)
    idle.request("GET", "/v2/health/ready")
    assert idle.getresponse().read() == b""
    sending = socket.create_connection(("127.0.0.1", server.http_port), timeout=20)
    data = json.dumps(body).encode()
    sending.sendall(b"POST /v2/models/patient/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data))
    time.sleep(0.2)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "finishing the work in hand" in server.log_text, what="the end's beginning")
    idle.request("POST", "/v2/models/patient/infer", data)
    answer = idle.getresponse()
    answers.append((answer.status, json.loads(answer.read())))
    assert answers == [(503, {"error": "Server exiting"})]
    sending.sendall(data)
    assert sending.recv(65536).startswith(b"HTTP/1.1 503")
    assert server.process.wait(20) == 0


def test_a_taken_port_is_said(serve: Any, repository: Path) -> None:
    server: RocserveProcess = serve(repository)
    command = [sys.executable, "-m", "rocserve.cli", "serve", f"--model-repository={repository}", "--allow-grpc=false"]
    command += ["--allow-metrics=false", "--http-address=127.0.0.1", f"--http-port={server.http_port}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert (
        f"cannot serve HTTP at 127.0.0.1:{server.http_port}: Address already in use; name another with --http-port, or"
        " switch HTTP off with --allow-http=false" in result.stderr
    )
