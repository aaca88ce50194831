"""Plain requests that actions send: by gRPC with any bytes, by HTTP with any bytes, by sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as messages

SERVICE = "/inference.GRPCInferenceService"
SECONDS = 10.0
"""One request of an action; what is not answered then is given up by this side."""
MOST_BYTES = 1 << 22
"""Of an answer that are read."""
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@contextmanager
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, OWN_CONNECTION) as opened:
        yield opened


def call(opened: grpc.Channel, method: str, request: bytes, seconds: float = SECONDS) -> tuple[str, str, bytes]:
    """Name of the status, its text, and the answer's bytes."""
    try:
        answer = opened.unary_unary(f"{SERVICE}/{method}")(request, timeout=seconds)
    except grpc.RpcError as error:
        return error.code().name, error.details() or "", b""
    return "OK", "", answer


def infer_message(model: str, rows: int = 1) -> messages.ModelInferRequest:
    """To a model that adds a constant."""
    request = messages.ModelInferRequest(model_name=model)
    request.inputs.add(name="X", datatype="FP32", shape=[rows, 2])
    request.raw_input_contents.append(np.arange(2 * rows, dtype=np.float32).tobytes())
    return request


def json_body(model: str) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}], "id": model}


@contextmanager
def connected(port: int, seconds: float = SECONDS) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as opened:
        yield opened


def exchange(port: int, data: bytes, seconds: float = 0.5) -> bytes:
    """What the server says to the bytes until it closes, or says no more for so long."""
    with connected(port, seconds) as opened:
        try:
            opened.sendall(data)
        except (ConnectionError, TimeoutError):
            return b""
        return read_all(opened)


def read_all(opened: socket.socket) -> bytes:
    received = bytearray()
    with suppress(ConnectionError, TimeoutError):
        while len(received) < MOST_BYTES and (part := opened.recv(65536)):
            received += part
    return bytes(received)
