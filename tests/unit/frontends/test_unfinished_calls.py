"""Calls that wait for their clients, with small bounds; and answers that clients do not read, counted and given up in
time."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    Http2Connection,
    frame,
    head,
    prefixed,
)
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.errors import StatusCode
from rocserve.frontends.grpc.transport import (
    StreamCall,
    StreamRoute,
    TransportLimits,
    UnaryCall,
    UnaryRoute,
    WaitingLimits,
)
from rocserve.plane.freed_memory import FreedMemory, private_bytes
from rocserve.plane.loop import PlaneLoop

UNARY, STREAM = "/test.Service/Unary", "/test.Service/Stream"


class Echo:
    """A stream that answers each message with itself."""

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self.is_over = False

    def on_message(self, message: bytes) -> None:
        self._call.send(message)
        self._call.request_next()

    def on_half_close(self) -> None:
        # The first sign that gRPC gives of an ended call.
        self.is_over = True
        self._call.finish(StatusCode.OK, "")

    def on_cancel(self) -> None:
        self.is_over = True


class Routes:
    def __init__(self) -> None:
        self.streams: list[Echo] = []

    def table(self) -> dict[str, UnaryRoute | StreamRoute]:
        return {UNARY: UnaryRoute(self._unary), STREAM: StreamRoute(self._stream)}

    def _unary(self, call: UnaryCall) -> None:
        call.reply(call.message)

    def _stream(self, call: StreamCall) -> Echo:
        self.streams.append(Echo(call))
        return self.streams[-1]


def statuses(connection: Http2Connection, streams: list[int]) -> list[int | None]:
    connection.receive(0.05)
    return [connection.answers[stream].status for stream in streams]


@pytest.mark.parametrize("method", [UNARY, STREAM])
def test_the_largest_connections_oldest_go_first_when_all_are_too_many(serve: Any, method: str) -> None:
    served = serve(Routes().table(), waiting=WaitingLimits(burst=64))
    with Http2Connection(served.port) as modest, Http2Connection(served.port) as greedy:
        first = modest.begin(method, prefixed(b"whole")[:6])
        streams = [greedy.begin(method) for _ in range(80)]

        def oldest_are_refused() -> bool:
            found = statuses(greedy, streams)
            return found[0] is not None and found.count(None) <= 80 - 17

        wait_until(oldest_are_refused)
        # Of 80 and one, with some more as a margin.
        assert statuses(greedy, streams).count(None) > 40
        assert set(statuses(greedy, streams)) == {None, StatusCode.RESOURCE_EXHAUSTED}
        assert "more than 64 calls wait" in greedy.answers[streams[0]].text
        modest.send(first, b"hole", ends=True)
        [answer] = modest.wait(first)
        assert (answer.status, bytes(answer.data)) == (StatusCode.OK, prefixed(b"whole"))


@pytest.mark.long
@pytest.mark.parametrize("method", [UNARY, STREAM])
def test_the_largest_connection_loses_its_oldest_once_they_have_waited_for_long(serve: Any, method: str) -> None:
    served = serve(Routes().table(), waiting=WaitingLimits(most=40))
    with Http2Connection(served.port) as modest, Http2Connection(served.port) as greedy:
        first = modest.begin(method, prefixed(b"whole")[:6])
        streams = [greedy.begin(method) for _ in range(44)]
        wait_until(lambda: statuses(greedy, streams)[:5] == [StatusCode.RESOURCE_EXHAUSTED] * 5)
        assert statuses(greedy, streams)[5:] == [None] * 39
        assert "more than 40 calls wait" in greedy.answers[streams[0]].text
        modest.send(first, b"hole", ends=True)
        [answer] = modest.wait(first)
        assert (answer.status, bytes(answer.data)) == (StatusCode.OK, prefixed(b"whole"))


def test_a_burst_of_large_messages_loses_none(serve: Any) -> None:
    waiting = WaitingLimits(most=8, patience_seconds=PATIENCE_SECONDS)
    unary = serve(Routes().table(), waiting=waiting).unary(UNARY)
    messages = [number.to_bytes(2) * 50_000 for number in range(100)]
    futures = [unary.future(message, timeout=PATIENCE_SECONDS) for message in messages]
    assert [future.result() for future in futures] == messages


def test_streams_that_have_nothing_to_answer_wait_again(serve: Any) -> None:
    routes = Routes()
    served = serve(routes.table(), waiting=WaitingLimits(burst=32))
    with Http2Connection(served.port) as connection:
        streams = [connection.begin(STREAM, prefixed(b"x")) for _ in range(48)]
        wait_until(lambda: statuses(connection, streams).count(StatusCode.RESOURCE_EXHAUSTED) >= 16)
        wait_until(lambda: sum(stream.is_over for stream in routes.streams) >= 16)
        # The youngest is certainly open.
        open_one = streams[-1]
        connection.send(open_one, prefixed(b"y"), ends=True)
        [answer] = connection.wait(open_one)
        assert (answer.status, bytes(answer.data)) == (StatusCode.OK, prefixed(b"x") + prefixed(b"y"))


def test_calls_that_wait_for_their_clients_are_none_of_those_in_flight(serve: Any) -> None:
    served = serve(Routes().table(), max_concurrent_calls=4)
    with Http2Connection(served.port) as connection:
        for method in (UNARY, STREAM) * 10:
            connection.begin(method)
        assert served.unary(UNARY)(b"x", timeout=PATIENCE_SECONDS) == b"x"


def test_calls_whose_messages_come_slowly_end_when_the_process_has_too_much_memory(serve: Any) -> None:
    """24 clients send all of 8 MiB but its last byte, where 96 MiB more may be held."""
    for _ in FreedMemory.give_back():  # Other tests of this process may have freed as much as the calls take.
        pass
    served = serve(Routes().table(), most_private_bytes=private_bytes() + (96 << 20))
    almost = prefixed(bytes(8 << 20))[:-1]
    with ExitStack() as opened:
        clients = [opened.enter_context(Http2Connection(served.port)) for _ in range(4)]
        calls = [(client, client.begin(UNARY, almost)) for _ in range(6) for client in clients]

        def refused() -> set[str]:
            for client in clients:
                client.receive(0.05)
            answers = [client.answers[stream] for client, stream in calls]
            return {answer.text for answer in answers if answer.status == StatusCode.RESOURCE_EXHAUSTED}

        wait_until(refused)
        assert [text for text in refused() if "its share of the machine's" in text]
        assert served.unary(UNARY)(b"x", timeout=PATIENCE_SECONDS) == b"x"


def test_what_an_ended_call_still_sends_goes_nowhere(serve: Any) -> None:
    served = serve(Routes().table(), waiting=WaitingLimits(message_seconds=0.5))
    with Http2Connection(served.port) as connection:
        half = connection.begin(UNARY, prefixed(bytes(60_000))[:100])
        connection.wait(half)
        # The further calls may take as long as they need.
        served.do(lambda: setattr(served.transport.calls.waiting, "limits", WaitingLimits()))
        [answer] = connection.wait(connection.begin(UNARY, prefixed(b"x"), ends=True))
        assert (answer.status, bytes(answer.data)) == (StatusCode.OK, prefixed(b"x"))
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        assert channel.unary_unary(UNARY)(b"y", timeout=PATIENCE_SECONDS) == b"y"


ANSWER_BYTES = 1 << 20
ANSWERS = 3
CLIENTS = 5


def call_without_reading(port: int, path: str) -> socket.socket:
    """A call whose client never widens its initial window of 64 KiB."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
    message = frame(DATA, END_STREAM, 1, prefixed(b"x"))
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, head(path)) + message)
    return connection


def answer(call: UnaryCall) -> None:
    call.reply(bytes(ANSWER_BYTES) if call.message else b"")


class Answers:
    """Sends several messages on a stream, then ends it."""

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
    served = serve(ROUTES, write_timeout_seconds=PATIENCE_SECONDS)
    transport = served.transport
    for _ in range(CLIENTS):
        connections.enter_context(call_without_reading(served.port, path))
    wait_until(lambda: transport.calls.memory.answers.own_bytes == CLIENTS * held)
    served.do(transport.calls.cancel_unread)
    assert transport.calls.memory.answers.own_bytes == CLIENTS * held, "given up before its time"

    def let_time_pass() -> None:
        transport.calls.sending.update(dict.fromkeys(transport.calls.sending, time.monotonic() - 1000))
        transport.calls.cancel_unread()

    # 90 s, and 16 s more for 1 MiB.
    served.do(let_time_pass)
    wait_until(lambda: transport.calls.memory.answers.own_bytes == 0 and not transport.calls.sending)
    assert len(served.unary()(b"x", timeout=PATIENCE_SECONDS)) == ANSWER_BYTES
    wait_until(lambda: transport.calls.memory.answers.own_bytes == 0 and not transport.calls.sending)


@pytest.mark.parametrize("path", [UNARY, STREAM])
def test_a_client_that_vanishes_with_answers_unread_leaves_nothing(serve: Any, path: str) -> None:
    served = serve(ROUTES)
    transport = served.transport
    for _ in range(CLIENTS):
        with call_without_reading(served.port, path):
            wait_until(lambda: transport.calls.memory.answers.own_bytes > 0)
        wait_until(lambda: transport.calls.memory.answers.own_bytes == 0 and not transport.calls.sending)


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
        rpc = stream(held_open(done), timeout=PATIENCE_SECONDS)
        time.sleep(random.uniform(0, 0.006))
        rpc.cancel()
        done.set()
    transport = served.transport
    wait_until(
        lambda: (
            not transport.calls.live and not transport.calls.sending and not transport.calls.memory.answers.own_bytes
        )
    )


def held_open(done: threading.Event) -> Iterator[bytes]:
    yield b"x"
    done.wait(PATIENCE_SECONDS)


def test_large_answers_have_longer() -> None:
    options = TransportLimits(write_timeout_seconds=60)
    assert options.write_seconds(1000) < 61
    assert options.write_seconds(64 << 20) == 60 + 1024


def test_a_connection_that_says_nothing_is_closed(serve: Any) -> None:
    served = serve(ROUTES, handshake_timeout_ms=500)
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_SECONDS) as connection:
        while connection.recv(1000):
            pass


def test_one_connection_too_many_is_closed_and_the_others_are_served(serve: Any, connections: ExitStack) -> None:
    served = serve(ROUTES, max_connections=2)
    unary = served.unary()
    assert unary(b"", timeout=PATIENCE_SECONDS) == b""
    connections.enter_context(call_without_reading(served.port, UNARY))
    wait_until(lambda: served.transport.calls.memory.answers.own_bytes > 0, "its answer")
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_SECONDS) as connection:
        try:
            assert connection.recv(1000) == b""
        except ConnectionResetError:
            pass
    assert unary(b"", timeout=PATIENCE_SECONDS) == b""
