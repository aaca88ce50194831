"""The transport's options; the age of connections; clients that ping too often; unusable certificates."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from support.http2 import PREFACE, SETTINGS, Http2Connection, frame, prefixed
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.errors import StatusCode
from rocserve.frontends.grpc.transport import (
    RECEIVE_WINDOW_BYTES,
    TransportLimits,
    UnaryCall,
    UnaryRoute,
    channel_arguments,
)
from rocserve.frontends.tls import certificate_files
from rocserve.settings import GrpcSettings, HttpSettings


@pytest.mark.parametrize(
    ("age_ms", "grace_ms", "expected"),
    [
        (0, 0, (20_000, None)),
        # Without an age the grace time has no effect.
        (0, 5_000, (20_000, None)),
        (10_000, 5_000, (10_000, 5_000)),
        (10_000, 0, (10_000, None)),
        (60_000, 0, (20_000, None)),
        # Calls end as late as they would without the renewal.
        (60_000, 5_000, (20_000, 45_000)),
    ],
)
def test_connections_are_renewed_and_calls_keep_their_time(
    age_ms: int, grace_ms: int, expected: tuple[int, int | None]
) -> None:
    settings = GrpcSettings(max_connection_age_ms=age_ms, max_connection_age_grace_ms=grace_ms)
    arguments = dict(channel_arguments(settings, TransportLimits(renewal_ms=20_000)))
    names = ("grpc.max_connection_age_ms", "grpc.max_connection_age_grace_ms")
    assert tuple(arguments.get(name) for name in names) == expected


def test_options_reach_grpc_under_its_own_names() -> None:
    arguments = dict(
        channel_arguments(
            GrpcSettings(
                infer_response_compression_level="medium",
                keepalive_time_ms=1,
                keepalive_timeout_ms=2,
                keepalive_permit_without_calls=True,
                http2_max_pings_without_data=3,
                http2_min_recv_ping_interval_without_data_ms=4,
                http2_max_ping_strikes=5,
                max_connection_age_ms=6,
                max_connection_age_grace_ms=7,
                max_connection_idle_ms=8,
            ),
            TransportLimits(handshake_timeout_ms=9, max_connections=10),
        )
    )
    assert (
        arguments.items()
        >= {
            "grpc.default_compression_level": 2,
            "grpc.keepalive_time_ms": 1,
            "grpc.keepalive_timeout_ms": 2,
            "grpc.keepalive_permit_without_calls": 1,
            "grpc.http2.max_pings_without_data": 3,
            "grpc.http2.min_ping_interval_without_data_ms": 4,
            "grpc.http2.max_ping_strikes": 5,
            "grpc.max_connection_age_ms": 6,
            "grpc.max_connection_age_grace_ms": 7,
            "grpc.max_connection_idle_ms": 8,
            "grpc.server_handshake_timeout_ms": 9,
            "grpc.max_allowed_incoming_connections": 10,
            "grpc.so_reuseport": 0,
            "grpc.max_receive_message_length": 2**31 - 1,
        }.items()
    )
    assert (
        not {"grpc.max_connection_age_ms", "grpc.default_compression_level"}
        & dict(channel_arguments(GrpcSettings(), TransportLimits())).keys()
    )


def test_tls_without_its_files_is_refused() -> None:
    with pytest.raises(ValueError, match="certificate and its key"):
        certificate_files(GrpcSettings(), HttpSettings(use_ssl=True))
    mutual = GrpcSettings(use_ssl_mutual=True, server_cert=Path("c"), server_key=Path("k"))
    with pytest.raises(ValueError, match="root certificate"):
        certificate_files(mutual, mutual)


UNARY = "/test.Service/Unary"
PING, GO_AWAY = 6, 7


def tell_peer(call: UnaryCall) -> None:
    call.reply(call.peer.encode())


def test_connections_end_for_their_age_and_no_call_fails(serve: Any) -> None:
    served = serve({UNARY: UnaryRoute(tell_peer)}, max_connection_age_ms=200, max_connection_age_grace_ms=100_000)
    call = served.unary()
    peers: set[bytes] = set()

    def came_from_several() -> bool:
        peers.add(call(b"", timeout=PATIENCE_SECONDS, wait_for_ready=True))
        return len(peers) >= 3

    wait_until(came_from_several)


def test_connections_stay_without_a_limit_of_age(serve: Any) -> None:
    call = serve({UNARY: UnaryRoute(tell_peer)}).unary()
    peers = {call(b"", timeout=PATIENCE_SECONDS) for _ in range(200)}
    assert len(peers) == 1


def test_windows_do_not_grow(serve: Any) -> None:
    """The core reads what a window holds without a pause, and the loop serves nobody meanwhile."""
    served = serve({UNARY: UnaryRoute(lambda call: call.reply(b""))})
    piece = bytes(1 << 20)
    rooms = []
    with Http2Connection(served.port) as connection:
        stream = connection.begin(UNARY, prefixed(bytes(64 << 20))[:5])
        for _ in range(64):
            connection.send(stream, piece)
            connection.receive()
            rooms.append(connection.room(stream))
        connection.send(stream, b"", ends=True)
        [answer] = connection.wait(stream)
    assert answer.status == StatusCode.OK
    assert max(rooms) <= 1.5 * RECEIVE_WINDOW_BYTES


def kinds_of_frames(data: bytes) -> list[int]:
    kinds = []
    while len(data) >= 9:
        kinds.append(data[3])
        data = data[9 + int.from_bytes(data[:3], "big") :]
    return kinds


def answers_to_pings(port: int, count: int) -> list[int]:
    """The kinds of the frames that the server sends to a client that pings repeatedly, until it has answered as many
    pings."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        data = b""
        for number in range(count):
            connection.sendall(frame(PING, 0, 0, number.to_bytes(8, "big")))
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
        # Without calls gRPC replaces a shorter pause by two hours, unless pings without calls are permitted.
        ({"http2_min_recv_ping_interval_without_data_ms": 0}, True),
        ({"http2_min_recv_ping_interval_without_data_ms": 0, "keepalive_permit_without_calls": True}, False),
    ],
)
def test_who_pings_too_often_is_sent_away(serve: Any, options: dict[str, int], is_ended: bool) -> None:
    served = serve({UNARY: UnaryRoute(tell_peer)}, **options)
    assert (GO_AWAY in answers_to_pings(served.port, 20)) is is_ended


@pytest.mark.parametrize(
    ("file", "error", "text"),
    [("missing.pem", FileNotFoundError, r"missing\.pem"), ("nonsense.pem", OSError, r"PEM.*nonsense\.pem")],
)
def test_an_unusable_certificate_is_said(
    serve: Any, tmp_path: Path, file: str, error: type[OSError], text: str
) -> None:
    (tmp_path / "nonsense.pem").write_text("no certificate")
    path = tmp_path / file
    with pytest.raises(error, match=text):
        serve({UNARY: UnaryRoute(tell_peer)}, use_ssl=True, server_cert=path, server_key=path)
