"""Python models that say themselves whether they are ready (is_ready), asked by clients of both protocols."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.http as http_client
from support.infer_inputs import infer_input
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.protocol import health_pb2

CONFIG = """
backend: "python"
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: 2 kind: KIND_CPU }]
"""
MODEL = """
import asyncio
import pathlib
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        # Beside the repository: a change of the model's own folder would load it again.
        self._answer = pathlib.Path(args["model_repository"]).parents[1] / "answer"

    def is_ready(self):
        answer = self._answer.read_text()
        while answer == "later":
            time.sleep(0.01)
            answer = self._answer.read_text()
        if answer == "raises":
            raise ConnectionError("the store is away")
        if answer == "exits":
            raise SystemExit(3)
        if answer == "async no":
            return self._later(False)
        return {"yes": True, "no": False, "None": None}[answer]

    async def _later(self, answer):
        await asyncio.sleep(0)
        return answer

    def execute(self, requests):
        received = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in received]
"""


@pytest.fixture(params=[0, 1], ids=["one-process", "front-ends"])
def server(request: pytest.FixtureRequest, serve: Callable[..., RocserveProcess], tmp_path: Path) -> RocserveProcess:
    for name in ("says", "silent"):
        folder = tmp_path / "models" / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(CONFIG)
        (folder / "1" / "model.py").write_text(MODEL if name == "says" else MODEL.replace("is_ready", "is_well"))
    (tmp_path / "answer").write_text("yes")
    running = serve(tmp_path / "models", flags=(f"--front-ends={request.param}",))
    running.wait_until_ready()
    return running


def test_is_ready_is_seen_by_every_client(server: RocserveProcess, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    with (
        server.client() as client,
        http_client.InferenceServerClient(server.http_address, network_timeout=PATIENCE_SECONDS) as over_http,
        grpc.insecure_channel(server.address) as channel,
    ):
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        def serves(service: str) -> bool:
            return bool(check(health_pb2.HealthCheckRequest(service=service)).status == 1)

        def seen() -> set[bool]:
            return {
                client.is_model_ready("says"),
                client.is_model_ready("says", "1"),
                over_http.is_model_ready("says"),
                serves("says"),
                client.is_server_ready(),
                over_http.is_server_ready(),
                serves(""),
            }

        for given, ready in (
            ("yes", True),
            ("no", False),
            ("raises", False),
            ("exits", False),
            ("None", False),
            ("async no", False),
            ("yes", True),
        ):
            answer.write_text(given)
            # A model that does not answer within 5 s, on a slow machine, is not ready for once.
            wait_until(lambda ready=ready: seen() == {ready}, given)
            # Others are not affected, and requests are answered all the same.
            assert client.is_model_ready("silent") and over_http.is_model_ready("silent")
            result = client.infer("says", [infer_input("X", np.array([2], np.float32))])
            assert result.as_numpy("Y").tolist() == [2]
        # Triton's limit is 5 s.
        answer.write_text("later")
        assert not client.is_model_ready("says")
        answer.write_text("yes")
        wait_until(lambda: client.is_model_ready("says"))
    log = server.log_text
    assert "model 'says' version 1 is not ready: is_ready() returned False" in log
    assert "model 'says' version 1 is not ready: is_ready() raised ConnectionError: the store is away" in log
    assert "model 'says' version 1 is not ready: is_ready() raised SystemExit: 3" in log
    assert "is_ready() must return a boolean value, got NoneType" in log
    assert "model 'says' version 1 is not ready: is_ready() did not return within 5 s" in log
    assert "model 'says' version 1 is ready again" in log
