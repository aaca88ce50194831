"""A Python model whose requests wait for a gate, so that a test decides when they end."""

from __future__ import annotations

import http.client
from pathlib import Path

from support.http_requests import ask
from support.models import answering, drop
from support.server import RocserveProcess

CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 1, 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 2 ] }
"""


def drop_gated(repository: Path) -> Path:
    """Drop the model `gated`, Y = X: its only instance waits until the returned file exists."""
    gate = repository.parent / "gate"
    waits = f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)"
    drop(repository, "gated", answering("X", "Y", first=waits), CONFIG)
    return gate


def gate_of(server: RocserveProcess) -> Path:
    """The file for which the model `gated` of a server waits."""
    return server.repositories[0].parent / "gate"


def waiting(server: RocserveProcess) -> int:
    """The number of requests to the model `gated` that have not begun to run."""
    status, overview = ask(server, "GET", "/v2/overview")
    assert status == 200, overview
    return next(int(model.get("pending_requests", 0)) for model in overview["models"] if model["name"] == "gated")


def none_waits(server: RocserveProcess) -> bool:
    """Whether all requests to the model `gated` have begun or are dropped; a front end that dies does not tell."""
    try:
        return waiting(server) == 0
    except (AssertionError, OSError, http.client.HTTPException):
        return False
