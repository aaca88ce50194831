"""Times in the answers of a real server, without and with front end processes, by Triton's clients and plain HTTP."""

from __future__ import annotations

import http.client
import json
import queue
import re
from collections.abc import Mapping

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from support.http_requests import add_sub_body, add_sub_inputs, ask
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

from rocserve.protocol.parameters import read_parameters

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


def check(told: Mapping[str, object], instance: str) -> None:
    assert told["timing_version"] == "1"
    assert told["timing_batch_size"] == 1
    assert told["timing_instance"] == instance
    assert "rows are independent" in str(told["timing_load_check"]) or told["timing_load_check"] == "not checked"
    parts = [told[f"timing_{part}_ns"] for part in PARTS]
    assert all(isinstance(part, int) and part >= 0 for part in parts), parts
    assert sum(parts) <= told["timing_total_ns"]


def call(server: RocserveProcess, path: str, body: object) -> tuple[http.client.HTTPMessage, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status == 200, text
    return response.headers, json.loads(text)


def grpc_inputs() -> list[grpc_client.InferInput]:
    inputs = [grpc_client.InferInput(f"INPUT{index}", [1, 4], "INT32") for index in (0, 1)]
    for entry in inputs:
        entry.set_data_from_numpy(np.zeros((1, 4), np.int32))
    return inputs


def test_over_grpc(http_server: RocserveProcess) -> None:
    with http_server.client() as client:
        for _ in range(3):
            timed = client.infer("add_sub", grpc_inputs(), parameters={"timing": True}).get_response()
            check(read_parameters(timed.parameters), "add_sub_0")
            assert not client.infer("add_sub", grpc_inputs()).get_response().parameters


def test_over_http(http_server: RocserveProcess, triton_http: http_client.InferenceServerClient) -> None:
    headers, answer = call(http_server, "/v2/models/add_sub/infer", add_sub_body(parameters={"timing": True}))
    check(answer["parameters"], "add_sub_0")
    names = re.findall(r"(?:^|, )(\w+);", headers["Server-Timing"])
    assert names == ["total", *PARTS, "batch_size", "version", "instance", "load_check"]
    (total,) = re.findall(r"total;dur=([\d.]+)", headers["Server-Timing"])
    assert float(total) == pytest.approx(answer["parameters"]["timing_total_ns"] / 1e6, abs=0.001)
    binary = triton_http.infer("add_sub", add_sub_inputs(), parameters={"timing": True}).get_response()
    check(binary["parameters"], "add_sub_0")
    headers, answer = call(http_server, "/v2/models/add_sub/infer", add_sub_body())
    assert "Server-Timing" not in headers
    assert "parameters" not in answer


def test_generate_tells_too(http_server: RocserveProcess) -> None:
    body = {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1], "timing": True}
    headers, answer = call(http_server, "/v2/models/add_sub/generate", body)
    check(answer, "add_sub_0")
    assert headers["Server-Timing"].startswith("total;dur=")


def test_each_response_of_a_decoupled_model_tells(http_server: RocserveProcess) -> None:
    answers: queue.Queue = queue.Queue()
    inputs = [grpc_client.InferInput("IN", [1], "INT32")]
    inputs[0].set_data_from_numpy(np.array([3], np.int32))
    with http_server.client() as client:
        client.start_stream(lambda result, error: answers.put(error or result.get_response()))
        client.async_stream_infer("repeat", inputs, parameters={"timing": True})
        told = [read_parameters(answers.get(timeout=PATIENCE_SECONDS).parameters) for _ in range(3)]
    assert [one["timing_instance"] for one in told] == ["repeat_0"] * 3
    totals = [one["timing_total_ns"] for one in told]
    assert totals == sorted(totals)


def test_an_ensemble_tells_of_its_steps(http_server: RocserveProcess) -> None:
    entry = {"name": "IN", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}
    body = {"inputs": [entry], "parameters": {"timing": True}}
    headers, answer = call(http_server, "/v2/models/labelled/infer", body)
    told = answer["parameters"]
    (step,) = json.loads(told["timing_steps"])
    assert (step["model"], step["version"], step["instance"], step["batch_size"]) == ("types", "1", "types_0", 2)
    assert step["total_ns"] <= told["timing_total_ns"]
    assert step["compute_infer_ns"] == told["timing_compute_infer_ns"]
    assert 'desc="types"' in headers["Server-Timing"]


@pytest.mark.parametrize("value", [1, "true"])
def test_another_value_is_refused(http_server: RocserveProcess, value: object) -> None:
    status, answer = ask(http_server, "POST", "/v2/models/add_sub/infer", add_sub_body(parameters={"timing": value}))
    assert status == 400
    assert "invalid value type for 'timing' parameter, expected bool_param." in answer["error"]
