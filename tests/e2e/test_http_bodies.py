"""HTTP bodies that are large, chunked or nonsense, or whose client has left."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import socket
from typing import Any

import numpy as np
import tritonclient.http as http_client
from support.http_requests import add_sub_body, ask, sums
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until


def test_a_large_tensor(triton_http: http_client.InferenceServerClient) -> None:
    """--http-max-input-size bounds JSON only."""
    array = np.random.default_rng(1).random((1, 1_500_000), dtype=np.float32)
    entry = http_client.InferInput("INPUT_FP32", array.shape, "FP32").set_data_from_numpy(array)
    wanted = [http_client.InferRequestedOutput("OUTPUT_FP32")]
    found = triton_http.infer("types", [entry], outputs=wanted).as_numpy("OUTPUT_FP32")
    assert np.array_equal(found, array)


def test_a_large_answer_in_json(triton_http: http_client.InferenceServerClient) -> None:
    array = np.arange(50_000, dtype=np.int32).reshape(1, -1)
    entry = http_client.InferInput("INPUT_INT32", array.shape, "INT32").set_data_from_numpy(array)
    wanted = [http_client.InferRequestedOutput("OUTPUT_INT32", binary_data=False)]
    found = triton_http.infer("types", [entry], outputs=wanted).as_numpy("OUTPUT_INT32")
    assert np.array_equal(found, array)


def test_what_is_too_large(http_server: RocserveProcess) -> None:
    path = "/v2/models/add_sub/infer"
    status, answer = ask(http_server, "POST", path, b" " * 1_000_001)
    assert (status, answer["error"]) == (
        400,
        "request JSON size of 1000001 bytes exceeds the maximum allowed input size of 1000000 bytes. Use"
        " --http-max-input-size to increase the limit.",
    )
    status, answer = ask(http_server, "POST", path, bytes(1_000_001), {"Inference-Header-Content-Length": "0"})
    assert (status, answer["error"]) == (
        400,
        "Raw input has a byte_size (1000001 bytes) that exceeds the maximum allowed value of 1000000 bytes. Use"
        " --http-max-input-size to increase the limit.",
    )
    bomb = gzip.compress(b" " * 50_000_000)
    status, answer = ask(http_server, "POST", path, bomb, {"Content-Encoding": "gzip"})
    assert (status, answer["error"]) == (
        400,
        "Decompressed data size exceeds the maximum allowed value of 1000000 bytes. Use --http-max-input-size to"
        " increase the limit.",
    )


def test_a_client_gets_a_refusal_before_it_has_sent_its_body(http_server: RocserveProcess) -> None:
    body = b" " * 1_000_001
    with socket.create_connection(("127.0.0.1", http_server.http_port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(
            b"POST /v2/models/add_sub/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400 ")
        connection.sendall(body + b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer += b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"request JSON size of 1000001 bytes exceeds" in answer
    assert b"HTTP/1.1 200 OK" in answer


def test_a_body_for_another_call_names_that_call(http_server: RocserveProcess) -> None:
    path = "/v2/models/add_sub/infer"
    status, answer = ask(http_server, "POST", path, b'{"INPUT0": [1], "INPUT1": [2]}')
    assert (status, answer["error"]) == (
        500,
        "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'; the body has the inputs as"
        " its members, the form of the generate call: send it to /v2/models/add_sub/generate",
    )
    # Small JSON is parsed at once, large JSON in another process.
    for size in (100, 500_000):
        status, answer = ask(http_server, "POST", path, b"\xff\xd8\xff\xe0" + bytes(size))
        assert status == 500
        assert answer["error"] == (
            "failed to parse the request JSON buffer: Invalid value. at 0; the body is a JPEG file, and the model takes"
            " INPUT0 INT32 [4], INPUT1 INT32 [4]"
        )


def test_a_client_that_asks_before_it_sends(http_server: RocserveProcess) -> None:
    body = json.dumps(add_sub_body()).encode()
    with socket.create_connection(("127.0.0.1", http_server.http_port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(
            b"POST /v2/models/add_sub/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_gives_up(http_server: RocserveProcess) -> None:
    def patient(wait: bool) -> bytes:
        body = {"inputs": [{"name": "WAIT", "shape": [1], "datatype": "BOOL", "data": [wait]}]}
        return json.dumps(body).encode()

    def give_up(path: str, body: bytes) -> None:
        waiting = http_server.log_text.count("waiting for a client to give up") + 1
        with socket.create_connection(("127.0.0.1", http_server.http_port)) as connection:
            connection.sendall(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
            )
            wait_until(
                lambda: http_server.log_text.count("waiting for a client to give up") == waiting, "the model's turn"
            )

    give_up("/v2/models/patient/infer", patient(True))
    give_up("/v2/models/patient/generate_stream", b'{"WAIT": true}')
    status, answer = ask(http_server, "POST", "/v2/models/patient/infer", patient(False))
    assert (status, answer["outputs"][0]["data"]) == (200, [2])


def test_a_client_that_does_not_wait_for_the_end_of_its_answer(http_server: RocserveProcess) -> None:
    array = np.zeros((1, 4_000_000), dtype=np.float32)
    entry = {"name": "INPUT_FP32", "shape": array.shape, "datatype": "FP32"}
    entry["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    with socket.create_connection(("127.0.0.1", http_server.http_port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(
            b"POST /v2/models/types/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(head), len(head) + array.nbytes, head)
        )
        connection.sendall(array.tobytes())
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
    assert ask(http_server, "GET", "/v2/health/live") == (200, {"live": True})
    assert "Traceback" not in http_server.log_text


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


def test_nonsense_is_refused_and_leaves_the_server_as_it_is(http_server: RocserveProcess) -> None:
    chance = random.Random(5)
    paths = ("models/add_sub/infer", "models/seen/generate", "models/seen/generate_stream", "repository/index")
    paths += ("systemsharedmemory/region/r/register", "cudasharedmemory/region/r/register", "trace/setting", "logging")
    paths += ("repository/models/nowhere/load", "repository/models/nowhere/unload")
    connection = http.client.HTTPConnection("127.0.0.1", http_server.http_port, timeout=PATIENCE_SECONDS)
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
    assert sums(ask(http_server, "POST", "/v2/models/add_sub/infer", add_sub_body())[1]) == [6, 7, 8, 9]
    assert "Traceback" not in http_server.log_text
