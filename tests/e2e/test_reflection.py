"""gRPC's reflection of a real server, without and with front end processes; test_sample.py has the default."""

from __future__ import annotations

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.server import RocserveProcess


def test_a_client_without_our_files_asks_what_it_has_learned(http_server: RocserveProcess) -> None:
    with grpc.insecure_channel(http_server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in database.get_services()
        service = descriptor_pool.DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService")
        method = service.methods_by_name["ModelMetadata"]
        question, answer = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        call = channel.unary_unary(
            f"/{service.full_name}/{method.name}",
            request_serializer=question.SerializeToString,
            response_deserializer=answer.FromString,
        )
        told = call(question(name="add_sub"))
        assert [tensor.name for tensor in told.inputs] == ["INPUT0", "INPUT1"]
