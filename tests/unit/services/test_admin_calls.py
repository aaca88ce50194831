"""From where admin calls are taken."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.frontends.grpc.service import peer_of
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.access import ADMIN_METHODS, PROTOCOLS, Access, Peer
from rocserve.settings import AdminAddresses
from rocserve.settings.server import admin_addresses

LOAD = "RepositoryModelLoad"


@dataclass(frozen=True)
class Call:
    """What is looked at of a gRPC call."""

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
        *("SystemSharedMemoryStatus", "CudaSharedMemoryStatus", "Check", "Watch"),
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
