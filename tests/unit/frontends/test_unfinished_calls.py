"""The bounds of calls that wait for their clients, small,."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from support.http2 import Http2Connection, prefixed
from support.waiting import wait_until

from rocserve.core.errors import StatusCode
from rocserve.frontends.grpc.transport import StreamCall, StreamRoute, UnaryCall, UnaryRoute
from rocserve.frontends.grpc.unfinished import WaitingLimits

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
        # gRPC shows an ended call so first.
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
    served = serve(Routes().table(), waiting=WaitingLimits(connection=100, total=64))
    with Http2Connection(served.port) as modest, Http2Connection(served.port) as greedy:
        first = modest.begin(method, prefixed(b"whole")[:6])
        streams = [greedy.begin(method) for _ in range(80)]
        # Of 80 and one; some more, for room. grpc.aio hands over calls that come at once in about their order.
        wait_until(lambda: 17 <= 80 - statuses(greedy, streams).count(None) < 40)
        assert statuses(greedy, streams)[0] == StatusCode.RESOURCE_EXHAUSTED
        assert set(statuses(greedy, streams)) == {None, StatusCode.RESOURCE_EXHAUSTED}
        assert "the server has more than 64 calls" in greedy.answers[streams[0]].text
        modest.send(first, b"hole", ends=True)
        [answer] = modest.wait(first)
        assert (answer.status, bytes(answer.data)) == (StatusCode.OK, prefixed(b"whole"))


@pytest.mark.long
@pytest.mark.parametrize("method", [UNARY, STREAM])
def test_a_full_connection_loses_its_oldest_once_they_have_waited_for_long(serve: Any, method: str) -> None:
    served = serve(Routes().table(), waiting=WaitingLimits(connection=40, patience_seconds=1.0))
    with Http2Connection(served.port) as connection:
        streams = [connection.begin(method) for _ in range(45)]
        wait_until(lambda: statuses(connection, streams)[:5] == [StatusCode.RESOURCE_EXHAUSTED] * 5)
        assert statuses(connection, streams)[5:] == [None] * 40
        assert "this connection has more than 40 calls" in connection.answers[streams[0]].text
        [answer] = connection.wait(connection.begin(method, prefixed(b"new"), ends=True))
        assert answer.status == StatusCode.OK


def test_a_burst_of_large_messages_loses_none(serve: Any) -> None:
    unary = serve(Routes().table(), waiting=WaitingLimits(connection=8)).unary(UNARY)
    messages = [number.to_bytes(2) * 50_000 for number in range(100)]
    futures = [unary.future(message, timeout=30) for message in messages]
    assert [future.result() for future in futures] == messages


def test_streams_that_have_nothing_to_answer_wait_again(serve: Any) -> None:
    routes = Routes()
    served = serve(routes.table(), waiting=WaitingLimits(connection=100, total=32))
    with Http2Connection(served.port) as connection:
        streams = [connection.begin(STREAM, prefixed(b"x")) for _ in range(48)]
        wait_until(lambda: statuses(connection, streams).count(StatusCode.RESOURCE_EXHAUSTED) >= 16)
        wait_until(lambda: sum(stream.is_over for stream in routes.streams) >= 16)
        open_one = streams[statuses(connection, streams).index(None)]
        connection.send(open_one, prefixed(b"y"), ends=True)
        [answer] = connection.wait(open_one)
        assert (answer.status, bytes(answer.data)) == (StatusCode.OK, prefixed(b"x") + prefixed(b"y"))


def test_calls_that_wait_for_their_clients_are_none_of_those_in_flight(serve: Any) -> None:
    served = serve(Routes().table(), max_concurrent_calls=4)
    with Http2Connection(served.port) as connection:
        for method in (UNARY, STREAM) * 10:
            connection.begin(method)
        assert served.unary(UNARY)(b"x", timeout=10) == b"x"


@pytest.mark.long
def test_a_message_has_its_time(serve: Any) -> None:
    served = serve(Routes().table(), waiting=WaitingLimits(message_seconds=1.0))
    with Http2Connection(served.port) as connection:
        half, stream = connection.begin(UNARY, prefixed(b"whole")[:6]), connection.begin(STREAM)
        [answer] = connection.wait(half)
        assert answer.status == StatusCode.DEADLINE_EXCEEDED
        assert connection.answers[stream].status is None


def test_what_an_ended_call_still_sends_goes_nowhere(serve: Any) -> None:
    served = serve(Routes().table(), waiting=WaitingLimits(message_seconds=0.5))
    with Http2Connection(served.port) as connection:
        half = connection.begin(UNARY, prefixed(bytes(60_000))[:100])
        connection.wait(half)
        [answer] = connection.wait(connection.begin(UNARY, prefixed(b"x"), ends=True))
        assert (answer.status, bytes(answer.data)) == (StatusCode.OK, prefixed(b"x"))
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        assert channel.unary_unary(UNARY)(b"y", timeout=10) == b"y"
