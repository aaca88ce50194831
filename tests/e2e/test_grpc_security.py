"""Restricted protocols, forwarded headers, and limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import add_sub, answering, drop
from support.server import RocserveProcess, Start
from support.tools import Command
from support.waiting import PATIENCE_SECONDS
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from rocserve.services.access import PROTOCOLS

TELLS_PARAMETERS = answering("IN", "OUT", "np.array([request.parameters()], dtype=object)")
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
INFERENCE = "/inference.GRPCInferenceService/"
KEYS = (("triton-grpc-protocol-infer-key", "infer-value"), ("triton-grpc-protocol-other-key", "other-value"))
LARGEST_MESSAGE = 1 << 20


def repository(folder: Path) -> Path:
    models = folder / "repository"
    drop(models, "add_sub", add_sub())
    drop(models, "parameters", TELLS_PARAMETERS, CONFIG)
    return models


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server that restricts everything except `health` and `model-repository`."""
    folder = tmp_path_factory.mktemp("security")
    others = ",".join(sorted({*PROTOCOLS.values()} - {"health", "model-repository", "inference"}))
    flags = (
        "--grpc-restricted-protocol=inference:infer-key=infer-value",
        f"--grpc-restricted-protocol={others}:other-key=other-value",
        "--grpc-header-forward-pattern=^(my_|priority|triton_)",
        f"--grpc-max-message-bytes={LARGEST_MESSAGE}",
    )
    return start(repository(folder), *flags)


@pytest.fixture
def channel(server: RocserveProcess) -> Iterator[grpc.Channel]:
    options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
    with grpc.insecure_channel(server.address, options) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, message: bytes = b"", metadata: object = ()) -> bytes:
    answer: bytes = channel.unary_unary(method)(message, metadata=metadata, timeout=PATIENCE_SECONDS)
    return answer


def refusal(channel: grpc.Channel, method: str, message: bytes = b"", metadata: object = ()) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call(channel, method, message, metadata)
    return raised.value.code().name, raised.value.details()


def inference(model: str = "parameters", **parameters: object) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="IN", datatype="FP32", shape=[1])
    request.raw_input_contents.append(np.ones(1, np.float32).tobytes())
    for name, value in parameters.items():
        request.parameters[name].string_param = str(value)
    return request.SerializeToString()


def parameters_of(answer: bytes) -> dict[str, object]:
    response = service_pb2.ModelInferResponse.FromString(answer)
    told: dict[str, object] = json.loads(response.raw_output_contents[0][4:])
    return told


def test_restricted_methods_want_their_header(channel: grpc.Channel) -> None:
    for method in sorted(set(PROTOCOLS) - {"ModelStreamInfer", "Check", "Watch", "ServerReflectionInfo"}):
        protocol = PROTOCOLS[method]
        if protocol in ("health", "model-repository"):
            continue
        key = "infer-key" if protocol == "inference" else "other-key"
        expected = ("UNAVAILABLE", f"This protocol is restricted, expecting header 'triton-grpc-protocol-{key}'")
        assert refusal(channel, INFERENCE + method) == expected
        assert refusal(channel, INFERENCE + method, metadata=[(f"triton-grpc-protocol-{key}", "wrong")]) == expected
    assert call(channel, INFERENCE + "ServerMetadata", metadata=KEYS[1:])
    assert call(channel, INFERENCE + "ServerLive")
    assert parameters_of(call(channel, INFERENCE + "ModelInfer", inference(), KEYS[:1])) == {}


def test_the_status_verb_may_send_a_header(server: RocserveProcess, command: Command) -> None:
    verb = ("status", "--once", f"--url={server.address}")
    without = command(*verb)
    assert without.status == 1
    assert (
        "answers only calls with its header (UNAVAILABLE: This protocol is restricted, expecting header" in without.err
    )
    allowed = command(*verb, *(f"--header={name}={value}" for name, value in KEYS))
    assert allowed.status == 0, allowed.err
    assert "parameters" in allowed.out


def test_a_restricted_stream_ends_at_once(server: RocserveProcess, channel: grpc.Channel) -> None:
    stream = channel.stream_stream(INFERENCE + "ModelStreamInfer")
    with pytest.raises(grpc.RpcError) as raised:
        next(stream(iter([inference()]), timeout=PATIENCE_SECONDS))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "expecting header 'triton-grpc-protocol-infer-key'" in raised.value.details()
    answer = next(stream(iter([inference()]), timeout=PATIENCE_SECONDS, metadata=KEYS))
    assert service_pb2.ModelStreamInferResponse.FromString(answer).infer_response.model_name == "parameters"
    with triton.InferenceServerClient(server.address) as client:
        given = infer_input("IN", np.ones(1, np.float32))
        assert client.infer("parameters", [given], headers=dict(KEYS)).as_numpy("OUT").shape == (1,)
        with pytest.raises(InferenceServerException, match="This protocol is restricted"):
            client.infer("parameters", [given])


def test_headers_become_parameters(channel: grpc.Channel) -> None:
    metadata = [*KEYS, ("my_header", "one"), ("other_header", "two")]
    assert parameters_of(call(channel, INFERENCE + "ModelInfer", inference(mine="m"), metadata)) == {
        "mine": "m",
        "my_header": "one",
    }
    stream = channel.stream_stream(INFERENCE + "ModelStreamInfer")
    answers = stream(iter([inference(), inference()]), timeout=PATIENCE_SECONDS, metadata=metadata)
    for message in answers:
        response = service_pb2.ModelStreamInferResponse.FromString(message)
        assert parameters_of(response.infer_response.SerializeToString()) == {"my_header": "one"}


@pytest.mark.parametrize("name", ["priority", "triton_enable_empty_final_response"])
def test_a_reserved_header_is_refused(channel: grpc.Channel, name: str) -> None:
    text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert refusal(channel, INFERENCE + "ModelInfer", inference(), [*KEYS, (name, "1")]) == ("INVALID_ARGUMENT", text)
    stream = channel.stream_stream(INFERENCE + "ModelStreamInfer")
    answer = next(stream(iter([inference()]), timeout=PATIENCE_SECONDS, metadata=[*KEYS, (name, "1")]))
    assert service_pb2.ModelStreamInferResponse.FromString(answer).error_message == text


def test_messages_and_headers_have_a_limit(server: RocserveProcess, channel: grpc.Channel) -> None:
    code, _ = refusal(channel, INFERENCE + "ModelInfer", bytes(LARGEST_MESSAGE + 1), KEYS)
    assert code == "RESOURCE_EXHAUSTED"
    # The server may end the connection, perhaps after its client has sent the next call.
    own_connection = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(server.address, own_connection) as other, pytest.raises(grpc.RpcError):
        call(other, INFERENCE + "ServerLive", metadata=[("large", "x" * (1 << 20))])
    assert call(channel, INFERENCE + "ServerLive")
