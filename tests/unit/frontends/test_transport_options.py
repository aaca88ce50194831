"""The transport's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.frontends.grpc.transport import TransportLimits, channel_arguments
from rocserve.frontends.listen_address import certificate_files
from rocserve.settings import GrpcSettings, HttpSettings


def test_options_reach_grpc_under_its_own_names() -> None:
    arguments = dict(
        channel_arguments(
            GrpcSettings(
                response_compression_level="medium",
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
