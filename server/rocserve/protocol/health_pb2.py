"""Made from health.proto by protos/generate.py; do not edit."""

from rocserve.protocol import pool as _pool

DESCRIPTOR = _pool.add_file(
    b'\n\x0chealth.proto\x12\x0egrpc.hea'
    b'lth.v1".\n\x12HealthCheckReq'
    b'uest\x12\x18\n\x07service\x18\x01 \x01(\tR\x07s'
    b'ervice"\xb1\x01\n\x13HealthCheckRe'
    b'sponse\x12I\n\x06status\x18\x01 \x01(\x0e21'
    b'.grpc.health.v1.HealthCh'
    b'eckResponse.ServingStatu'
    b'sR\x06status"O\n\rServingStat'
    b'us\x12\x0b\n\x07UNKNOWN\x10\x00\x12\x0b\n\x07SERVI'
    b'NG\x10\x01\x12\x0f\n\x0bNOT_SERVING\x10\x02\x12\x13\n'
    b'\x0fSERVICE_UNKNOWN\x10\x032\xae\x01\n\x06H'
    b'ealth\x12P\n\x05Check\x12".grpc.he'
    b'alth.v1.HealthCheckReque'
    b'st\x1a#.grpc.health.v1.Heal'
    b'thCheckResponse\x12R\n\x05Watch'
    b'\x12".grpc.health.v1.Health'
    b'CheckRequest\x1a#.grpc.heal'
    b'th.v1.HealthCheckRespons'
    b'e0\x01b\x06proto3'
)

HealthCheckRequest = _pool.message_class(DESCRIPTOR, "HealthCheckRequest")
HealthCheckResponse = _pool.message_class(DESCRIPTOR, "HealthCheckResponse")
