"""Admits the calls that change the server by where they come from (--admin-address): both front ends ask here."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rocserve.core.errors import ServeError, StatusCode
from rocserve.services.restrictions import GRPC_HEADER_PREFIX, PROTOCOLS, Restriction, restrictions
from rocserve.settings import AdminAddresses, GrpcSettings, HttpSettings, ServerSettings

_CHANGES_SETTINGS = frozenset({"TraceSetting", "LogSettings"})
"""Without settings in the request they only report."""
ADMIN_METHODS = _CHANGES_SETTINGS | {
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "ModelLoad",
    "ModelUnload",
    "WorkerLoad",
    "WorkerUnload",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
}

FORWARDING_HEADERS = frozenset({"forwarded", "x-forwarded-for", "x-real-ip", "via", "origin"})
"""In small letters. Who sends one of them is no client on this machine, but a proxy that speaks for another, or a
browser (`Origin`), whose pages come from anywhere and may send what they like to the machine that it runs on."""

_LOOPBACK = frozenset({ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")})
"""Not all of 127.0.0.0/8: service meshes deliver what comes from elsewhere from 127.0.0.6."""
_LOCAL_ONLY = AdminAddresses(local=True)
_ANYBODY = AdminAddresses(anybody=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a call comes from."""

    address: str
    """An IP address, or "unix" of a socket in this machine's file system; "" = not known."""
    is_forwarded: bool
    """It carries one of FORWARDING_HEADERS."""

    def __str__(self) -> str:
        return f"{self.address or 'nobody knows where'}{', which forwards it' if self.is_forwarded else ''}"


class AdminCalls:
    """Of one front end."""

    def __init__(self, addresses: AdminAddresses | None, protected: Collection[str]) -> None:
        """
        Args:
            addresses: where admin calls may come from; None = from this machine, those that are `protected` from
                anywhere.
            protected: the methods that want a secret header or a client's certificate.
        """
        self._addresses = addresses
        self._protected = frozenset(protected)

    def check(self, method: str, peer: Peer, request: Callable[[], Any]) -> None:
        """Raises: ServeError: PERMISSION_DENIED. `request`: gives the method's message."""
        if method not in ADMIN_METHODS:
            return
        addresses = self._of(method)
        if _admits(addresses, peer) or (method in _CHANGES_SETTINGS and not request().settings):
            return
        raise ServeError(
            StatusCode.PERMISSION_DENIED,
            f"{method} is an admin call, which this server takes from {addresses}, and this one comes from {peer};"
            " --admin-address says where they may come from",
        )

    def describe(self) -> str:
        """Which admin calls are taken from where, for the log."""
        sources: dict[str, set[str]] = {}
        for method in ADMIN_METHODS:
            sources.setdefault(str(self._of(method)), set()).add(PROTOCOLS[method])
        return "; ".join(f"{', '.join(sorted(names))} from {source}" for source, names in sorted(sources.items()))

    def _of(self, method: str) -> AdminAddresses:
        if self._addresses is not None:
            return self._addresses
        return _ANYBODY if method in self._protected else _LOCAL_ONLY


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call what of one protocol."""

    restrictions: Mapping[str, Restriction]
    """By method, those that want a secret header."""
    admin: AdminCalls

    @classmethod
    def of(cls, settings: ServerSettings, port: GrpcSettings | HttpSettings, log: logging.Logger) -> Access:
        prefix = GRPC_HEADER_PREFIX if isinstance(port, GrpcSettings) else ""
        restricted = restrictions(port.restricted, log, prefix)
        return cls(
            restricted, AdminCalls(settings.admin_addresses, ADMIN_METHODS if port.use_ssl_mutual else restricted)
        )

    def describe(self) -> str:
        """In one line for the log."""
        headers: dict[str, set[str]] = {}
        for method, restriction in self.restrictions.items():
            headers.setdefault(restriction.header, set()).add(PROTOCOLS[method])
        restricted = {name for names in headers.values() for name in names}
        free = ", ".join(sorted({*PROTOCOLS.values()} - restricted)) or "nothing"
        parts = [f"anybody may call {free}"]
        parts += [f"with header '{header}' {', '.join(sorted(names))}" for header, names in sorted(headers.items())]
        return f"{'; '.join(parts)}; admin calls: {self.admin.describe()}"


def _admits(addresses: AdminAddresses, peer: Peer) -> bool:
    if addresses.anybody:
        return True
    if peer.address == "unix":
        return addresses.local and not peer.is_forwarded
    try:
        address = ipaddress.ip_address(peer.address.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    if addresses.local and address in _LOOPBACK and not peer.is_forwarded:
        return True
    return any(address in network for network in addresses.networks)
