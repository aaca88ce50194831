"""Requests to a server's HTTP front end, by plain HTTP and by Triton's client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tritonclient.http as http_client

from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

PAGE_CALLS = (
    *("/", "/ui/app.js", "/openapi.json", "/v2/overview", "/v2/version-details?name=m", "/v2/server-state"),
    *("/v2/page/acts", "/v2/events", "/v2/load-report?name=m", "/v2/ensemble-graph?name=m"),
)
"""What the page at / loads, which --allow-ui=false takes away."""


def ask(
    server: RocserveProcess,
    verb: str,
    path: str,
    body: Any = b"",
    headers: Mapping[str, str] | None = None,
    timeout: float = PATIENCE_SECONDS,
) -> tuple[int, Any]:
    """Status and body of an answer; a JSON body as plain values."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=timeout)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(verb, path, data or None, dict(headers or {}))
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    try:
        return response.status, json.loads(answer)
    except ValueError:
        return response.status, answer


LEFT = np.array([[1, 2, 3, 4]], dtype=np.int32)
RIGHT = np.array([[5, 5, 5, 5]], dtype=np.int32)


def add_sub_inputs(binary: bool = True) -> list[http_client.InferInput]:
    inputs = [http_client.InferInput(f"INPUT{index}", [1, 4], "INT32") for index in (0, 1)]
    for entry, array in zip(inputs, (LEFT, RIGHT), strict=True):
        entry.set_data_from_numpy(array, binary_data=binary)
    return inputs


def add_sub_body(**more: Any) -> dict[str, Any]:
    inputs = [
        {"name": f"INPUT{index}", "shape": [1, 4], "datatype": "INT32", "data": array.tolist()}
        for index, array in enumerate((LEFT, RIGHT))
    ]
    return {"inputs": inputs, **more}


def sums(answer: Any) -> list[int]:
    return next(output["data"] for output in answer["outputs"] if output["name"] == "OUTPUT0")
