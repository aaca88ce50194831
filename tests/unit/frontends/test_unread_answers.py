"""Answers that their clients do not read,: counted, and given up in time."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, head, prefixed
from support.waiting import wait_until

from rocserve.core.errors import StatusCode
from rocserve.frontends.grpc.transport import StreamCall, StreamRoute, TransportLimits, UnaryCall, UnaryRoute
from rocserve.plane.loop import PlaneLoop

UNARY, STREAM = "/test.Service/Unary", "/test.Service/Stream"
ANSWER_BYTES = 1 << 20
ANSWERS = 3
CLIENTS = 5


def call_without_reading(port: int, path: str) -> socket.socket:
    """A call whose client never widens the window of 64 KiB that it begins with."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    message = frame(DATA, END_STREAM, 1, prefixed(b"x"))
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, head(path)) + message)
    return connection


def answer(call: UnaryCall) -> None:
    call.reply(bytes(ANSWER_BYTES) if call.message else b"")


class Answers:
    """Several messages to a stream at once, then its end."""

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self.is_cancelled = False

    def on_message(self, message: bytes) -> None:
        for _ in range(ANSWERS):
            self._call.send(bytes(ANSWER_BYTES))
        self._call.finish(StatusCode.OK, "")

    def on_half_close(self) -> None: ...

    def on_cancel(self) -> None:
        self.is_cancelled = True


ROUTES = {UNARY: UnaryRoute(answer), STREAM: StreamRoute(Answers)}


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("path", "held"), [(UNARY, ANSWER_BYTES), (STREAM, ANSWERS * ANSWER_BYTES)])
def test_answers_that_nobody_reads_count_until_they_are_given_up(
    serve: Any, connections: ExitStack, path: str, held: int
) -> None:
    served = serve(ROUTES, write_timeout_seconds=0.3)
    transport = served.transport
    for _ in range(CLIENTS):
        connections.enter_context(call_without_reading(served.port, path))
    wait_until(lambda: transport.memory.answer_bytes == CLIENTS * held)
    time.sleep(0.2)
    transport.give_up_unread()
    assert transport.memory.answer_bytes == CLIENTS * held, "given up before its time"
    # 0.3 s, and 16 s more for a MiB.
    transport.sending.update(dict.fromkeys(transport.sending, time.monotonic() - 1000))
    transport.give_up_unread()
    wait_until(lambda: transport.memory.answer_bytes == 0 and not transport.sending)
    assert len(served.unary()(b"x", timeout=10)) == ANSWER_BYTES
    wait_until(lambda: transport.memory.answer_bytes == 0 and not transport.sending)


@pytest.mark.parametrize("path", [UNARY, STREAM])
def test_a_client_that_vanishes_with_answers_unread_leaves_nothing(serve: Any, path: str) -> None:
    served = serve(ROUTES)
    transport = served.transport
    for _ in range(CLIENTS):
        with call_without_reading(served.port, path):
            wait_until(lambda: transport.memory.answer_bytes > 0)
        wait_until(lambda: transport.memory.answer_bytes == 0 and not transport.sending)


def test_streams_that_are_cancelled_while_answers_are_sent_leave_nothing(serve: Any, plane: PlaneLoop) -> None:
    class Delayed(Answers):
        def on_message(self, message: bytes) -> None:
            plane.call_at(time.monotonic() + random.uniform(0, 0.004), self._answer)

        def _answer(self) -> None:
            for _ in range(2):
                self._call.send(bytes(2000))
            self._call.finish(StatusCode.OK, "")

    served = serve({STREAM: StreamRoute(Delayed)})
    stream = served.stream()
    for _ in range(600):
        done = threading.Event()
        rpc = stream(held_open(done), timeout=20)
        time.sleep(random.uniform(0, 0.006))
        rpc.cancel()
        done.set()
    transport = served.transport
    wait_until(lambda: not transport.live and not transport.sending and not transport.memory.answer_bytes)


def held_open(done: threading.Event) -> Iterator[bytes]:
    yield b"x"
    done.wait(20)


def test_large_answers_have_longer() -> None:
    options = TransportLimits(write_timeout_seconds=60)
    assert options.write_seconds(1000) < 61
    assert options.write_seconds(64 << 20) == 60 + 1024


def test_a_connection_that_says_nothing_is_closed(serve: Any) -> None:
    served = serve(ROUTES, handshake_timeout_ms=500)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        while connection.recv(1000):
            pass
    assert time.monotonic() - began < 10


def test_one_connection_too_many_is_closed_and_the_others_are_served(serve: Any, connections: ExitStack) -> None:
    served = serve(ROUTES, max_connections=2)
    unary = served.unary()
    assert unary(b"", timeout=10) == b""
    connections.enter_context(call_without_reading(served.port, UNARY))
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        try:
            assert connection.recv(1000) == b""
        except ConnectionResetError:
            pass
    assert unary(b"", timeout=10) == b""
