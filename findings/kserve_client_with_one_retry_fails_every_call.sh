#!/usr/bin/env bash
# kserve 0.21.0, grpcio 1.85.3: InferenceGRPCClient(retries=1) writes 1 into the gRPC service configuration as the number of
# attempts, and gRPC takes two at least. The whole channel is then refused, so that every call to a healthy server fails with
# INVALID_ARGUMENT, which looks like the server's answer.
# Seen on 2026-11-28:
#   retries=2: True
#   retries=1: INVALID_ARGUMENT, maxAttempts error:must be at least 2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check kserve==0.21.0 grpcio==1.85.3
cat >"$folder/retries.py" <<'PYTHON'
import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

import grpc
from kserve import InferenceGRPCClient
from kserve.protocol.grpc import grpc_predict_v2_pb2 as messages
from kserve.protocol.grpc import grpc_predict_v2_pb2_grpc as services


class Live(services.GRPCInferenceServiceServicer):
    def ServerLive(self, request, context):
        return messages.ServerLiveResponse(live=True)


async def ask(port: int, retries: int) -> object:
    client = InferenceGRPCClient(f"127.0.0.1:{port}", retries=retries)
    try:
        return await client.is_server_live()
    except grpc.RpcError as error:
        return f"{error.code().name}, {re.search('maxAttempts error:[a-z0-9 ]*', error.details())[0]}"


server = grpc.server(ThreadPoolExecutor(2))
services.add_GRPCInferenceServiceServicer_to_server(Live(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
for retries in (2, 1):
    print(f"retries={retries}: {asyncio.run(ask(port, retries))}", flush=True)
server.stop(0)
PYTHON
diff <("$folder/venv/bin/python" "$folder/retries.py" 2>/dev/null) - <<'SEEN'
retries=2: True
retries=1: INVALID_ARGUMENT, maxAttempts error:must be at least 2
SEEN
