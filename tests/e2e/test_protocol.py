"""The served RPCs over a real connection, with tritonclient's own messages, in both ways of receiving gRPC's events."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.infer_inputs import infer_input
from support.models import add_sub, drop
from support.server import RocserveProcess

from rocserve.protocol import health_pb2

CONFIG = """
name: "add_sub"
platform: "onnx_onnxv1"
max_batch_size: 8
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] label_filename: "labels.txt" },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
dynamic_batching { }
"""


@pytest.fixture(scope="module", params=["-event_engine_listener", "event_engine_listener"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("protocol")
    repository = folder / "repository"
    model = drop(repository, "add_sub", add_sub(), CONFIG)
    (model / "labels.txt").write_text("\n".join(f"class{number}" for number in range(16)))
    with RocserveProcess([repository], log=folder / "log", environment={"GRPC_EXPERIMENTS": request.param}) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.address) as client:
        yield client


def inputs(left: np.ndarray, right: np.ndarray) -> list[triton.InferInput]:
    entries = []
    for name, values in (("INPUT0", left), ("INPUT1", right)):
        entry = infer_input(name, values)
        entries.append(entry)
    return entries


LEFT = np.arange(16, dtype=np.int32).reshape(1, 16)
RIGHT = np.full((1, 16), 3, np.int32)


def test_inference_by_name_version_and_id(client):
    result = client.infer("add_sub", inputs(LEFT, RIGHT), model_version="1", request_id="abc")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), LEFT + RIGHT)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), LEFT - RIGHT)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("add_sub", "1", "abc")


def test_a_stream_answers_in_order_and_survives_an_error(server):
    answers: list = []
    client = triton.InferenceServerClient(server.address)
    client.start_stream(lambda result, error: answers.append((result, error)))
    count = 50
    for number in range(count):
        entries = inputs(LEFT + number, RIGHT)
        client.async_stream_infer("add_sub", entries[:1] if number == 7 else entries, request_id=str(number))
    client.stop_stream()
    assert len(answers) == count
    for number, (result, error) in enumerate(answers):
        if number == 7:
            assert "expected 2 inputs but got 1" in error.message()
        else:
            assert error is None
            assert result.get_response().id == str(number)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), LEFT + number + RIGHT)


async def test_the_asyncio_client(server):
    from tritonclient.grpc import aio

    async with aio.InferenceServerClient(server.address) as client:
        result = await client.infer("add_sub", inputs(LEFT, RIGHT))
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), LEFT - RIGHT)


def health(server: RocserveProcess, service: str) -> int:
    with grpc.insecure_channel(server.address) as channel:
        return channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(service=service)).status


def test_health_of_the_server_and_of_a_model(server):
    for service in ("", "inference.GRPCInferenceService", "add_sub"):
        assert health(server, service) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health(server, "nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_is_off_by_default(server):
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as error:
            list(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
