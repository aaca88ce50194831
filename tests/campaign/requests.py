"""Plain requests of actions: gRPC and HTTP with arbitrary bytes, and sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
from support.waiting import PATIENCE_SECONDS
from tritonclient.grpc import service_pb2 as messages

SERVICE = "/inference.GRPCInferenceService"
SECONDS = 10.0
"""How long an action waits for its socket: a server may take no more bytes."""
MOST_BYTES = 1 << 22
"""Bytes of an answer that are read at most."""
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@contextmanager
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, OWN_CONNECTION) as opened:
        yield opened


def call(
    opened: grpc.Channel, method: str, request: bytes, seconds: float = PATIENCE_SECONDS
) -> tuple[str, str, bytes]:
    """The name of the status, its text, and the answer's bytes."""
    try:
        answer = opened.unary_unary(f"{SERVICE}/{method}")(request, timeout=seconds)
    except grpc.RpcError as error:
        return error.code().name, error.details() or "", b""
    return "OK", "", answer


def infer_message(model: str, rows: int = 1) -> messages.ModelInferRequest:
    """A request to a model that adds a constant."""
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
    """What the server answers to the bytes, until it closes or is silent for `seconds`."""
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
