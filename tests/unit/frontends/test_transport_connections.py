"""Connections: many concurrent ones, broken ones, compression, shutdown, nothing left behind."""

from __future__ import annotations

import gc
import itertools
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.http2 import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, head
from support.waiting import PATIENCE_SECONDS, wait_until
from support.workers import open_descriptors

from rocserve.core.errors import ServeError, StatusCode
from rocserve.frontends.grpc.transport import StreamCall, StreamRoute, UnaryCall, UnaryRoute

UNARY = "/test.Service/Unary"
STREAM = "/test.Service/Stream"


def one(handler: Callable[[UnaryCall], None]) -> dict[str, UnaryRoute]:
    return {UNARY: UnaryRoute(handler)}


def echo(call: UnaryCall) -> None:
    call.reply(call.message)


# Many


CROWD = """
import asyncio, sys
import grpc.aio

async def main(port, count, patience):
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(count)]
    calls = [channel.unary_unary("/test.Service/Unary") for channel in channels]
    for _ in range(2):
        answers = await asyncio.gather(*(call(b"%d" % n, timeout=patience) for n, call in enumerate(calls)))
        assert answers == [b"%d" % n for n in range(count)]
    print("answered", len(channels))

asyncio.run(main(*map(int, sys.argv[1:])))
"""


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 8192 and hard > 0 else max(soft, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
def test_a_thousand_connections_at_once(serve: Any, many_descriptors: None) -> None:
    peers: set[str] = set()

    def handle(call: UnaryCall) -> None:
        peers.add(call.peer)
        call.reply(call.message)

    served = serve(one(handle))
    command = [sys.executable, "-c", CROWD, str(served.port), "1000", str(round(PATIENCE_SECONDS))]
    client = subprocess.run(command, check=False, capture_output=True, text=True)
    assert client.stdout == "answered 1000\n", client.stderr[-2000:]
    # Each connection served both of its calls, so all were open together.
    assert len(peers) == 1000
    assert not served.transport.calls.live


# Broken


def half_a_message(path: str) -> bytes:
    """The bytes of a client that dies within a DATA frame, in the middle of a message."""
    body = b"\x00" + struct.pack(">I", 5000) + bytes(700)
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, head(path))
        + frame(DATA, 0, 1, body, length=2000)
    )


@pytest.mark.long
@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("path", [UNARY, STREAM])
def test_a_client_that_vanishes_in_mid_message_leaves_nothing(serve: Any, how: str, path: str) -> None:
    events: list[str] = []

    class Receiver:
        def on_message(self, message: bytes) -> None:
            events.append("message")

        def on_half_close(self) -> None:
            pass

        def on_cancel(self) -> None:
            events.append("cancel")

    def open_stream(call: StreamCall) -> Receiver:
        events.append("open")
        return Receiver()

    def handle(call: UnaryCall) -> None:
        events.append("message") if call.message != b"well" else None
        call.reply(call.message)

    served = serve({UNARY: UnaryRoute(handle), STREAM: StreamRoute(open_stream)})
    unary = served.unary()
    assert unary(b"well", timeout=PATIENCE_SECONDS) == b"well"
    descriptors = open_descriptors()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(half_a_message(path))
            # The answer to our SETTINGS shows that the server has accepted the connection.
            client.settimeout(PATIENCE_SECONDS)
            assert client.recv(1000)
            if path == STREAM:
                wait_until(lambda: events[-1:] == ["open"])
            if how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if path == STREAM:
            wait_until(lambda: events[-1:] == ["cancel"])
    wait_until(lambda: not served.transport.calls.live)

    def nothing_left() -> bool:
        return open_descriptors() <= descriptors and served.calls_alive() == 0

    wait_until(nothing_left)
    assert "message" not in events
    assert unary(b"well", timeout=PATIENCE_SECONDS) == b"well"


def test_clients_that_speak_no_http2_harm_nobody(serve: Any) -> None:
    served = serve(one(echo))
    source = random.Random(11)
    noise = [source.randbytes(source.randrange(1, 500)) for _ in range(50)]
    for sent in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(1000), *noise, *[PREFACE + item for item in noise]):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(sent)
    assert served.unary()(b"well", timeout=PATIENCE_SECONDS) == b"well"


# Compression


@contextmanager
def counting_proxy(port: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Forwards one connection and counts its bytes each way."""
    counts = {"up": 0, "down": 0}
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(65536):
                counts[way] += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve_one() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            down = threading.Thread(target=pump, args=(server, client, "down"), daemon=True)
            down.start()
            pump(client, server, "up")
            down.join(PATIENCE_SECONDS)

    thread = threading.Thread(target=serve_one, daemon=True)
    thread.start()
    yield listener.getsockname()[1], counts
    thread.join(PATIENCE_SECONDS)
    listener.close()


@pytest.mark.parametrize("level", ["none", "low", "medium", "high"])
@pytest.mark.parametrize("request_compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_messages_are_compressed_as_asked(serve: Any, level: str, request_compression: grpc.Compression) -> None:
    message = bytes(500_000)
    served = serve(one(echo), infer_response_compression_level=level)
    with (
        counting_proxy(served.port) as (port, counts),
        grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)) as channel,
    ):
        assert channel.unary_unary(UNARY)(message, timeout=PATIENCE_SECONDS, compression=request_compression) == message
    assert (counts["up"] < 50_000) is (request_compression is grpc.Compression.Gzip)
    assert (counts["down"] < 50_000) is (level != "none")


def test_a_small_message_that_unpacks_to_a_large_one_is_refused(serve: Any) -> None:
    unary = serve(one(echo), max_message_bytes=1_000_000).unary()
    with pytest.raises(grpc.RpcError) as raised:
        unary(bytes(1_000_001), timeout=PATIENCE_SECONDS, compression=grpc.Compression.Gzip)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# The end


def test_calls_in_flight_finish_within_the_grace_and_new_ones_are_refused(serve: Any) -> None:
    held: list[UnaryCall] = []
    served = serve(one(held.append))
    unary, other = served.unary(), served.unary()
    future = unary.future(b"work", timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(held) == 1)
    stopping = threading.Thread(target=served.transport.stop, args=(PATIENCE_SECONDS,))
    stopping.start()

    timeouts = (0.2 * 2**attempt for attempt in itertools.count())

    def refused() -> bool:
        try:
            other(b"new", timeout=next(timeouts))
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
        return False

    wait_until(refused)
    assert stopping.is_alive()
    assert not future.done()
    served.do(lambda: held[0].reply(b"done"))
    assert future.result() == b"done"
    stopping.join(PATIENCE_SECONDS)
    assert not stopping.is_alive()


def test_what_is_left_after_the_grace_is_cancelled_and_late_answers_are_dropped(serve: Any) -> None:
    held: list[UnaryCall] = []
    streams: list[StreamCall] = []
    told: list[str] = []

    class Receiver:
        def on_message(self, message: bytes) -> None:
            pass

        def on_half_close(self) -> None:
            pass

        def on_cancel(self) -> None:
            told.append("stream")

    def handle(call: UnaryCall) -> None:
        if call.message == b"watched":
            call.watch_cancellation(lambda: told.append("unary"))
        held.append(call)

    def open_stream(call: StreamCall) -> Receiver:
        streams.append(call)
        return Receiver()

    served = serve({UNARY: UnaryRoute(handle), STREAM: StreamRoute(open_stream)})
    unary = served.unary()
    futures = [unary.future(message, timeout=PATIENCE_SECONDS) for message in (b"watched", b"unwatched")]
    stream = served.stream()(iter([]), timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(held) == 2 and len(streams) == 1)
    served.transport.stop(0.3)
    for future in [*futures, stream]:
        wait_until(future.done)
        assert future.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    assert sorted(told) == ["stream", "unary"]
    error = ServeError(StatusCode.INTERNAL, "late")
    for call in held:
        served.do(partial(call.watch_cancellation, lambda: None), partial(call.reply, b"late"))
        served.do(partial(call.reply_error, error))
    stream_call = streams[0]
    served.do(partial(stream_call.send, b"late"), stream_call.request_next)
    served.do(partial(stream_call.finish, StatusCode.OK, "late"))
    assert not served.transport.calls.live


def test_calls_learn_of_their_end_however_late_its_event_comes(serve: Any) -> None:
    held: list[UnaryCall] = []
    told: list[str] = []

    def handle(call: UnaryCall) -> None:
        call.watch_cancellation(lambda: told.append("left"))
        held.append(call)

    served = serve(one(handle))
    future = served.unary().future(b"", timeout=PATIENCE_SECONDS)
    wait_until(lambda: held)
    polling = served.transport._polling
    late: list[tuple[float, Any]] = []

    def next_event(take: Callable[[], Any] = polling.next) -> Any:
        """The events of gRPC's core; a call's end comes half a second later."""
        if late and time.monotonic() > late[0][0]:
            return late.pop()[1]
        event = take()
        if getattr(event.tag, "__name__", "") == "_on_close":
            late.append((time.monotonic() + 0.5, event))
            return SimpleNamespace(tag=None)
        return event

    served.do(lambda: setattr(polling, "next", next_event))
    served.transport.stop(0)
    assert told == ["left"]
    wait_until(future.done)


def test_an_idle_server_with_open_connections_stops_at_once_and_twice(serve: Any) -> None:
    served = serve(one(echo))
    assert served.unary()(b"", timeout=PATIENCE_SECONDS) == b""
    # Longer than a test may take.
    served.transport.stop(600)
    served.transport.stop(600)


def test_who_has_connected_when_the_port_is_closed_is_served(serve: Any) -> None:
    """Its first bytes, sent immediately, are not answered by a reset."""
    served = serve(one(echo), max_connection_age_ms=1000)
    resets: list[str] = []
    refused = threading.Event()

    def connect() -> None:
        while not refused.is_set():
            with socket.socket() as client:
                client.settimeout(0.5)
                try:
                    client.connect(("127.0.0.1", served.port))
                except OSError:  # Refused, or no longer answered.
                    refused.set()
                    return
                client.settimeout(PATIENCE_SECONDS)
                try:
                    client.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
                    if not client.recv(9):
                        resets.append("closed")
                except OSError as error:
                    resets.append(str(error))

    threads = [threading.Thread(target=connect) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    served.transport.stop(PATIENCE_SECONDS)
    for thread in threads:
        thread.join()
    assert resets == []


def test_a_port_may_be_shared_when_asked(serve: Any) -> None:
    port = serve(one(echo), reuse_port=True).port
    assert serve(one(echo), reuse_port=True, port=port).port == port


def test_an_address_that_is_not_ours_is_said(serve: Any) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1:0"):
        serve(one(echo), address="192.0.2.1")


def test_an_ipv6_address_is_served(serve: Any) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    served = serve(one(echo), address="::1")
    with grpc.insecure_channel(f"[::1]:{served.port}") as channel:
        assert channel.unary_unary(UNARY)(b"six", timeout=PATIENCE_SECONDS) == b"six"


# Nothing left behind


class Echo:
    def __init__(self, call: StreamCall) -> None:
        self.call = call

    def on_message(self, message: bytes) -> None:
        self.call.send(message)
        self.call.request_next()

    def on_half_close(self) -> None:
        self.call.finish(StatusCode.OK, "")

    def on_cancel(self) -> None:
        pass


@pytest.mark.long
def test_two_thousand_calls_leave_nothing(serve: Any) -> None:
    def handle(call: UnaryCall) -> None:
        if call.message == b"wait":
            call.watch_cancellation(lambda: None)
            return
        call.reply(call.message)

    served = serve({UNARY: UnaryRoute(handle), STREAM: StreamRoute(Echo)})
    unary, stream = served.unary(), served.stream()

    def use() -> None:
        for number in range(1000):
            assert unary(b"x", timeout=PATIENCE_SECONDS) == b"x"
            if number % 10 == 0:
                unary.future(b"wait", timeout=PATIENCE_SECONDS).cancel()
                with pytest.raises(grpc.RpcError):
                    unary(b"wait", timeout=0.005)
                assert list(stream(iter([b"1", b"2"]), timeout=PATIENCE_SECONDS)) == [b"1", b"2"]

    def nothing_left() -> bool:
        gc.collect()
        return served.calls_alive() == 0 and not served.transport.calls.live

    use()
    wait_until(nothing_left)
    descriptors, objects = open_descriptors(), len(gc.get_objects())
    use()
    wait_until(nothing_left)
    # The client's threads let their last calls go a little later.
    wait_until(lambda: open_descriptors() <= descriptors and len(gc.get_objects()) < objects + 200)


def test_a_stopped_transport_leaves_no_descriptor_and_no_thread(serve: Any) -> None:
    def cycle() -> None:
        served = serve(one(echo))
        assert served.unary()(b"", timeout=PATIENCE_SECONDS) == b""
        served.channels.pop().close()
        served.transport.stop(1)

    cycle()
    descriptors, threads = open_descriptors(), threading.active_count()
    for _ in range(5):
        cycle()
    wait_until(lambda: threading.active_count() <= threads)
    # The client's own threads come and go.
    wait_until(lambda: len(open_descriptors() - descriptors) <= 2)


def test_calls_leave_no_cycles_for_the_garbage_collector(serve: Any) -> None:
    def handle(call: UnaryCall) -> None:
        call.watch_cancellation(lambda: None)
        call.reply(call.message)

    served = serve({UNARY: UnaryRoute(handle), STREAM: StreamRoute(Echo)})
    unary, stream = served.unary(), served.stream()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            assert unary(b"x", timeout=PATIENCE_SECONDS) == b"x"
            assert list(stream(iter([b"1", b"2"]), timeout=PATIENCE_SECONDS)) == [b"1", b"2"]
        wait_until(lambda: served.calls_alive() == 0)
    finally:
        gc.enable()
