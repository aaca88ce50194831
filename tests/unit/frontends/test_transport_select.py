"""Which transport is chosen, and the options that both share."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import grpc
import pytest

from rocserve.frontends.grpc import reactor_calls
from rocserve.frontends.grpc.aio import AioTransport
from rocserve.frontends.grpc.reactor import ReactorTransport
from rocserve.frontends.grpc.select import create_transport, reactor_fault, untested_version
from rocserve.frontends.grpc.transport import TransportOptions, UnaryRoute, channel_arguments

LOG = logging.getLogger("test.grpc")
OPTIONS = TransportOptions(address="127.0.0.1", port=0)


@pytest.mark.parametrize("kind", ["auto", "reactor"])
def test_the_reactor_is_taken_where_it_works(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(create_transport(kind, OPTIONS, {}, LOG), ReactorTransport)
    assert caplog.records == []


def test_aio_is_taken_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(create_transport("aio", OPTIONS, {}, LOG), AioTransport)
    assert caplog.records == []


def test_there_are_no_other_kinds() -> None:
    with pytest.raises(ValueError, match="auto, reactor, aio; got 'threads'"):
        create_transport("threads", OPTIONS, {}, LOG)


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("1.61.9", False),
        ("1.62.0", True),
        ("1.85.1", True),
        ("1.89.0.dev1", True),
        ("1.90.0rc1", False),
        ("2.0.0", False),
        ("0.99", False),
        ("unknown", False),
    ],
)
def test_the_tested_range_of_grpcio(version: str, tested: bool) -> None:
    assert (untested_version(version) == "") is tested
    assert tested or version in untested_version(version)


def test_an_untested_grpcio_falls_back_to_aio_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grpc, "__version__", "1.90.0")
    with caplog.at_level(logging.INFO):
        assert isinstance(create_transport("auto", OPTIONS, {}, LOG), AioTransport)
    assert len(caplog.records) == 1
    assert "1.90.0 is outside the tested range" in caplog.text
    with pytest.raises(RuntimeError, match=r"1\.90\.0"):
        create_transport("reactor", OPTIONS, {}, LOG)


def test_a_private_name_that_is_gone_falls_back_to_aio(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(reactor_calls.cygrpc, "ReceiveCloseOnServerOperation")
    for module in (reactor_calls.__name__, ReactorTransport.__module__):
        monkeypatch.delitem(sys.modules, module)
    transport = create_transport("auto", OPTIONS, {"/test.Service/Unary": UnaryRoute(lambda call: None)}, LOG)
    assert isinstance(transport, AioTransport)
    assert "ReceiveCloseOnServerOperation" in caplog.text


def test_a_private_name_that_behaves_otherwise_falls_back_to_aio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reactor_calls, "_SendMessage", lambda message, flags: reactor_calls.cygrpc.SendMessageOperation(b"", flags)
    )
    assert "self-check" in reactor_fault(LOG)


def test_the_self_check_finds_no_fault_here() -> None:
    assert reactor_fault(LOG) == ""


def test_options_reach_grpc_under_its_own_names() -> None:
    arguments = dict(
        channel_arguments(
            TransportOptions(
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
                handshake_timeout_ms=9,
                max_connections=10,
            )
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
        & dict(channel_arguments(TransportOptions())).keys()
    )


def test_options_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="none, low, medium, high; got 'best'"):
        TransportOptions(response_compression_level="best")
    with pytest.raises(ValueError, match="certificate and its key"):
        TransportOptions(use_ssl=True)
    with pytest.raises(ValueError, match="root certificate"):
        TransportOptions(use_ssl_mutual=True, server_cert=Path("c"), server_key=Path("k"))
