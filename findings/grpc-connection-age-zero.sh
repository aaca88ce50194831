#!/usr/bin/env bash
# grpcio 1.85.3: the server option grpc.max_connection_age_ms = 0 does not mean "no limit". Each connection reaches its age at
# once and gets a GOAWAY, so the client connects again for almost every call, after growing pauses: one that asks without a
# pause is answered twice in three seconds instead of thousands of times, and sees no error. An age of 200 ms costs almost
# nothing: the client is moved by GOAWAY fifteen times, and no call is lost. "No limit" is to leave the option out.
# Seen on 2026-11-29 (one client, three seconds):
#   no age: thousands of calls, 0 failed
#   200 ms: thousands of calls, 0 failed
#   0 ms: less than a tenth, 0 failed
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.3
cat >"$folder/ages.py" <<'PYTHON'
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
method = "/echo.Echo/Echo"
most = 0
for name, options in (
    ("no age", ()),
    ("200 ms", (("grpc.max_connection_age_ms", 200),)),
    ("0 ms", (("grpc.max_connection_age_ms", 0),)),
):
    server = grpc.server(ThreadPoolExecutor(4), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", {"Echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    answered = failed = 0
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(method)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            try:
                call(b"x", timeout=30, wait_for_ready=True)
                answered += 1
            except grpc.RpcError:
                failed += 1
    server.stop(0)
    most = max(most, answered)
    print(f"{name}: {'less than a tenth' if answered < most / 10 else 'thousands of calls'}, {failed} failed")
PYTHON
diff <("$folder/venv/bin/python" "$folder/ages.py") - <<'SEEN'
no age: thousands of calls, 0 failed
200 ms: thousands of calls, 0 failed
0 ms: less than a tenth, 0 failed
SEEN
