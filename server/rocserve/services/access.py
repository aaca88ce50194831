"""Who may call which methods: those that send a secret header, and admin calls by where they come from
(--admin-address). Both front ends ask here."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.settings import AdminAddresses, GrpcSettings, HttpSettings, RestrictedProtocols, ServerSettings

_POLL_SECONDS = 1.0
"""Between two checks of the file: not each call has one."""


GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""Precedes the name that --grpc-restricted-protocol gives; --http-restricted-api's is the header's whole name."""

PROTOCOLS: Mapping[str, str] = MappingProxyType(
    {
        "ServerLive": "health",
        "ServerReady": "health",
        "ModelReady": "health",
        "Check": "health",
        "Watch": "health",
        "ServerMetadata": "metadata",
        "ModelMetadata": "metadata",
        "HasHardware": "metadata",
        "ModelInfer": "inference",
        "ModelStreamInfer": "inference",
        "ModelConfig": "model-config",
        "ModelStatistics": "statistics",
        "TraceSetting": "trace",
        "LogSettings": "logging",
        "RepositoryIndex": "model-repository",
        "RepositoryModelLoad": "model-repository",
        "RepositoryModelUnload": "model-repository",
        "ModelList": "model-repository",
        "ModelLoad": "model-repository",
        "ModelUnload": "model-repository",
        "WorkerLoad": "model-repository",
        "WorkerUnload": "model-repository",
        "SystemSharedMemoryStatus": "shared-memory",
        "SystemSharedMemoryRegister": "shared-memory",
        "SystemSharedMemoryUnregister": "shared-memory",
        "CudaSharedMemoryStatus": "shared-memory",
        "CudaSharedMemoryRegister": "shared-memory",
        "CudaSharedMemoryUnregister": "shared-memory",
    }
)
"""The protocol that a method belongs to: all of inference.GRPCInferenceService and of grpc.health.v1.Health."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that a client must send, and its value."""

    header: str
    """As the flag has it; headers' names are compared without regard to case."""
    value: str = ""
    file: SecretFile | None = None
    """Holds the value in place of `value`."""

    def admits(self, value: str | bytes | None) -> bool:
        """Whether this is the header's value; None where the client sent no such header."""
        if value is None:
            return False
        given = value.encode(errors="surrogateescape") if isinstance(value, str) else value
        expected = self.value if self.file is None else self.file.value()
        return hmac.compare_digest(given, expected.encode(errors="surrogateescape"))

    def admits_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Whether a call's metadata has the header; where it is there twice, the first counts."""
        name = self.header.lower()
        return self.admits(next((value for key, value in metadata if key.lower() == name), None))

    def refusal(self) -> ServeError:
        return unavailable(f"This protocol is restricted, expecting header '{self.header}'")


def restrictions(
    settings: Sequence[RestrictedProtocols], log: logging.Logger, header_prefix: str = ""
) -> Mapping[str, Restriction]:
    """The restrictions by method; methods that anybody may call are not in it. Raises: OSError, ValueError: a file
    holds no secret."""
    by_protocol: dict[str, Restriction] = {}
    for group in settings:
        file = None if group.file is None else SecretFile(group.file, log)
        restriction = Restriction(header_prefix + group.header, group.value, file)
        by_protocol |= dict.fromkeys(group.protocols, restriction)
    return {method: by_protocol[protocol] for method, protocol in PROTOCOLS.items() if protocol in by_protocol}


class SecretFile:
    """May be asked from any thread."""

    def __init__(self, path: Path, log: logging.Logger) -> None:
        """Raises: OSError, ValueError: there is no secret in it."""
        self._path = path
        self._log = log
        self._mark = self._read_marks()
        self._value = self._read()
        self._checked_at = time.monotonic()

    def value(self) -> str:
        """The secret; while the file cannot be read, or is empty, the last one."""
        now = time.monotonic()
        if now - self._checked_at >= _POLL_SECONDS:
            self._checked_at = now
            try:
                mark = self._read_marks()
                if mark != self._mark:
                    self._value = self._read()
                    self._mark = mark
                    self._log.info("the secret in %s has been renewed", self._path)
            except (OSError, ValueError) as error:
                self._log.warning("the secret in %s stays as it was: %s", self._path, error)
        return self._value

    def _read_marks(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> str:
        text = self._path.read_bytes().decode(errors="surrogateescape").rstrip("\r\n")
        if not text:
            raise ValueError(f"{self._path} holds no secret: it is empty")
        return text


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


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call what of one front end."""

    restrictions: Mapping[str, Restriction]
    """By method, those that want a secret header."""
    addresses: AdminAddresses | None
    """Where admin calls may come from; None = from this machine, those that are `protected` from anywhere."""
    protected: Collection[str]
    """The methods that want a secret header or a client's certificate."""

    @classmethod
    def of(cls, settings: ServerSettings, port: GrpcSettings | HttpSettings, log: logging.Logger) -> Access:
        restricted = restrictions(port.restricted, log, GRPC_HEADER_PREFIX if isinstance(port, GrpcSettings) else "")
        return cls(restricted, settings.admin_addresses, ADMIN_METHODS if port.use_ssl_mutual else restricted)

    def check_admin(self, method: str, peer: Peer, request: Callable[[], Any]) -> None:
        """Raises: ServeError: PERMISSION_DENIED. `request`: gives the method's message."""
        if method not in ADMIN_METHODS:
            return
        addresses = self._admin_addresses(method)
        if _admits(addresses, peer) or (method in _CHANGES_SETTINGS and not request().settings):
            return
        raise ServeError(
            StatusCode.PERMISSION_DENIED,
            f"{method} is an admin call, which this server takes from {addresses}, and this one comes from {peer};"
            " --admin-address says where they may come from",
        )

    def describe(self) -> str:
        """In one line for the log."""
        headers = _grouped((restriction.header, method) for method, restriction in self.restrictions.items())
        sources = _grouped((str(self._admin_addresses(method)), method) for method in ADMIN_METHODS)
        restricted = {name for names in headers.values() for name in names}
        free = ", ".join(sorted({*PROTOCOLS.values()} - restricted)) or "nothing"
        parts = [f"anybody may call {free}"]
        parts += [f"with header '{header}' {', '.join(names)}" for header, names in headers.items()]
        admin = "; ".join(f"{', '.join(names)} from {source}" for source, names in sources.items())
        return f"{'; '.join(parts)}; admin calls: {admin}"

    def _admin_addresses(self, method: str) -> AdminAddresses:
        if self.addresses is not None:
            return self.addresses
        return _ANYBODY if method in self.protected else _LOCAL_ONLY


def _grouped(methods: Iterable[tuple[str, str]]) -> Mapping[str, Sequence[str]]:
    """The protocols of methods by what comes before these, both sorted."""
    found: dict[str, set[str]] = {}
    for key, method in methods:
        found.setdefault(key, set()).add(PROTOCOLS[method])
    return {key: sorted(names) for key, names in sorted(found.items())}


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
