"""How a client reaches its server: address, TLS, keepalive, headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from rocserve_client.errors import InvalidArgument

DEFAULT_URL = "localhost:8001"

ChannelOptions = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. Without a root certificate the ones that come with gRPC are trusted."""

    root_certificates: Path | None = None
    private_key: Path | None = None
    """For mutual TLS, together with `certificate_chain`."""
    certificate_chain: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.root_certificates),
            private_key=_read(self.private_key),
            certificate_chain=_read(self.certificate_chain),
        )


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """HTTP/2 pings that find a connection which died silently. The server may forbid frequent ones."""

    time_ms: int
    """A ping is sent after so long without traffic."""
    timeout_ms: int = 20_000
    """The connection is given up when a ping is not answered within this time."""
    permit_without_calls: bool = False
    max_pings_without_data: int = 2
    """0: without bound."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Everything that a channel is made from; messages of any size pass in both directions."""

    url: str = DEFAULT_URL
    """host:port, unix:/path, or any other name that gRPC resolves."""
    tls: Tls | None = None
    headers: Mapping[str, str | bytes] = field(default_factory=dict)
    """Sent with every call; a name that ends in "-bin" takes bytes."""
    keepalive: KeepAlive | None = None
    channel_options: ChannelOptions = ()
    """Further gRPC channel arguments; they win over those set here."""

    def __post_init__(self) -> None:
        """Raises: InvalidArgument: the URL is one of HTTP."""
        scheme, separator, rest = self.url.partition("://")
        if separator and scheme in ("http", "https", "grpc", "grpcs"):
            tls = ", and Tls() as `tls`" if scheme.endswith("s") else ""
            raise InvalidArgument(
                f"'{self.url}' is no address of gRPC: leave out '{scheme}://' and give host:port of the server's gRPC"
                f" port (8001 by default), as in '{rest.rstrip('/')}'{tls}"
            )

    def options(self) -> ChannelOptions:
        chosen: dict[str, int | str] = {
            "grpc.max_send_message_length": -1,
            "grpc.max_receive_message_length": -1,
            # A server that is being started is found soon after it listens; gRPC's own first pause is a second.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 2_000,
        }
        if self.keepalive is not None:
            chosen["grpc.keepalive_time_ms"] = self.keepalive.time_ms
            chosen["grpc.keepalive_timeout_ms"] = self.keepalive.timeout_ms
            chosen["grpc.keepalive_permit_without_calls"] = int(self.keepalive.permit_without_calls)
            chosen["grpc.http2.max_pings_without_data"] = self.keepalive.max_pings_without_data
        chosen.update(self.channel_options)
        return tuple(chosen.items())

    def metadata(self, headers: Mapping[str, str | bytes] | None) -> tuple[tuple[str, str | bytes], ...]:
        """The headers of one call; its own win. gRPC takes names in lower case only."""
        merged = {**self.headers, **(headers or {})}
        return tuple((name.lower(), value) for name, value in merged.items())


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
