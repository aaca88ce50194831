"""How long connections live: their age, and clients that ping too often."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import pytest

from rocserve.frontends.grpc.transport import UnaryCall, UnaryRoute

UNARY = "/test.Service/Unary"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GO_AWAY = 4, 6, 7
PATIENCE_SECONDS = 20


def tell_peer(call: UnaryCall) -> None:
    call.reply(call.peer.encode())


def test_connections_end_for_their_age_and_no_call_fails(serve: Any) -> None:
    served = serve({UNARY: UnaryRoute(tell_peer)}, max_connection_age_ms=200, max_connection_age_grace_ms=5000)
    call = served.unary()
    peers = set()
    end = time.monotonic() + PATIENCE_SECONDS
    while len(peers) < 3 and time.monotonic() < end:
        peers.add(call(b"", timeout=10, wait_for_ready=True))
    assert len(peers) >= 3


def test_connections_stay_without_a_limit_of_age(serve: Any) -> None:
    call = serve({UNARY: UnaryRoute(tell_peer)}).unary()
    peers = {call(b"", timeout=10) for _ in range(200)}
    assert len(peers) == 1


def frame(kind: int, payload: bytes) -> bytes:
    """An HTTP/2 frame of the connection itself (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, 0)) + struct.pack(">I", 0) + payload


def kinds_of_frames(data: bytes) -> list[int]:
    kinds = []
    while len(data) >= 9:
        kinds.append(data[3])
        data = data[9 + int.from_bytes(data[:3], "big") :]
    return kinds


def answers_to_pings(port: int, count: int) -> list[int]:
    """The kinds of the frames that the server sends to who pings again and again, until it has answered as often."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, b""))
        data = b""
        for number in range(count):
            connection.sendall(frame(PING, number.to_bytes(8, "big")))
            while kinds_of_frames(data).count(PING) <= number and GO_AWAY not in kinds_of_frames(data):
                more = connection.recv(65536)
                if not more:
                    return kinds_of_frames(data)
                data += more
            if GO_AWAY in kinds_of_frames(data):
                break
    return kinds_of_frames(data)


@pytest.mark.parametrize(
    ("options", "is_ended"),
    [
        ({}, True),
        ({"http2_max_ping_strikes": 0}, False),
        # Without calls gRPC takes two hours in place of a shorter pause, unless pings are permitted then.
        ({"http2_min_recv_ping_interval_without_data_ms": 0}, True),
        ({"http2_min_recv_ping_interval_without_data_ms": 0, "keepalive_permit_without_calls": True}, False),
    ],
)
def test_who_pings_too_often_is_sent_away(serve: Any, options: dict[str, int], is_ended: bool) -> None:
    served = serve({UNARY: UnaryRoute(tell_peer)}, **options)
    assert (GO_AWAY in answers_to_pings(served.port, 20)) is is_ended
