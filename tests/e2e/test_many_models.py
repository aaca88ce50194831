"""More models than are loaded at the same time: loads and unloads under load, through every kind of request."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.metrics import FLAGS, port_of, scrape
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

MODELS = 12
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            call = pb_utils.InferenceRequest(model_name="m3", requested_output_names=["Y"], inputs=[x])
            answer = call.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            y = pb_utils.get_output_tensor_by_name(answer, "Y")
            responses.append(pb_utils.InferenceResponse([y]))
        return responses
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling {
  step { model_name: "m1" model_version: -1
         input_map { key: "X" value: "X" } output_map { key: "Y" value: "between" } }
  step { model_name: "m2" model_version: -1
         input_map { key: "X" value: "between" } output_map { key: "Y" value: "Y" } }
}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """m0 to m11, which add their numbers; "both" is m1 and then m2, "caller" asks m3."""
    folder = tmp_path / "repository"
    for number in range(MODELS):
        drop(folder, f"m{number}", add_constant(number), config=ADD_CONSTANT_CONFIG)
    drop(folder, "both", None, ENSEMBLE)
    drop(folder, "caller", CALLER, ADD_CONSTANT_CONFIG.replace('platform: "onnx_onnxv1"', 'backend: "python"'))
    return folder


def infer(client: triton.InferenceServerClient, model: str) -> float:
    """The constant that the model adds."""
    given = infer_input("X", np.zeros((1, 2), np.float32))
    return float(client.infer(model, [given], client_timeout=PATIENCE_SECONDS).as_numpy("Y")[0, 0])


def test_each_model_answers_though_few_are_loaded(serve, repository: Path) -> None:
    most = 8
    server: RocserveProcess = serve(repository, flags=("--max-model-memory=60M", "--front-ends=2", *FLAGS))
    server.wait_until_ready()
    assert not server.workers()
    assert not any('model="m' in name for name in scrape(port_of(server)) if name.startswith("nv_")), "nobody was asked"
    with server.client() as client:
        assert client.is_model_ready("m5")
        assert client.get_model_metadata("m5").inputs[0].name == "X"
        assert client.get_model_config("caller").config.max_batch_size == 8
        assert infer(client, "both") == 3, "the members of an ensemble"
        assert infer(client, "caller") == 3, "what a model calls"

    def some(seed: int) -> None:
        dice = random.Random(seed)
        with server.client() as client:
            for _ in range(12):
                number = min(int(dice.paretovariate(0.7)) - 1, MODELS - 1)
                assert infer(client, f"m{number}") == number

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(some, range(4)))
    with server.client() as client:
        statistics = client.get_inference_statistics().model_stats
        counts = {row.name: row.inference_stats.success.count for row in statistics}
    metrics = {name: float(value) for name, value in scrape(port_of(server)).items()}
    assert sum(counts[f"m{number}"] for number in range(MODELS)) == 4 * 12 + 3, "counted over all loads"
    assert metrics["rocserve_models_registered"] == MODELS + 1
    assert metrics["rocserve_models_resident"] <= most
    assert metrics["rocserve_cold_requests_total"] >= MODELS / 2
    wait_until(lambda: len(server.workers()) <= most, "the workers of what was unloaded end")


@pytest.mark.parametrize("front_ends", [0, 2])
def test_a_refusal_tells_when_to_ask_again(serve, repository: Path, front_ends: int) -> None:
    flags = ("--max-loaded-models=3", "--wait-for-model=false", f"--front-ends={front_ends}")
    server: RocserveProcess = serve(repository, flags=flags)
    server.wait_until_ready()
    request = service_pb2.ModelInferRequest(model_name="m1", raw_input_contents=[bytes(8)])
    request.inputs.add(name="X", datatype="FP32", shape=[1, 2])
    with grpc.insecure_channel(server.address) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as raised:
            ask(request.SerializeToString(), timeout=PATIENCE_SECONDS)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert ("grpc-retry-pushback-ms", "1000") in raised.value.trailing_metadata()
    # gRPC's clients heed it: otherwise all attempts of a call were made within milliseconds.
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "0.001s",
        "maxBackoff": "0.001s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    with triton.InferenceServerClient(server.address, channel_args=[("grpc.service_config", config)]) as client:

        def is_answered() -> bool:
            """On a slow machine a load takes longer than one call's attempts."""
            with suppress(InferenceServerException):
                return infer(client, "m1") == 1
            return False

        wait_until(is_answered, "an answer")
    connection = http.client.HTTPConnection(server.http_address, timeout=PATIENCE_SECONDS)
    given = {"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}
    connection.request("POST", "/v2/models/m2/infer", json.dumps({"inputs": [given]}))
    refused = connection.getresponse()
    assert (refused.status, refused.getheader("Retry-After")) == (503, "1")
    assert refused.read() == b'{"error":"model \'m2\' is being loaded; ask again in a second"}'


def test_a_note_comes_once_a_change_not_with_each_cold_load(serve, repository: Path) -> None:
    for model in ("bare", "bare2"):
        drop(repository, model, add_constant(7))
    server: RocserveProcess = serve(repository, flags=("--max-loaded-models=1", "--log-verbose=1"))
    server.wait_until_ready()

    def notes() -> int:
        return server.log_text.count("autofilled max_batch_size to 64 for model 'bare'")

    with server.client() as client:
        for _ in range(3):
            assert infer(client, "bare") == infer(client, "bare2") == 7
        wait_until(lambda: server.log_text.count("loaded 'bare' version 1 in") >= 3, "the loads in the log")
        assert notes() == 1
        drop(repository, "bare", add_constant(8))
        wait_until(lambda: infer(client, "bare") == 8, "the other file is served")
    wait_until(lambda: notes() == 2, "the note about the model that has changed")
