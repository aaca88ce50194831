"""Floods: more connections, half requests, unread answers and log lines than any honest client makes."""

from __future__ import annotations

import random
import socket
import struct
import time
from contextlib import ExitStack, suppress

import numpy as np
from support.infer_inputs import infer_input
from support.metrics import port_of
from support.models import drop
from support.repository_index import index_of
from support.waiting import PATIENCE_SECONDS, wait_until

from campaign import models
from campaign.action import Kind
from campaign.actions.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, head, opening, send
from campaign.actions.fuzz_http import http_request
from campaign.requests import connected, infer_message
from campaign.stage import Stage

MOST_CONNECTIONS = 200
HELD_SECONDS = 3.0
LARGE_ROWS = 1 << 17
"""One MiB of FP32 [rows, 2]."""
LARGE_REQUESTS = 128
LOG_MODEL = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for number in range(20_000):
            print("a line of a flood", number, "x" * (number % 400), file=sys.stderr)
        sys.stdout.write("y" * 3_000_000)
        sys.stdout.flush()
        values = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]) for value in values]
"""
LOG_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""


def connections(stage: Stage, random: random.Random) -> None:
    """Open many silent connections to one of three ports, and close all together."""
    port = random.choice((stage.poll.port, stage.poll.http_port, port_of(stage.poll)))
    with ExitStack() as opened:
        for _ in range(random.randint(50, MOST_CONNECTIONS)):
            with suppress(OSError):
                opened.enter_context(connected(port))
        time.sleep(random.uniform(0, HELD_SECONDS))


def churn(stage: Stage, random: random.Random) -> None:
    """Close connections as soon as they are made, half of them with a reset."""
    port = random.choice((stage.poll.port, stage.poll.http_port))
    for number in range(MOST_CONNECTIONS):
        with suppress(OSError), connected(port) as opened:
            if number % 2:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_requests(stage: Stage, random: random.Random) -> None:
    """Send HTTP headers and bodies that never end, to the port for requests or for metrics."""
    port = random.choice((stage.poll.http_port, port_of(stage.poll)))
    whole = http_request("POST", f"/v2/models/{models.FUZZED}/infer", b"{", {"Content-Length": "100000"})
    with ExitStack() as opened:
        sockets = []
        for _ in range(random.randint(40, 120)):
            with suppress(OSError):
                one = opened.enter_context(connected(port))
                send(one, whole[: random.randint(1, len(whole))])
                sockets.append(one)
        end = time.monotonic() + HELD_SECONDS
        while time.monotonic() < end:
            for one in random.sample(sockets, min(5, len(sockets))):
                send(one, b"x")
            time.sleep(0.1)


def _small_receiver(port: int) -> socket.socket:
    """A socket for which the kernel buffers little."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.settimeout(HELD_SECONDS)
    opened.connect(("127.0.0.1", port))
    return opened


def unread_http(stage: Stage, random: random.Random) -> None:
    """Ask for large answers over HTTP and read none of them."""
    body = np.zeros((LARGE_ROWS, 2), np.float32).tobytes()
    text = (
        f'{{"inputs":[{{"name":"X","shape":[{LARGE_ROWS},2],"datatype":"FP32","parameters":'
        f'{{"binary_data_size":{len(body)}}}}}],"parameters":{{"binary_data_output":true}}}}'
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Length": str(len(text) + len(body))}
    request = http_request("POST", f"/v2/models/{models.LARGE}/infer", text + body, headers)
    with ExitStack() as opened:
        for _ in range(random.randint(5, 30)):
            with suppress(OSError):
                send(opened.enter_context(_small_receiver(stage.poll.http_port)), request)
        time.sleep(HELD_SECONDS)


def unread_grpc(stage: Stage, random: random.Random) -> None:
    """Make calls that give the server no flow-control window for its answers."""
    whole = infer_message(models.LARGE, 2048).SerializeToString()
    data = b"\0" + struct.pack(">I", len(whole)) + whole
    with ExitStack() as opened:
        for _ in range(random.randint(2, 10)):
            with suppress(OSError):
                one = opened.enter_context(_small_receiver(stage.poll.port))
                send(one, opening((4, 0)))
                for stream in (1, 3):
                    pieces = [data[start : start + 16_000] for start in range(0, len(data), 16_000)]
                    frames = [frame(DATA, 0, stream, piece) for piece in pieces] + [frame(DATA, END_STREAM, stream)]
                    send(one, frame(HEADERS, END_HEADERS, stream, head()) + b"".join(frames))
        time.sleep(HELD_SECONDS)


def large_requests(stage: Stage, random: random.Random) -> None:
    """Send many requests of 1 MiB simultaneously; every answer is right. The server has to give back more memory after
    it than its resources may have grown by."""
    values = np.arange(2 * LARGE_ROWS, dtype=np.float32).reshape(LARGE_ROWS, 2)
    entry = infer_input("X", values)
    told: list[object] = []
    with stage.poll.client() as client:
        for _ in range(LARGE_REQUESTS):
            client.async_infer(models.LARGE, [entry], lambda result, error: told.append(error or result))
        wait_until(lambda: len(told) == LARGE_REQUESTS, "all answers of a MiB")
    for result in told:
        if isinstance(result, Exception):
            raise AssertionError(f"a request of a MiB failed: {result}")
        assert np.array_equal(result.as_numpy("Y"), values + np.float32(models.FIRST))  # type: ignore[attr-defined]


def log(stage: Stage, random: random.Random) -> None:
    """Add a model that writes megabytes to its output, call it a few times, and remove it."""
    name = f"talker_{random.getrandbits(32):x}"
    staged = drop(stage.staging, name, LOG_MODEL, LOG_CONFIG)
    folder = staged.rename(stage.copied / name)
    entry = infer_input("X", np.ones((1, 2), np.float32))
    with stage.poll.client() as client:
        wait_until(lambda: client.is_model_ready(name), f"{name} ready")
        for _ in range(2):
            client.infer(name, [entry], client_timeout=PATIENCE_SECONDS)
    remove_model(stage, folder.name)


def remove_model(stage: Stage, name: str) -> None:
    """Remove the model's folder, and wait until the index lists all of its versions as unloaded, or none."""
    (stage.copied / name).rename(stage.staging / f"{name}.gone")

    def is_gone() -> bool:
        states = index_of(stage.poll, name).values()
        return all(state == ("UNAVAILABLE", "unloaded") for state in states)

    wait_until(is_gone, f"{name} unloaded")


KINDS = (
    Kind("flood.connections", connections),
    Kind("flood.churn", churn),
    Kind("flood.half-requests", half_requests),
    Kind("flood.unread-http", unread_http, 3),
    Kind("flood.unread-grpc", unread_grpc, 3),
    Kind("flood.large", large_requests, 2),
    Kind("flood.log", log, 2),
)
