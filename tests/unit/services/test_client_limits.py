"""Limits of a client; client addresses that may make admin calls; methods that need a header."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.exchange import Exchange
from rocserve.core.responses import Answer, InferResponse
from rocserve.frontends.grpc.service import peer_of
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services import client_limits
from rocserve.services.access import (
    ADMIN_METHODS,
    GRPC_HEADER_PREFIX,
    PROTOCOLS,
    Access,
    Peer,
    Restriction,
    restrictions,
)
from rocserve.services.client_limits import ClientLimits
from rocserve.settings import AdminAddresses, RestrictedProtocols
from rocserve.settings.server import admin_addresses


class Answers:
    """A responder that records nothing."""

    def expect_many(self) -> None: ...
    def send(self, answer: object, final: bool = True) -> None: ...
    def watch_cancellation(self, callback: object) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admit(limits: ClientLimits, address: str) -> Exchange:
    exchange = Exchange(Answers())
    limits.admit(address, exchange)
    return exchange


def refusal(limits: ClientLimits, address: str) -> str:
    with pytest.raises(ServeError) as raised:
        admit(limits, address)
    assert raised.value.code is StatusCode.RESOURCE_EXHAUSTED
    return raised.value.text


@pytest.mark.parametrize("last", [InferResponse.of("m", "1", "", ()), None, internal("x")])
def test_a_client_has_so_many_requests_in_flight_however_they_end(last: Answer) -> None:
    limits = ClientLimits(2, 0)
    first = admit(limits, "10.0.0.1")
    admit(limits, "10.0.0.1")
    assert refusal(limits, "10.0.0.1") == (
        "the client 10.0.0.1 has 2 requests in flight, the most for one client (--max-requests-per-client); wait"
        " for answers, and try again"
    )
    admit(limits, "10.0.0.2")
    # Responses that others follow do not count, and none comes after the last one.
    first.send(InferResponse.of("m", "1", "", ()), final=False)
    first.send(internal("one of several"), final=False)
    refusal(limits, "10.0.0.1")
    first.send(last)
    with pytest.raises(RuntimeError):
        first.send(last)
    admit(limits, "10.0.0.1")
    refusal(limits, "10.0.0.1")


def test_clients_are_forgotten_when_they_have_nothing_in_flight() -> None:
    limits = ClientLimits(2, 0)
    exchanges = [admit(limits, f"10.0.0.{number}") for number in range(50)]
    assert len(limits) == 50
    for exchange in exchanges:
        exchange.send(None)
    assert len(limits) == 0


def test_a_client_sends_so_many_requests_a_second() -> None:
    clock = Clock()
    limits = ClientLimits(0, 10, clock)
    for _ in range(10):
        admit(limits, "10.0.0.1").send(None)
    assert "more than 10 requests a second" in refusal(limits, "10.0.0.1")
    admit(limits, "10.0.0.2")
    clock.now += 0.25
    for _ in range(2):
        admit(limits, "10.0.0.1").send(None)
    refusal(limits, "10.0.0.1")
    # At most a second's worth accumulates.
    clock.now += 3600
    for _ in range(10):
        admit(limits, "10.0.0.1").send(None)
    refusal(limits, "10.0.0.1")


def test_less_than_one_request_a_second() -> None:
    clock = Clock()
    limits = ClientLimits(0, 0.5, clock)
    admit(limits, "10.0.0.1")
    clock.now += 1.9
    refusal(limits, "10.0.0.1")
    clock.now += 0.2
    admit(limits, "10.0.0.1")


def test_the_table_of_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "MOST_CLIENTS", 100)
    clock = Clock()
    limits = ClientLimits(0, 2, clock)
    for number in range(100):
        admit(limits, f"10.0.0.{number}").send(None)
    # All others share one client's limit.
    for number in range(2):
        admit(limits, f"10.0.1.{number}").send(None)
    assert "the client others sends" in refusal(limits, "10.0.1.2")
    assert len(limits) == 101
    clock.now += 1.0
    admit(limits, "10.0.1.3")
    assert len(limits) == 1


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::1", True),
        ("unix", "unix", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_which_addresses_are_one_client(one: str, other: str, are_one: bool) -> None:
    limits = ClientLimits(1, 0)
    admit(limits, one)
    if are_one:
        refusal(limits, other)
    else:
        admit(limits, other)


LOAD = "RepositoryModelLoad"


@dataclass(frozen=True)
class Call:
    """The part of a gRPC call that is used here."""

    peer: str
    metadata: tuple[tuple[str, str], ...] = ()


def is_taken(admin: Access, peer: Peer, method: str = LOAD) -> bool:
    try:
        admin.check_admin(method, peer, pb.RepositoryModelLoadRequest)
    except ServeError as error:
        assert error.code is StatusCode.PERMISSION_DENIED
        return False
    return True


def test_what_changes_the_server_is_an_admin_call() -> None:
    """A new method fails here until somebody has decided."""
    tell_or_infer = {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig"} | {
        *("ModelInfer", "ModelStreamInfer", "ModelStatistics", "RepositoryIndex", "ModelList", "HasHardware"),
        *("SystemSharedMemoryStatus", "CudaSharedMemoryStatus", "Check", "Watch", "ServerReflectionInfo"),
    }
    assert tell_or_infer | ADMIN_METHODS == set(PROTOCOLS)
    assert not tell_or_infer & ADMIN_METHODS


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("unix", True),
        ("127.0.0.6", False),
        ("127.0.1.1", False),
        ("::ffff:127.0.0.6", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("localhost", False),
        ("127.0.0.1.evil", False),
    ],
)
def test_this_machine(address: str, local: bool) -> None:
    assert is_taken(Access({}, None, ()), Peer(address, False)) is local
    assert not is_taken(Access({}, None, ()), Peer(address, True)), "a proxy speaks for somebody else"
    assert is_taken(Access({}, None, {LOAD}), Peer(address, True)), "protected by other means"
    assert is_taken(Access({}, AdminAddresses(anybody=True), ()), Peer(address, True))
    assert not is_taken(Access({}, AdminAddresses(), {LOAD}), Peer(address, False))


def test_lists() -> None:
    admin = Access({}, admin_addresses("10.0.0.0/8, fd00::/8,192.0.2.7"), {LOAD})
    assert is_taken(admin, Peer("10.1.2.3", True)), "the proxy that is named"
    assert is_taken(admin, Peer("::ffff:10.1.2.3", False))
    assert is_taken(admin, Peer("fd00::2%eth0", False))
    assert is_taken(admin, Peer("192.0.2.7", False))
    assert not is_taken(admin, Peer("192.0.2.8", False))
    assert not is_taken(admin, Peer("127.0.0.1", False))
    assert str(admin_addresses("local,10.0.0.0/8")) == "this machine, 10.0.0.0/8"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:40000", "127.0.0.1"),
        ("ipv6:[::1]:40000", "::1"),
        ("ipv6:%5B::1%5D:40000", "::1"),
        ("ipv6:[fe80::1%25eth0]:40000", "fe80::1%eth0"),
        ("unix:/run/rocserve.sock", "unix"),
        ("unix:", "unix"),
        ("unix-abstract:name", "unix"),
        ("", ""),
        ("vsock:1:2", "1"),
    ],
)
def test_grpcs_notation(peer: str, address: str) -> None:
    assert peer_of(Call(peer)) == Peer(address, False)
    assert peer_of(Call(peer, (("X-Forwarded-For", "x"),))) == Peer(address, True)


LOG = logging.getLogger(__name__)


def test_every_method_belongs_to_a_protocol() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert set(PROTOCOLS) == methods | {"Check", "Watch", "ServerReflectionInfo"}


def test_only_the_methods_of_the_named_protocols_are_restricted() -> None:
    found = restrictions(
        [RestrictedProtocols(("inference", "trace"), "key", "one"), RestrictedProtocols(("health",), "other", "two")],
        LOG,
        GRPC_HEADER_PREFIX,
    )
    assert found["ModelInfer"] == found["TraceSetting"] == Restriction("triton-grpc-protocol-key", "one")
    assert found["ServerLive"] == found["Check"] == Restriction("triton-grpc-protocol-other", "two")
    assert "ModelConfig" not in found
    assert restrictions([], LOG) == {}


@pytest.mark.parametrize(
    ("metadata", "admitted"),
    [
        ([], False),
        ([("key", "secret")], True),
        ([("KEY", "secret")], True),
        ([("key", "Secret")], False),
        ([("key", b"secret")], True),
        ([("key", "no"), ("key", "secret")], False),
        ([("another", "secret")], False),
        ([("key", "s\u00e9cret")], False),
    ],
)
def test_the_first_header_of_the_name_counts(metadata: list[tuple[str, str | bytes]], admitted: bool) -> None:
    assert Restriction("Key", "secret").admits_metadata(metadata) is admitted


def test_the_refusal_names_the_header_and_not_its_value() -> None:
    refusal = Restriction("triton-grpc-protocol-key", "secret").refusal()
    assert refusal.code is StatusCode.UNAVAILABLE
    assert refusal.text == "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
