"""Decides which clients may call which methods: by a secret header, and for admin calls by address."""

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
"""Time between two checks of the file, so that not every call reads the disk."""


GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""Precedes the name that --grpc-restricted-protocol gives. --http-restricted-api gives the header's whole name."""

_METHODS: Mapping[str, Sequence[str]] = {
    "health": ("ServerLive", "ServerReady", "ModelReady", "Check", "Watch"),
    "metadata": ("ServerMetadata", "ModelMetadata", "HasHardware", "ServerReflectionInfo"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "model-config": ("ModelConfig",),
    "statistics": ("ModelStatistics",),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
    "model-repository": (
        *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
        *("ModelList", "ModelLoad", "ModelUnload", "WorkerLoad", "WorkerUnload"),
    ),
    "shared-memory": (
        *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
        *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
    ),
}
PROTOCOLS: Mapping[str, str] = MappingProxyType({name: key for key, names in _METHODS.items() for name in names})
"""Method of inference.GRPCInferenceService, or of a standard service of gRPC -> protocol, Triton's word for a group."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """A header, and the value that it needs for a restricted protocol."""

    header: str
    """The header's name, with GRPC_HEADER_PREFIX for gRPC; compared without regard to case."""
    secret: str | SecretFile

    @property
    def may_be_renewed(self) -> bool:
        return isinstance(self.secret, SecretFile)

    def admits(self, value: str | bytes | None) -> bool:
        """Return whether `value` is the header's value; None = the client sent no such header."""
        if value is None:
            return False
        sent = value.encode(errors="surrogateescape") if isinstance(value, str) else value
        expected = self.secret if isinstance(self.secret, str) else self.secret.value()
        return hmac.compare_digest(sent, expected.encode(errors="surrogateescape"))

    def admits_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Return whether a call's metadata has the header with the secret. Of two such headers the first counts."""
        name = self.header.lower()
        return self.admits(next((value for key, value in metadata if key.lower() == name), None))

    def refusal(self) -> ServeError:
        return unavailable(f"This protocol is restricted, expecting header '{self.header}'")


def restrictions(
    settings: Sequence[RestrictedProtocols], log: logging.Logger, header_prefix: str = ""
) -> Mapping[str, Restriction]:
    """Return the restriction of each restricted method. Raises OSError or ValueError if a file holds no secret."""
    by_protocol: dict[str, Restriction] = {}
    for group in settings:
        secret = group.value if group.file is None else SecretFile(group.file, log)
        restriction = Restriction(header_prefix + group.header, secret)
        by_protocol |= dict.fromkeys(group.protocols, restriction)
    return {method: by_protocol[protocol] for method, protocol in PROTOCOLS.items() if protocol in by_protocol}


class SecretFile:
    """Reads a secret from a file, and again when the file changes. Safe on any thread."""

    def __init__(self, path: Path, log: logging.Logger) -> None:
        """Raises OSError or ValueError if the file holds no secret."""
        self._path = path
        self._log = log
        self._stamp, self._value = self._read_stamp(), self._read()
        self._checked_at = time.monotonic()

    def value(self) -> str:
        """Return the secret; if the file cannot be read or is empty, the previous secret."""
        now = time.monotonic()
        if now - self._checked_at >= _POLL_SECONDS:
            self._checked_at = now
            try:
                stamp = self._read_stamp()
                if stamp != self._stamp:
                    self._stamp, self._value = stamp, self._read()
                    self._log.info("the secret in %s has been renewed", self._path)
            except (OSError, ValueError) as error:
                self._log.warning("the secret in %s stays unchanged: %s", self._path, error)
        return self._value

    def _read_stamp(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> str:
        text = self._path.read_bytes().decode(errors="surrogateescape").rstrip("\r\n")
        if not text:
            raise ValueError(f"{self._path} holds no secret: it is empty")
        return text


_CHANGES_SETTINGS = frozenset({"TraceSetting", "LogSettings"})
"""Methods that only report unless the request has settings."""
ADMIN_METHODS = _CHANGES_SETTINGS | (
    {*_METHODS["model-repository"], *_METHODS["shared-memory"]}
    - {"RepositoryIndex", "ModelList", "SystemSharedMemoryStatus", "CudaSharedMemoryStatus"}
)

FORWARDING_HEADERS = frozenset({"forwarded", "x-forwarded-for", "x-real-ip", "via", "origin"})
"""Header names in lower case. A call with one of them comes from a proxy on behalf of another client, or from a
browser (`Origin`), whose pages come from anywhere and may send anything to the browser's machine."""

_LOOPBACK = frozenset({ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")})
"""Not all of 127.0.0.0/8, because service meshes deliver requests of other machines from 127.0.0.6."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The client of a call, as far as the connection shows."""

    address: str
    """An IP address; "uid:1000" = that user, over a Unix socket; "unix" = any user, over a Unix socket; "" =
    unknown."""
    is_forwarded: bool
    """The call has one of FORWARDING_HEADERS."""

    @classmethod
    def of(cls, address: str, header_names: Iterable[str]) -> Peer:
        """`header_names`: those of the call, in lower case."""
        return cls(address, not FORWARDING_HEADERS.isdisjoint(header_names))

    def is_among(self, addresses: AdminAddresses) -> bool:
        if addresses.anybody:
            return True
        user = self.address.removeprefix("uid:")
        if self.address == "unix" or user != self.address:
            return (addresses.local or user in map(str, addresses.users)) and not self.is_forwarded
        address = ip_address_of(self.address)
        if addresses.local and address in _LOOPBACK and not self.is_forwarded:
            return True
        return address is not None and any(address in network for network in addresses.networks)

    def __str__(self) -> str:
        return f"{self.address or 'an unknown address'}{', which forwards it' if self.is_forwarded else ''}"


@dataclass(frozen=True, slots=True)
class Access:
    """Decides which clients may call which methods of one front end."""

    restrictions: Mapping[str, Restriction]
    """Method -> restriction, only for methods that need a secret header."""
    addresses: AdminAddresses | None
    """The sources of admin calls; None = this machine, and for `protected` methods any source."""
    protected: Collection[str]
    """The methods that need a secret header or a client's certificate."""

    @classmethod
    def of(cls, settings: ServerSettings, port: GrpcSettings | HttpSettings, log: logging.Logger) -> Access:
        restricted = restrictions(port.restricted, log, GRPC_HEADER_PREFIX if isinstance(port, GrpcSettings) else "")
        return cls(restricted, settings.admin_addresses, ADMIN_METHODS if port.use_ssl_mutual else restricted)

    def check_admin(self, method: str, peer: Peer, request: Callable[[], Any]) -> None:
        """Raise ServeError (PERMISSION_DENIED) if `peer` may not make an admin call. `request` returns its message."""
        if method not in ADMIN_METHODS:
            return
        addresses = self._admin_addresses(method)
        if peer.is_among(addresses) or (method in _CHANGES_SETTINGS and not request().settings):
            return
        raise ServeError(
            StatusCode.PERMISSION_DENIED,
            f"{method} is an admin call, which this server takes from {addresses}, and this one comes from {peer};"
            " --admin-address sets the allowed sources",
        )

    def describe(self) -> str:
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
        return AdminAddresses(anybody=True) if method in self.protected else AdminAddresses(local=True)


def _grouped(methods: Iterable[tuple[str, str]]) -> Mapping[str, Sequence[str]]:
    """Return the protocols of (key, method) pairs by key, both sorted."""
    found: dict[str, set[str]] = {}
    for key, method in methods:
        found.setdefault(key, set()).add(PROTOCOLS[method])
    return {key: sorted(names) for key, names in sorted(found.items())}


def ip_address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text names, without its scope, or None. An IPv4 address within IPv6 becomes IPv4."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return address if isinstance(address, ipaddress.IPv4Address) else address.ipv4_mapped or address
