"""The committed modules equal protos/, and coexist with tritonclient's in one process. Our messages contain all of
tritonclient's, and AMD Inference Server's and gRPC's calls have their public numbers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.grpc import service_pb2 as triton_service

import rocserve.protocol
from rocserve.protocol import grpc_service_pb2, health_pb2, model_config_pb2

PROTOCOL = Path(rocserve.protocol.__file__).parent
PROTOS = Path(__file__).resolve().parents[3] / "protos"
MODULES = ("model_config_pb2", "grpc_service_pb2", "health_pb2", "reflection_pb2")

OURS = "from rocserve.protocol import grpc_service_pb2 as ours, health_pb2, model_config_pb2"
TRITONS = "from tritonclient.grpc import service_pb2 as tritons"
EXCHANGE = """
request = tritons.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"abc"])
assert ours.ModelInferRequest.FromString(request.SerializeToString()).raw_input_contents == [b"abc"]
assert ours.ModelInferRequest.DESCRIPTOR.file.pool is not tritons.ModelInferRequest.DESCRIPTOR.file.pool
print("ok")
"""


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed, so the modules cannot be made anew")
    folder = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, str(PROTOS / "generate.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_up_to_date(regenerated: Path, module: str) -> None:
    assert (regenerated / f"{module}.py").read_bytes() == (PROTOCOL / f"{module}.py").read_bytes(), "run `make protos`"


@pytest.mark.parametrize("module", MODULES)
def test_type_stubs_are_up_to_date(regenerated: Path, module: str) -> None:
    committed = (PROTOCOL / f"{module}.pyi").read_text()
    made_with = re.search(r"grpcio-tools ([\d.]+);", committed)
    assert made_with is not None
    installed = importlib.metadata.version("grpcio-tools")
    if made_with[1] != installed:
        pytest.skip(f"the stubs were made with grpcio-tools {made_with[1]}, and {installed} is installed")
    assert (regenerated / f"{module}.pyi").read_text() == committed, "run `make protos`"


@pytest.mark.parametrize("imports", [(OURS, TRITONS), (TRITONS, OURS)], ids=["ours first", "tritonclient first"])
def test_both_sets_of_messages_in_one_process(imports: tuple[str, str]) -> None:
    assert _run("\n".join([*imports, EXCHANGE])) == "ok\n"


def test_nothing_of_ours_is_in_the_default_pool() -> None:
    code = f"""
{OURS}
from google.protobuf import descriptor_pool
for name in ("inference.ModelInferRequest", "inference.ModelConfig", "grpc.health.v1.HealthCheckRequest"):
    try:
        descriptor_pool.Default().FindMessageTypeByName(name)
    except KeyError:
        continue
    raise SystemExit(name)
print("ok")
"""
    assert _run(code) == "ok\n"


def test_pure_python_runtime_reads_the_same() -> None:
    code = f"""
import os
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
{OURS}
tensor = ours.ModelInferRequest.InferInputTensor(name="A", shape=[1, 2])
request = ours.ModelInferRequest(inputs=[tensor])
assert ours.ModelInferRequest.FromString(request.SerializeToString()).inputs[0].shape == [1, 2]
assert model_config_pb2.DataType.Name(model_config_pb2.TYPE_BF16) == "TYPE_BF16"
print("ok")
"""
    assert _run(code) == "ok\n"


FILES = [
    pytest.param(triton_config.DESCRIPTOR, model_config_pb2.DESCRIPTOR, id="model_config"),
    pytest.param(triton_service.DESCRIPTOR, grpc_service_pb2.DESCRIPTOR, id="grpc_service"),
]

OPEN_INFERENCE_PROTOCOL = {"inference.ModelMetadataResponse": {"properties": 6}}
"""Fields that KServe's description of the protocol has and Triton's lacks."""

AMD_CALLS = {
    "ModelLoad": ({"name": 1, "version": 2, "parameters": 3}, {}),
    "ModelUnload": ({"name": 1, "version": 2}, {}),
    "WorkerLoad": ({"name": 1, "parameters": 2}, {"endpoint": 1}),
    "WorkerUnload": ({"name": 1}, {}),
    "ModelList": ({}, {"models": 1}),
    "HasHardware": ({"name": 1, "num": 2}, {"found": 1}),
}


def _messages(descriptors: list[Descriptor]) -> Iterator[Descriptor]:
    for descriptor in descriptors:
        yield descriptor
        yield from _messages(list(descriptor.nested_types))


def _enums(file) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in _messages(list(file.message_types_by_name.values())):
        yield from message.enum_types


OPTIONAL = {"inference.ModelConfig": ("max_batch_size",)}
"""Fields whose default, if it is written, means something else to us than a missing one. On the wire and in text they
are the same."""


def _field(field: FieldDescriptor) -> dict[str, object]:
    """All properties of a field that show on the wire or in text format."""
    return {
        "number": field.number,
        "type": field.type,
        "repeated": field.is_repeated,
        "packed": field.is_packed,
        "presence": field.has_presence,
        "default": field.default_value if not field.is_repeated else None,
        "oneof": field.containing_oneof.name if field.containing_oneof else None,
        "message": field.message_type.full_name if field.message_type else None,
        "map": bool(field.message_type and field.message_type.GetOptions().map_entry),
        "enum": field.enum_type.full_name if field.enum_type else None,
        "json_name": field.json_name,
    }


@pytest.mark.parametrize(("public", "ours"), FILES)
def test_every_public_message_and_field(public, ours) -> None:
    mine = {message.full_name: message for message in _messages(list(ours.message_types_by_name.values()))}
    theirs = list(_messages(list(public.message_types_by_name.values())))
    assert len(theirs) > 50
    for message in theirs:
        assert message.full_name in mine
        expected = {field.name: _field(field) for field in message.fields}
        for name in OPTIONAL.get(message.full_name, ()):
            expected[name] |= {"presence": True, "oneof": f"_{name}"}
        more = OPEN_INFERENCE_PROTOCOL.get(message.full_name, {})
        fields = mine[message.full_name].fields
        assert {field.name: _field(field) for field in fields if field.name not in more} == expected, message.full_name
        assert {field.name: field.number for field in fields if field.name in more} == more


@pytest.mark.parametrize(("public", "ours"), FILES)
def test_every_public_enum(public, ours) -> None:
    def values(file) -> dict[str, dict[str, int]]:
        return {enum.full_name: {value.name: value.number for value in enum.values} for enum in _enums(file)}

    assert values(ours) == values(public)


def _methods(file, service: str) -> dict[str, tuple[str, str, bool, bool]]:
    return {
        method.name: (
            method.input_type.full_name,
            method.output_type.full_name,
            method.client_streaming,
            method.server_streaming,
        )
        for method in file.services_by_name[service].methods
    }


def test_every_public_call() -> None:
    public = _methods(triton_service.DESCRIPTOR, "GRPCInferenceService")
    ours = _methods(grpc_service_pb2.DESCRIPTOR, "GRPCInferenceService")
    assert {name: ours.get(name) for name in public} == public
    assert set(ours) - set(public) == set(AMD_CALLS)


@pytest.mark.parametrize("call", AMD_CALLS)
def test_amd_inference_server_calls(call: str) -> None:
    method = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[call]
    assert (method.input_type.full_name, method.output_type.full_name) == (
        f"inference.{call}Request",
        f"inference.{call}Response",
    )
    assert not method.client_streaming
    assert not method.server_streaming
    request, response = AMD_CALLS[call]
    assert {field.name: field.number for field in method.input_type.fields} == request
    assert {field.name: field.number for field in method.output_type.fields} == response


def test_health() -> None:
    assert health_pb2.DESCRIPTOR.package == "grpc.health.v1"
    assert _methods(health_pb2.DESCRIPTOR, "Health") == {
        "Check": ("grpc.health.v1.HealthCheckRequest", "grpc.health.v1.HealthCheckResponse", False, False),
        "Watch": ("grpc.health.v1.HealthCheckRequest", "grpc.health.v1.HealthCheckResponse", False, True),
    }
    assert health_pb2.HealthCheckRequest(service="m").SerializeToString() == b"\x0a\x01m"
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert serving.SerializeToString() == b"\x08\x01"
    assert dict(health_pb2.HealthCheckResponse.ServingStatus.items()) == {
        "UNKNOWN": 0,
        "SERVING": 1,
        "NOT_SERVING": 2,
        "SERVICE_UNKNOWN": 3,
    }
