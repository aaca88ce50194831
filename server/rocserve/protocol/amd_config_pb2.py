"""Made from amd_config.proto by protos/generate.py; do not edit."""

import rocserve.protocol.grpc_service_pb2  # noqa: F401
from rocserve.protocol import pool as _pool

DESCRIPTOR = _pool.add_file(
    b'\n\x10amd_config.proto\x12\x0crocs'
    b'erve.amd\x1a\x12grpc_service.p'
    b'roto"\x88\x03\n\x06Config\x12\x12\n\x04name\x18'
    b'\x01 \x01(\tR\x04name\x12\x1a\n\x08versions\x18'
    b'\x02 \x03(\tR\x08versions\x12\x1a\n\x08platf'
    b'orm\x18\x03 \x01(\tR\x08platform\x12G\n\x06i'
    b'nputs\x18\x04 \x03(\x0b2/.inference.'
    b'ModelMetadataResponse.Te'
    b'nsorMetadataR\x06inputs\x12I\n\x07'
    b'outputs\x18\x05 \x03(\x0b2/.inferenc'
    b'e.ModelMetadataResponse.'
    b'TensorMetadataR\x07outputs\x12'
    b'D\n\nparameters\x18\x06 \x03(\x0b2$.ro'
    b'cserve.amd.Config.Parame'
    b'tersEntryR\nparameters\x1aX\n'
    b'\x0fParametersEntry\x12\x10\n\x03key\x18'
    b'\x01 \x01(\tR\x03key\x12/\n\x05value\x18\x02 \x01('
    b'\x0b2\x19.inference.InferParam'
    b'eterR\x05value:\x028\x01b\x06proto3'
)

Config = _pool.message_class(DESCRIPTOR, "Config")
