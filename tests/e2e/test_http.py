"""The HTTP front end of a real server, with Triton's own clients and plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http_client
import tritonclient.http.aio as aio_client
import tritonclient.utils.shared_memory as shared_memory
from support.http_requests import LEFT, RIGHT, add_sub_inputs, ask
from support.models import add_constant
from support.server import RocserveProcess
from tritonclient.utils import InferenceServerException

KEY = f"/rocserve_test_{os.getpid()}_http"
"""Of POSIX shared memory."""


def test_what_there_is(triton_http: http_client.InferenceServerClient) -> None:
    assert triton_http.is_server_live()
    assert triton_http.is_server_ready()
    assert triton_http.is_model_ready("add_sub")
    assert triton_http.is_model_ready("add_sub", "1")
    assert not triton_http.is_model_ready("nowhere")


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize(
    ("request_encoding", "response_encoding"), [(None, None), ("gzip", "deflate"), ("deflate", "gzip")]
)
def test_inference(
    triton_http: http_client.InferenceServerClient,
    binary_in: bool,
    binary_out: bool,
    request_encoding: str | None,
    response_encoding: str | None,
) -> None:
    result = triton_http.infer(
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


@pytest.mark.parametrize(
    ("datatype", "binary"),
    [
        ("FP16", True),
        *itertools.product(("BOOL", "UINT8", "INT64", "UINT64", "FP32", "FP64", "BYTES"), (True, False)),
    ],
)
def test_datatypes(triton_http: http_client.InferenceServerClient, datatype: str, binary: bool) -> None:
    values: list[Any] = [1, 0, 1]
    if datatype == "BYTES":
        values = ["a", 'ü "\n', ""]
    array = np.array([values], dtype=np.object_ if datatype == "BYTES" else http_client.triton_to_np_dtype(datatype))
    entry = http_client.InferInput(f"INPUT_{datatype}", [1, 3], datatype)
    entry.set_data_from_numpy(array, binary_data=binary)
    wanted = http_client.InferRequestedOutput(f"OUTPUT_{datatype}", binary_data=binary)
    found = triton_http.infer("types", [entry], outputs=[wanted]).as_numpy(f"OUTPUT_{datatype}")
    if datatype == "BYTES":
        told = [element.decode() if isinstance(element, bytes) else element for element in found.ravel()]
        assert told == values
    else:
        assert found.tolist() == array.tolist()


def test_parameters_and_headers_reach_the_model(triton_http: http_client.InferenceServerClient) -> None:
    entry = http_client.InferInput("IN", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))
    result = triton_http.infer(
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


def test_many_at_once(http_server: RocserveProcess) -> None:
    async def run() -> None:
        async with aio_client.InferenceServerClient(http_server.http_address) as asking:
            inputs = [aio_client.InferInput(f"INPUT{index}", [1, 4], "INT32") for index in (0, 1)]
            for entry, array in zip(inputs, (LEFT, RIGHT), strict=True):
                entry.set_data_from_numpy(array)
            results = await asyncio.gather(*(asking.infer("add_sub", inputs, request_id=str(i)) for i in range(50)))
            assert [result.get_response()["id"] for result in results] == [str(i) for i in range(50)]
            assert all(result.as_numpy("OUTPUT0").tolist() == (LEFT + RIGHT).tolist() for result in results)

    asyncio.run(run())


def test_the_client_of_many_threads(triton_http: http_client.InferenceServerClient) -> None:
    pending = [triton_http.async_infer("add_sub", add_sub_inputs()) for _ in range(8)]
    for request in pending:
        assert request.get_result().as_numpy("OUTPUT0").tolist() == (LEFT + RIGHT).tolist()


def test_system_shared_memory(triton_http: http_client.InferenceServerClient) -> None:
    size = LEFT.nbytes
    memory = shared_memory.create_shared_memory_region("http_region", KEY, 4 * size)
    try:
        shared_memory.set_shared_memory_region(memory, [LEFT, RIGHT])
        triton_http.register_system_shared_memory("http_region", KEY, 4 * size)
        told = triton_http.get_system_shared_memory_status()
        assert told == [{"name": "http_region", "key": KEY, "offset": 0, "byte_size": 4 * size}]
        inputs = [http_client.InferInput(f"INPUT{index}", [1, 4], "INT32") for index in (0, 1)]
        outputs = [http_client.InferRequestedOutput(f"OUTPUT{index}") for index in (0, 1)]
        for index in (0, 1):
            inputs[index].set_shared_memory("http_region", size, index * size)
            outputs[index].set_shared_memory("http_region", size, (2 + index) * size)
        result = triton_http.infer("add_sub", inputs, outputs=outputs)
        told_output = result.get_output("OUTPUT0")
        assert told_output == {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 4]}
        found = shared_memory.get_contents_as_numpy(memory, np.int32, [1, 4], 2 * size)
        assert found.tolist() == (LEFT + RIGHT).tolist()
        triton_http.unregister_system_shared_memory("http_region")
        assert triton_http.get_system_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'http_region'"):
            triton_http.infer("add_sub", inputs, outputs=outputs)
    finally:
        shared_memory.destroy_shared_memory_region(memory)
    assert triton_http.get_cuda_shared_memory_status() == []
    triton_http.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException, match="failed to register CUDA shared memory region: 'c'"):
        triton_http.register_cuda_shared_memory("c", base64.b64encode(bytes(64)), 0, 64)


def test_models_are_loaded_and_unloaded(triton_http: http_client.InferenceServerClient) -> None:
    assert {row["name"]: row["state"] for row in triton_http.get_model_repository_index()}["add_sub"] == "READY"
    triton_http.unload_model("seen")
    assert not triton_http.is_model_ready("seen")
    entry = http_client.InferInput("IN", [1], "FP32").set_data_from_numpy(np.zeros(1, np.float32))
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'seen' has no available versions"):
        triton_http.infer("seen", [entry])
    triton_http.load_model("seen")
    assert triton_http.is_model_ready("seen")
    config = json.dumps({**triton_http.get_model_config("add_sub"), "max_batch_size": 3})
    triton_http.load_model("add_sub", config=config)
    assert triton_http.get_model_config("add_sub")["max_batch_size"] == 3
    triton_http.load_model("add_sub")
    with pytest.raises(
        InferenceServerException, match="failed to load 'nowhere', failed to poll from model repository"
    ):
        triton_http.load_model("nowhere")
    given = {"backend": "onnxruntime"}
    triton_http.load_model("given", config=json.dumps(given), files={"file:1/model.onnx": add_constant(1.0)})
    assert triton_http.is_model_ready("given")
    triton_http.unload_model("given", unload_dependents=True)


def test_settings_and_statistics(triton_http: http_client.InferenceServerClient) -> None:
    triton_http.infer("add_sub", add_sub_inputs())
    statistics = triton_http.get_inference_statistics("add_sub")["model_stats"]
    assert statistics[0]["inference_stats"]["success"]["count"] >= 1
    assert isinstance(statistics[0]["last_inference"], int)
    assert {entry["name"] for entry in triton_http.get_inference_statistics()["model_stats"]} >= {"add_sub", "types"}
    before = triton_http.get_log_settings()
    assert triton_http.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert triton_http.update_log_settings({"log_verbose_level": before["log_verbose_level"]}) == before
    assert triton_http.get_trace_settings()["trace_level"] == ["OFF"]
    assert triton_http.update_trace_settings("add_sub", {"trace_rate": "5"})["trace_rate"] == "5"
    assert triton_http.update_trace_settings("add_sub", {"trace_rate": None}) == triton_http.get_trace_settings(
        "add_sub"
    )


def test_parameters_of_generate_reach_the_model(http_server: RocserveProcess) -> None:
    status, answer = ask(http_server, "POST", "/v2/models/seen/generate", {"parameters": {"IN": [1.5, 2], "x": True}})
    assert status == 200
    assert json.loads(answer["SEEN"])["parameters"] == {"x": True}
