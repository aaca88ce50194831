"""A model whose requests say how long they take and how large their answers are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from support.infer_inputs import infer_input
from support.models import drop

UNTIL_RELEASED = -1
"""Milliseconds of a request that waits for release()."""

# The first three numbers of X: milliseconds to wait, bytes of the answer, and 1 to end the worker.
_SOURCE = """
import os
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils

RELEASED = pathlib.Path(__file__).parents[3] / "released"


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            milliseconds, size, crash = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[:3]
            while milliseconds == -1 and not RELEASED.exists():
                time.sleep(0.01)
            time.sleep(max(0, milliseconds) / 1000)
            if crash:
                os._exit(3)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(size, np.uint8))]))
        return answers
"""
_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_UINT8 dims: [ -1 ] }
instance_group { count: 2 kind: KIND_CPU }
"""


def write_stretch(repository: Path) -> None:
    drop(repository, "stretch", _SOURCE, _CONFIG)


def release(repository: Path) -> None:
    (repository.parent / "released").touch()


def stretch_values(milliseconds: int = 0, answer_bytes: int = 0, request_bytes: int = 12, crash: bool = False):
    values = np.zeros(request_bytes // 4, np.int32)
    values[:3] = milliseconds, answer_bytes, crash
    return values


def grpc_inputs(values: np.ndarray) -> list[grpc_client.InferInput]:
    return [infer_input("X", values)]


def http_request(values: np.ndarray, **headers: str) -> bytes:
    """The bytes of a request on a connection. It asks for a binary answer."""
    entry = infer_input("X", values, http_client)
    output = http_client.InferRequestedOutput("Y", binary_data=True)
    body, json_length = http_client.InferenceServerClient.generate_request_body([entry], outputs=[output])
    lines = [
        "POST /v2/models/stretch/infer HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body)}",
        f"Inference-Header-Content-Length: {json_length}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
