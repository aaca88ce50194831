"""Our messages hold all of tritonclient's, and AMD Inference Server's and gRPC's calls have their public numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.grpc import service_pb2 as triton_service

from rocserve.protocol import grpc_service_pb2, health_pb2, model_config_pb2

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


def _field(field: FieldDescriptor) -> dict[str, object]:
    """All of a field that shows on the wire or in text format."""
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
