"""The log of a real server: its lines, and its settings changed by Triton's own clients."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from support.http2 import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, head
from support.infer_inputs import infer_input
from support.models import add_constant, answering, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

SECRET = 1234.5
DETAILS_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 2 }
output { name: "Y" data_type: TYPE_FP32 dims: 2 }
"""
DETAILS = answering("X", "Y", first="pb_utils.Logger.log_verbose('a detail')\npb_utils.Logger.log_info('a word')")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """The last test of it ends it."""
    folder = tmp_path_factory.mktemp("log")
    drop(folder / "repository", "m", add_constant(1.0))
    environment = {"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "1"}
    with RocserveProcess([folder / "repository"], log=folder / "log", environment=environment) as running:
        running.wait_until_ready()
        wait_for(running, '"1 model served"')  # The last line of the start.
        yield running


def wait_for(server: RocserveProcess, text: str) -> None:
    """Wait for a whole line with the text. Lines may be written after their request is answered."""
    wait_until(lambda: any(text in line for line in server.log_text.split("\n")[:-1]), f"the line: {text}")


def ask(server: RocserveProcess, shape: tuple[int, ...] = (1, 2), model: str = "m", **options: object) -> None:
    server.client().infer(model, [infer_input("X", np.full(shape, SECRET, np.float32))], **options)


def test_lines_are_tritons(server: RocserveProcess) -> None:
    pattern = re.compile(r'[IWE]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \w+\.py:\d+\] "(?:[^"\\]|\\.)*"')
    lines = server.log_text.splitlines()
    assert any("Started GRPCInferenceService at " in line for line in lines)
    assert [line for line in lines if not pattern.fullmatch(line)] == []


def test_the_verbose_log_has_a_line_for_each_request(server: RocserveProcess) -> None:
    client = server.client()
    ask(server, request_id="before")
    client.update_log_settings({"log_verbose_level": 1})
    ask(server, request_id="told")
    wait_for(server, "[request id: told] inference of model 'm' version 1 ends")
    with pytest.raises(InferenceServerException):
        ask(server, (1, 3), request_id="wrong")
    wait_for(server, "[request id: wrong] inference of model 'm' ends")
    empty = triton.InferInput("X", [1, 2], "FP32")
    with pytest.raises(InferenceServerException):
        client.infer("m", [empty], request_id="empty")
    wait_for(server, "[request id: empty]")
    refused = {"id": "refused", "inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": ["a", "b"]}]}
    connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE_SECONDS)
    connection.request("POST", "/v2/models/m/infer", json.dumps(refused))
    assert connection.getresponse().status == 500
    connection.close()
    wait_for(server, "[request id: refused]")
    ask(server)
    wait_for(server, "[request id: <id_unknown>] inference of model 'm' version 1 ends")
    client.update_log_settings({"log_verbose_level": 0})
    ask(server, request_id="after")
    messages = [line.partition('] "')[2] for line in server.log_text.splitlines() if "[request id: " in line]
    assert [re.sub(r"\d+\.\d{3} ms", "_ ms", line) for line in messages] == [
        "[request id: told] inference of model 'm' begins: X FP32 [1, 2]\"",
        "[request id: told] inference of model 'm' version 1 ends: OK after _ ms\"",
        "[request id: wrong] inference of model 'm' begins: X FP32 [1, 3]\"",
        "[request id: wrong] inference of model 'm' ends: INVALID_ARGUMENT after _ ms: unexpected shape for input 'X'"
        " for model 'm'. Expected [-1,2], got [1,3]. \"",
        "[request id: empty] inference is refused: INVALID_ARGUMENT: unable to find data for input tensor 'X'"
        " for model 'm' in request.\"",
        "[request id: refused] inference is refused: INTERNAL: Unable to parse 'data': attempt to access JSON"
        ' non-number as double"',
        "[request id: <id_unknown>] inference of model 'm' begins: X FP32 [1, 2]\"",
        "[request id: <id_unknown>] inference of model 'm' version 1 ends: OK after _ ms\"",
    ]
    assert str(SECRET) not in server.log_text


def test_the_form_and_the_levels_are_changed_at_once(server: RocserveProcess) -> None:
    http = triton_http.InferenceServerClient(server.http_address)
    assert http.get_log_settings() == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    changed = http.update_log_settings({"log_format": "ISO8601", "log_verbose_level": 1})
    assert (changed["log_format"], changed["log_verbose_level"]) == ("ISO8601", 1)
    http.close()
    ask(server, request_id="iso")
    # Its last line is written concurrently with its answer. The test waits for it, so that it is not taken for a line
    # of the next request.
    line = (
        r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ \w+\.py:\d+\]"
        r""" "\[request id: iso\] inference of model 'm' version 1 ends"""
    )
    wait_until(lambda: re.search(line, server.log_text, re.MULTILINE), "a line in the other form")
    server.client().update_log_settings({"log_verbose_level": 0, "log_info": False})
    length = len(server.log_text)
    ask(server)
    assert server.terminate() == 0
    assert server.log_text[length:] == ""


@pytest.fixture(scope="module")
def explicit(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """The last test of it ends it."""
    repository = tmp_path_factory.mktemp("explicit")
    drop(repository, "details", DETAILS, DETAILS_CONFIG)
    return start(repository, "--model-control-mode=explicit", "--load-model=details")


def test_the_verbose_log_has_details_of_a_running_model(explicit: RocserveProcess) -> None:
    server = explicit
    client = server.client()
    numbers = itertools.count()

    def words() -> list[str]:
        request_id = str(next(numbers))
        ask(server, model="details", request_id=request_id)
        prefix = f"details:1: [request id: {request_id}] "
        wait_until(lambda: f"{prefix}a word" in server.log_text, "the model's word")
        return [line.partition(prefix)[2] for line in server.log_text.splitlines() if prefix in line]

    assert words() == ["a word"]
    client.update_log_settings({"log_verbose_level": 1})
    # It is written outside of the request.
    wait_until(lambda: words() == ["a detail", "a word"], "the model's detail")
    (worker,) = server.workers()
    worker.kill()
    wait_until(lambda: "has a worker again" in server.log_text, "another worker")
    assert words() == ["a detail", "a word"]
    client.update_log_settings({"log_verbose_level": 0})
    wait_until(lambda: words() == ["a word"], "the end of the details")


def test_a_file_that_is_rotated(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "rocserve.log"
    command = [
        sys.executable,
        "-m",
        "rocserve.cli",
        "serve",
        f"--model-repository={repository}",
        "--allow-metrics=false",
    ]
    ports = ["--grpc-port=0", "--http-port=0", "--grpc-address=127.0.0.1", "--http-address=127.0.0.1"]
    with subprocess.Popen([*command, *ports, f"--log-file={file}"], stderr=subprocess.PIPE, text=True) as process:
        try:
            started = "Started GRPCInferenceService"
            wait_until(lambda: file.exists() and started in file.read_text(), "the start in the file")
            file.rename(tmp_path / "rocserve.log.1")
        finally:
            process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert started in (tmp_path / "rocserve.log.1").read_text()
    assert file.read_text().endswith('"ended"\n')


JSON_MODEL = answering(
    "X",
    "Y",
    first="""import os
print("printed", flush=True)
pb_utils.Logger.log_warn("warned")
if requests[0].request_id() == "crash":
    os._exit(3)""",
)
KNOWN = {
    "time", "level", "logger", "process", "place", "text", "part", "traceback", "model", "version", "request_id",
    "client", "code", "duration_ms", "responses", "worker", "front_end",
}  # fmt: skip


def test_a_long_name_is_cut(explicit: RocserveProcess) -> None:
    running, client = explicit, explicit.client()
    client.update_log_settings({"log_verbose_level": 1})
    name, request_id = "n" * 50_000, "i" * 50_000
    with pytest.raises(InferenceServerException):
        ask(running, model=name, request_id=request_id)
    with pytest.raises(InferenceServerException):
        client.load_model(name)
    client.unload_model(name)
    for path in (f"{name}/infer", f"{name}/versions/1/infer", f"{name}/generate"):
        connection = http.client.HTTPConnection(running.http_address, timeout=PATIENCE_SECONDS)
        connection.request("POST", f"/v2/models/{path}", json.dumps({"id": request_id, "inputs": []}))
        assert connection.getresponse().status >= 400
        connection.close()
    wait_for(running, f"[request id: {'i' * 255}... (50000 characters)] inference of model '{'n' * 255}... (50000")
    assert running.terminate() == 0
    assert max(map(len, running.log_text.splitlines())) < 3000


def test_all_lines_are_json_with_fields(serve: Any, repository: Path) -> None:
    """Those of the server, its workers and front ends, and of a worker that crashes."""
    drop(repository, "m", JSON_MODEL, DETAILS_CONFIG)
    running = serve(repository, flags=("--log-format=json", "--log-verbose=1", "--front-ends=1"))
    running.wait_until_ready()
    ask(running, request_id="seven")
    with pytest.raises(InferenceServerException):
        ask(running, model="nowhere", request_id="eight")
    with pytest.raises(InferenceServerException):
        ask(running, request_id="crash")
    wait_until(lambda: "has a worker again" in running.log_text, "the worker's restart")
    assert running.terminate() == 0
    lines = [json.loads(line) for line in running.log_text.splitlines()]
    assert running.printed == ""
    assert {name for line in lines for name in line} <= KNOWN

    def find(text: str, **fields: object) -> dict[str, Any]:
        found = [line for line in lines if text in line["text"] and fields.items() <= line.items()]
        assert found, (text, fields, [line for line in lines if text in line["text"]])
        return found[0]

    loaded = find("successfully loaded 'm' version 1", model="m", version="1", level="DEBUG")
    assert loaded["duration_ms"] > 0
    ended = find("ends: OK", model="m", version="1", request_id="seven", code="OK")
    assert ended["duration_ms"] > 0
    assert "127.0.0.1" in ended["client"]
    find("begins: X FP32", model="m", request_id="seven")
    find("ends: NOT_FOUND", model="nowhere", request_id="eight", code="NOT_FOUND")
    warned = find("warned", model="m", version="1", request_id="seven", level="WARNING")
    assert find("printed", model="m", version="1", worker=warned["worker"])["level"] == "INFO"
    find("it is being restarted", model="m", version="1", level="ERROR")
    find("has a worker again", model="m", version="1")
    find("front end 0: ", front_end=0)


def test_grpcs_own_errors_are_not_among_lines_of_json(
    serve: Any, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    drop(repository, "m", JSON_MODEL, DETAILS_CONFIG)
    running = serve(repository, flags=("--log-format=json",))
    running.wait_until_ready()
    literal = b"\x00\x0cgrpc-timeout\x01x"
    sent = PREFACE + frame(SETTINGS, 0, 0, b"")
    sent += frame(HEADERS, END_HEADERS | END_STREAM, 1, head("/inference.GRPCInferenceService/ServerLive") + literal)
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(sent)
        # The answer comes in frames of stream 1, after the server's settings.
        received = b""
        while b"\x00\x00\x00\x01" not in received:
            part = client.recv(1000)
            assert part, f"the server has closed the connection after {received!r}"
            received += part
    assert running.terminate() == 0
    assert all(line.startswith('{"time":') for line in running.log_text.splitlines()), running.log_text
