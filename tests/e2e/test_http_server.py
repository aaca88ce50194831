"""The HTTP front end's start, its end and its flags; test_lifecycle.py has a server without it."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
from pathlib import Path
from typing import Any

from support.http_requests import PAGE_CALLS, ask
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

PYTHON_MODELS = Path(__file__).parents[1] / "data" / "python-models"


def test_http_alone_without_the_page_and_restricted(serve: Any, repository: Path) -> None:
    drop(repository, "a", add_constant(1.0))
    server: RocserveProcess = serve(
        repository,
        flags=(
            "--allow-grpc=false",
            "--allow-ui=false",
            "--http-restricted-api=model-repository,statistics:admin-key=secret",
            "--http-restricted-api=logging:other=x",
        ),
    )
    assert "GRPCInferenceService" not in server.log_text
    wait_until(lambda: ask(server, "GET", "/v2/health/ready")[0] == 200, "readiness")
    assert {ask(server, "GET", path)[0] for path in PAGE_CALLS} == {404}
    refusal = 403, {"error": "This API is restricted, expecting header 'admin-key'"}
    assert ask(server, "POST", "/v2/repository/index") == refusal
    assert ask(server, "GET", "/v2/models/a/stats", headers={"admin-key": "wrong"}) == refusal
    assert ask(server, "GET", "/v2/logging", headers={"admin-key": "secret"})[0] == 403
    status, rows = ask(server, "POST", "/v2/repository/index", headers={"Admin-Key": "secret"})
    assert (status, rows) == (200, [{"name": "a", "version": "1", "state": "READY"}])
    assert ask(server, "GET", "/v2/models/a")[0] == 200


def test_requests_in_hand_are_finished_at_the_end(serve: Any, repository: Path) -> None:
    shutil.copytree(PYTHON_MODELS / "patient", repository / "patient")
    server: RocserveProcess = serve(repository, flags=("--exit-timeout-secs=600",))
    server.wait_until_ready()
    body = {"inputs": [{"name": "WAIT", "shape": [1], "datatype": "BOOL", "data": [False]}]}
    # A client with a running request, and a client with an idle connection.
    idle = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
    idle.request("GET", "/v2/health/ready")
    assert json.loads(idle.getresponse().read()) == {"ready": True}
    sending = socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE_SECONDS)
    data = json.dumps(body).encode()
    sending.sendall(
        b"POST /v2/models/patient/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        % len(data)
    )
    assert sending.recv(100).startswith(b"HTTP/1.1 100 Continue"), "the server has the head"
    server.begin_end()
    idle.request("POST", "/v2/models/patient/infer", data)
    answer = idle.getresponse()
    # Both were accepted earlier.
    assert (answer.status, answer.headers["Connection"]) == (200, "close")
    sending.sendall(data)
    assert sending.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.process is not None
    assert server.process.wait(PATIENCE_SECONDS) == 0
