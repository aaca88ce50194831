#!/usr/bin/env bash
# grpcio-reflection 1.81.1 with protobuf 6.33.6: the server answers NOT_FOUND to a question for the file that declares a method,
# such as grpc.health.v1.Health.Check. gRPC's reflection protocol names that form of a symbol ("<package>.<service>[.<method>]"),
# and the service, a message, a field and an enum's value are found. The cause is protobuf's
# DescriptorPool.FindFileContainingSymbol: it raises KeyError for a method, in upb and in pure Python, though FindMethodByName
# of the same pool has it. A server that must answer looks the text before the last dot up.
# Seen on 2026-11-29, both implementations:
#   pool: grpc.health.v1.Health.Check KeyError, FindMethodByName has it
#   server: Health found, HealthCheckRequest found, HealthCheckRequest.service found, HealthCheckResponse.SERVING found,
#           Health.Check not found
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  grpcio==1.81.1 grpcio-reflection==1.81.1 grpcio-health-checking==1.81.1 protobuf==6.33.6
cat >"$folder/ask.py" <<'PYTHON'
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.internal import api_implementation
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

PACKAGE = "grpc.health.v1."
pool = descriptor_pool.Default()
print(api_implementation.Type())
try:
    pool.FindFileContainingSymbol(f"{PACKAGE}Health.Check")
    raise SystemExit("the pool finds a method's file now")
except KeyError:
    print("pool: Health.Check KeyError")
assert pool.FindMethodByName(f"{PACKAGE}Health.Check").name == "Check"

server = grpc.server(ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
reflection.enable_server_reflection([f"{PACKAGE}Health", reflection.SERVICE_NAME], server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
expected = {
    "Health": True,
    "HealthCheckRequest": True,
    "HealthCheckRequest.service": True,
    "HealthCheckResponse.SERVING": True,
    "Health.Check": False,
}
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=PACKAGE + name) for name in expected]
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(asked), timeout=30)
    found = {}
    for name, answer in zip(expected, answers):
        found[name] = answer.HasField("file_descriptor_response")
        print(f"server: {name}", "found" if found[name] else grpc.StatusCode.NOT_FOUND.name)
        assert found[name] or answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
server.stop(None)
raise SystemExit(0 if found == expected else f"expected {expected}, got {found}")
PYTHON
for implementation in upb python; do
  PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=$implementation "$folder/venv/bin/python" "$folder/ask.py"
done
