"""The transport's options. How long connections live: their age, and clients that ping too often. TLS and mutual TLS,
with certificates made for the occasion by the openssl command."""

from __future__ import annotations

import shutil
import socket
import struct
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.certificates import Authority, make_authority

from rocserve.frontends.grpc.transport import TransportLimits, UnaryCall, UnaryRoute, channel_arguments
from rocserve.frontends.listen_address import certificate_files
from rocserve.settings import GrpcSettings, HttpSettings


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
    assert arguments["grpc.default_compression_level"] == 2
    assert arguments["grpc.keepalive_time_ms"] == 1
    assert arguments["grpc.keepalive_timeout_ms"] == 2
    assert arguments["grpc.keepalive_permit_without_calls"] == 1
    assert arguments["grpc.http2.max_pings_without_data"] == 3
    assert arguments["grpc.http2.min_ping_interval_without_data_ms"] == 4
    assert arguments["grpc.http2.max_ping_strikes"] == 5
    assert arguments["grpc.max_connection_age_ms"] == 6
    assert arguments["grpc.max_connection_age_grace_ms"] == 7
    assert arguments["grpc.max_connection_idle_ms"] == 8
    assert arguments["grpc.server_handshake_timeout_ms"] == 9
    assert arguments["grpc.max_allowed_incoming_connections"] == 10
    assert arguments["grpc.so_reuseport"] == 0
    assert arguments["grpc.max_receive_message_length"] == 2**31 - 1
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


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is missing")
    folder = tmp_path_factory.mktemp("certificates")
    return make_authority(folder / "ours"), make_authority(folder / "theirs")


def echo(call: UnaryCall) -> None:
    call.reply(call.message)


def answer(port: int, trusted: Authority, shown: Authority | None = None) -> bytes:
    credentials = grpc.ssl_channel_credentials(
        trusted.root.read_bytes(),
        shown.key.read_bytes() if shown else None,
        shown.certificate.read_bytes() if shown else None,
    )
    options = (
        ("grpc.ssl_target_name_override", "localhost"),
        ("grpc.use_local_subchannel_pool", 1),
    )
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        result: bytes = channel.unary_unary(UNARY)(b"secret", timeout=10)
        return result


def tls(authority: Authority, **more: Any) -> dict[str, Any]:
    return {"use_ssl": True, "server_cert": authority.certificate, "server_key": authority.key, **more}


def test_tls_serves_who_trusts_the_certificate_and_nobody_else(
    serve: Any, authorities: tuple[Authority, Authority]
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(ours))
    assert answer(served.port, ours) == b"secret"
    with pytest.raises(grpc.RpcError) as raised:
        answer(served.port, theirs)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError) as raised:
        served.unary()(b"plain", timeout=10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert answer(served.port, ours) == b"secret"


def test_mutual_tls_serves_only_clients_with_a_certificate_that_is_vouched_for(
    serve: Any, authorities: tuple[Authority, Authority]
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(ours, use_ssl_mutual=True, root_cert=ours.root))
    assert answer(served.port, ours, shown=ours) == b"secret"
    for shown in (None, theirs):
        with pytest.raises(grpc.RpcError) as raised:
            answer(served.port, ours, shown)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_that_is_not_there_is_said(serve: Any, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(FileNotFoundError, match=r"missing\.pem"):
        serve({UNARY: UnaryRoute(echo)}, use_ssl=True, server_cert=missing, server_key=missing)


def test_a_certificate_that_is_none_is_said(serve: Any, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    with pytest.raises(OSError, match=r"PEM.*nonsense\.pem"):
        serve({UNARY: UnaryRoute(echo)}, use_ssl=True, server_cert=nonsense, server_key=nonsense)


def renew(place: Authority, with_: Authority) -> None:
    """As certificate managers do: each file is replaced by a rename."""
    for old, new in zip(
        (place.root, place.certificate, place.key), (with_.root, with_.certificate, with_.key), strict=True
    ):
        fresh = old.with_suffix(".fresh")
        shutil.copyfile(new, fresh)
        fresh.rename(old)


@pytest.fixture
def place(tmp_path: Path, authorities: tuple[Authority, Authority]) -> Authority:
    """Where the server's certificates are; ours at first."""
    place = Authority(tmp_path / "root.pem", tmp_path / "cert.pem", tmp_path / "cert.key")
    renew(place, authorities[0])
    return place


def refused(port: int, trusted: Authority, shown: Authority | None = None) -> bool:
    with pytest.raises(grpc.RpcError) as raised:
        answer(port, trusted, shown)
    return raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_renewed_certificate_is_shown_and_open_connections_stay(
    serve: Any, authorities: tuple[Authority, Authority], place: Authority
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(place))
    credentials = grpc.ssl_channel_credentials(ours.root.read_bytes())
    options = (("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1))
    with grpc.secure_channel(f"127.0.0.1:{served.port}", credentials, options) as channel:
        call = channel.unary_unary(UNARY)
        assert call(b"before", timeout=10) == b"before"
        renew(place, theirs)
        assert answer(served.port, theirs) == b"secret"
        assert refused(served.port, ours)
        assert call(b"after", timeout=10) == b"after"


def test_a_renewed_root_decides_about_clients(
    serve: Any, authorities: tuple[Authority, Authority], place: Authority
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(ours, use_ssl_mutual=True, root_cert=place.root))
    assert answer(served.port, ours, shown=ours) == b"secret"
    assert refused(served.port, ours, shown=theirs)
    renew(place, theirs)
    assert answer(served.port, ours, shown=theirs) == b"secret"
    assert refused(served.port, ours, shown=ours)


def test_half_a_renewal_changes_nothing_until_the_other_half_comes(
    serve: Any, authorities: tuple[Authority, Authority], place: Authority
) -> None:
    ours, theirs = authorities
    served = serve({UNARY: UnaryRoute(echo)}, **tls(place))
    shutil.copyfile(theirs.certificate, place.certificate)
    assert answer(served.port, ours) == b"secret"
    place.key.unlink()
    assert answer(served.port, ours) == b"secret"
    place.certificate.write_text("no certificate")
    assert answer(served.port, ours) == b"secret"
    renew(place, theirs)
    assert answer(served.port, theirs) == b"secret"
