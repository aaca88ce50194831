"""gRPC's reflection over a real connection, asked by grpcio-reflection's client and by plain messages."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from rocserve.frontends.grpc.reflection import ServedFiles, reflection_routes
from rocserve.protocol import reflection_pb2 as pb
from rocserve.services.access import Restriction
from rocserve.settings import GrpcSettings

from .conftest import Serve, Served

SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
]
VERSIONS = pytest.mark.parametrize("version", ["v1", "v1alpha"])


def ask(
    served: Served, version: str, *requests: pb.ServerReflectionRequest, metadata: Sequence[tuple[str, str]] = ()
) -> list[pb.ServerReflectionResponse]:
    call = served.channel().stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        pb.ServerReflectionRequest.SerializeToString,
        pb.ServerReflectionResponse.FromString,
    )
    return list(call(iter(requests), metadata=metadata))


def names(response: pb.ServerReflectionResponse) -> list[str]:
    files = response.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(file).name for file in files]


def test_it_is_off_by_default() -> None:
    assert GrpcSettings().reflection is False


def test_a_client_learns_all_services_and_calls_what_it_has_learned(serve: Serve) -> None:
    database = ProtoReflectionDescriptorDatabase(serve(reflection_routes(None)).channel())
    assert sorted(database.get_services()) == SERVICES
    pool = descriptor_pool.DescriptorPool(database)
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    infer = service.methods_by_name["ModelInfer"]
    request = message_factory.GetMessageClass(infer.input_type)(model_name="m", raw_input_contents=[b"1234"])
    request.parameters["timing"].bool_param = True
    assert request.DESCRIPTOR.full_name == "inference.ModelInferRequest"
    config = pool.FindMessageTypeByName("inference.ModelConfig")
    assert {"name", "platform", "max_batch_size", "dynamic_batching"} <= set(config.fields_by_name)
    for name in SERVICES:
        assert pool.FindServiceByName(name).methods
    alpha = pool.FindServiceByName(SERVICES[2]).methods_by_name["ServerReflectionInfo"]
    assert alpha.input_type.full_name == "grpc.reflection.v1alpha.ServerReflectionRequest"
    asked = alpha.input_type.fields_by_name["file_containing_extension"].message_type
    assert asked.full_name == "grpc.reflection.v1alpha.ExtensionRequest"


@VERSIONS
def test_each_question_has_one_answer_in_order(serve: Serve, version: str) -> None:
    request = pb.ServerReflectionRequest
    extension = pb.ExtensionRequest(containing_type="inference.ModelConfig", extension_number=7)
    questions = (
        request(host="h", list_services="*"),
        request(file_by_filename="model_config.proto"),
        request(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
        request(file_containing_symbol="inference.ModelInferRequest.InferInputTensor"),
        request(file_containing_symbol="rocserve.Page"),
        request(file_by_filename="page.proto"),
        request(all_extension_numbers_of_type="inference.ModelConfig"),
        request(all_extension_numbers_of_type="nowhere"),
        request(file_containing_extension=extension),
        request(),
    )
    answers = ask(serve(reflection_routes(None)), version, *questions)
    assert [answer.original_request for answer in answers] == [*questions]
    assert answers[0].valid_host == "h"
    assert [one.name for one in answers[0].list_services_response.service] == SERVICES
    assert names(answers[1]) == ["model_config.proto"]
    assert names(answers[2]) == names(answers[3]) == ["grpc_service.proto", "model_config.proto"]
    # What the HTTP port alone serves is not told.
    not_found = grpc.StatusCode.NOT_FOUND.value[0]
    failures = [answer.error_response for answer in answers]
    errors = [(one.error_code, one.error_message) for one in failures[4:6]]
    assert errors == [(not_found, "there is no symbol 'rocserve.Page'"), (not_found, "there is no file 'page.proto'")]
    numbers = answers[6].all_extension_numbers_response
    assert (numbers.base_type_name, [*numbers.extension_number]) == ("inference.ModelConfig", [])
    assert [one.error_code for one in failures[7:9]] == [not_found] * 2
    assert failures[9].error_code == grpc.StatusCode.UNIMPLEMENTED.value[0]


@VERSIONS
def test_a_message_that_is_none_ends_the_stream(serve: Serve, version: str) -> None:
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = serve(reflection_routes(None)).channel().stream_stream(method)(iter([b"\xff\xff"]))
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@VERSIONS
def test_it_is_restricted_as_metadata_are(serve: Serve, version: str) -> None:
    served = serve(reflection_routes(Restriction("triton-grpc-protocol-key", "word")))
    question = pb.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as error:
        ask(served, version, question)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    (answer,) = ask(served, version, question, metadata=(("triton-grpc-protocol-key", "word"),))
    assert answer.list_services_response.service


def test_a_file_comes_with_all_that_it_imports() -> None:
    files = ServedFiles()
    pool = descriptor_pool.DescriptorPool()
    for content in reversed(files.with_symbol("inference.GRPCInferenceService")):
        pool.AddSerializedFile(content)
    assert pool.FindServiceByName("inference.GRPCInferenceService")
