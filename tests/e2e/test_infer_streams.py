"""Infer over HTTP as a stream of JSON, events or lines, of a real server without and with front end processes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.http_requests import LEFT, RIGHT, add_sub_body, ask
from support.models import drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
STEPS = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in pb_utils.get_input_tensor_by_name(request, "X").as_numpy():
                while value == 0 and not os.path.exists(%r):
                    time.sleep(0.01)
                error = pb_utils.TritonError("not a number of ours") if value < 0 else None
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([value]))], error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
STEPS_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: -1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
model_transaction_policy { decoupled: true }
"""


def begin(
    server: RocserveProcess, model: str, body: Any, accept: str, headers: Mapping[str, str] | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", f"/v2/models/{model}/infer", data, {"Accept": accept, **(headers or {})})
    return connection, connection.getresponse()


def answers(
    server: RocserveProcess, model: str, body: Any, accept: str, headers: Mapping[str, str] | None = None
) -> list[Any]:
    """The objects of a stream, which must be of the form that the client accepts."""
    connection, response = begin(server, model, body, accept, headers)
    text = response.read()
    connection.close()
    assert response.status == 200, text
    assert response.getheader("Content-Type").partition(";")[0] == accept
    before, behind = (b"data: ", b"\n\n") if accept == EVENTS else (b"", b"\n")
    parts = text.split(behind)
    assert parts.pop() == b""
    assert all(part.startswith(before) for part in parts)
    return [json.loads(part.removeprefix(before)) for part in parts]


def values(answer: Any, name: str) -> list[float]:
    found: list[float] = next(output["data"] for output in answer["outputs"] if output["name"] == name)
    return found


def repeat_body(count: int, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [count]}], **more}


@pytest.mark.parametrize("accept", [EVENTS, LINES])
def test_each_response_of_a_decoupled_model_is_one_object(http_server: RocserveProcess, accept: str) -> None:
    told = answers(http_server, "repeat", repeat_body(3, id="seven"), accept)
    assert len(told) == 3
    assert {(one["id"], one["model_name"], one["model_version"]) for one in told} == {("seven", "repeat", "1")}
    assert all(len(values(one, "OUT")) == 1 for one in told)
    assert answers(http_server, "repeat", repeat_body(0), accept) == []


@pytest.mark.parametrize("accept", [EVENTS, LINES])
def test_another_model_has_one_response(http_server: RocserveProcess, accept: str) -> None:
    (told,) = answers(http_server, "add_sub", add_sub_body(), accept)
    assert values(told, "OUTPUT0") == (LEFT + RIGHT).ravel().tolist()


@pytest.mark.parametrize("accept", ["application/json, text/event-stream", "application/x-ndjson;q=0.5, */*"])
def test_a_client_that_takes_both_gets_a_stream_where_there_may_be_many(
    http_server: RocserveProcess, accept: str
) -> None:
    connection, response = begin(http_server, "add_sub", add_sub_body(), accept)
    assert response.getheader("Content-Type") == "application/json"
    assert values(json.loads(response.read()), "OUTPUT1") == (LEFT - RIGHT).ravel().tolist()
    connection.close()
    connection, response = begin(http_server, "repeat", repeat_body(1), accept)
    assert response.getheader("Content-Type").partition(";")[0] in (EVENTS, LINES)
    assert response.read().count(b'"outputs"') == 1
    connection.close()


def test_inputs_may_be_binary_but_outputs_may_not(http_server: RocserveProcess) -> None:
    entry = {"name": "IN", "shape": [1], "datatype": "INT32", "parameters": {"binary_data_size": 4}}
    text = json.dumps({"inputs": [entry]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    data = np.array([2], np.int32).tobytes()
    assert len(answers(http_server, "repeat", text + data, LINES, headers)) == 2
    assert len(answers(http_server, "repeat", data, LINES, {"Inference-Header-Content-Length": "0"})) == 2
    for more in (
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]},
    ):
        connection, response = begin(http_server, "repeat", repeat_body(1, **more), LINES)
        assert response.status == 400
        assert json.loads(response.read())["error"].startswith("a stream sends outputs as JSON: ")
        connection.close()


def test_an_error_before_the_first_response_is_an_ordinary_one(http_server: RocserveProcess) -> None:
    wrong = {"inputs": [{"name": "NO", "shape": [1], "datatype": "INT32", "data": [1]}]}
    for model, body, status in (("nowhere", repeat_body(1), 404), ("repeat", wrong, 400), ("repeat", b"{", 500)):
        connection, response = begin(http_server, model, body, EVENTS)
        assert (response.status, response.getheader("Content-Type")) == (status, "application/json")
        assert "error" in json.loads(response.read())
        connection.close()


def test_without_accept_a_decoupled_model_is_refused_as_in_triton(http_server: RocserveProcess) -> None:
    status, answer = ask(http_server, "POST", "/v2/models/repeat/infer", repeat_body(1))
    assert status == 501
    assert answer["error"] == "HTTP end point doesn't support models with decoupled transaction policy"


def test_responses_come_when_they_are_sent_and_errors_are_objects_too(
    serve: Callable[..., RocserveProcess], repository: Path
) -> None:
    gate = repository.parent / "gate"
    drop(repository, "steps", STEPS % str(gate), STEPS_CONFIG)
    server = serve(repository)
    server.wait_until_ready()
    body = {"inputs": [{"name": "X", "shape": [4], "datatype": "FP32", "data": [5, 0, -1, 6]}]}
    connection, response = begin(server, "steps", body, LINES)
    assert values(json.loads(response.readline()), "Y") == [5]
    # The model waits, and the first response is here.
    gate.touch()
    rest = [json.loads(line) for line in response.read().splitlines()]
    connection.close()
    assert values(rest[0], "Y") == [0]
    assert rest[1] == {"error": "not a number of ours"}
    assert values(rest[2], "Y") == [6]
    assert len(rest) == 3
