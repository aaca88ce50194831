"""Configures a client's connection: address, TLS, keepalive, load balancing, headers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import grpc

from rocserve_client.errors import InvalidArgument
from rocserve_client.messages import RequestOptions

DEFAULT_URL = "localhost:8001"
SERVICE = "inference.GRPCInferenceService"
IDEMPOTENT_METHODS = (
    "ModelInfer",
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
)
_LONGEST_MESSAGE = (1 << 31) - 1
_LONGEST_TIMEOUT_S = 1e9
"""gRPC counts nanoseconds in 64 bits, at most 292 years, and regards longer timeouts as expired. This is 31 years."""

_HEADER_NAME = re.compile(r"[0-9A-Za-z_.-]+")
_HEADER_VALUE = re.compile(rb"[ -~]*")

ChannelOptions = tuple[tuple[str, int | str], ...]
Headers = Mapping[str, str | bytes] | None


@dataclass(frozen=True, slots=True)
class Tls:
    """The PEM files for TLS. Without a root certificate, gRPC's own root certificates are trusted."""

    root_certificates: Path | None = None
    private_key: Path | None = None
    """For mutual TLS, together with `certificate_chain`."""
    certificate_chain: Path | None = None

    def __post_init__(self) -> None:
        """Raises InvalidArgument if a key or a chain is given alone, because gRPC would end the process."""
        if (self.private_key is None) != (self.certificate_chain is None):
            raise InvalidArgument("private_key and certificate_chain go together: give both of them, or none")

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.root_certificates),
            private_key=_read(self.private_key),
            certificate_chain=_read(self.certificate_chain),
        )


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """HTTP/2 pings that find connections which died silently. The server may forbid frequent pings."""

    time_ms: int
    """Milliseconds without traffic after which the client sends a ping."""
    timeout_ms: int = 20_000
    """Milliseconds within which the server must answer the ping; otherwise the connection is closed."""
    permit_without_calls: bool = False
    max_pings_without_data: int = 2
    """0 = without limit."""


@dataclass(frozen=True, slots=True)
class Balancing:
    """Spreads calls over all servers of the URL, and retries idempotent calls. A stream stays on one server."""

    attempts: int = 4
    """The most attempts at a call whose server or connection fails; 1 = no retry. gRPC allows 5 at most."""
    health_check: bool = True
    """Leave out servers that are not ready (grpc.health.v1)."""

    def service_config(self) -> str:
        config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
        if self.health_check:
            config["healthCheckConfig"] = {"serviceName": ""}
        if self.attempts > 1:
            policy = {
                "maxAttempts": self.attempts,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                # gRPC's core answers with CANCELLED while it shuts down.
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            }
            names = [{"service": SERVICE, "method": method} for method in IDEMPOTENT_METHODS]
            config["methodConfig"] = [{"name": names, "retryPolicy": policy}]
            # No retries to servers that fail most calls.
            config["retryThrottling"] = {"maxTokens": 100, "tokenRatio": 0.1}
        return json.dumps(config)


@dataclass(frozen=True, slots=True)
class Connection:
    """The settings of a channel. Messages of any size pass in both directions."""

    url: str = DEFAULT_URL
    """host:port, unix:/path, or any other name that gRPC resolves. For several servers: ipv4:host:port,host:port with
    their addresses, or dns:///name:port."""
    tls: Tls | None = None
    headers: Mapping[str, str | bytes] = field(default_factory=dict)
    """Sent with every call. A name that ends in "-bin" takes bytes."""
    keepalive: KeepAlive | None = None
    balancing: Balancing | None = None
    """None = one server, and no retries."""
    channel_options: ChannelOptions = ()
    """Further gRPC channel arguments, which replace those set here."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument if the URL has a scheme such as http:// or grpc://."""
        scheme, separator, rest = self.url.partition("://")
        if separator and scheme in ("http", "https", "grpc", "grpcs"):
            tls = ", and Tls() as `tls`" if scheme.endswith("s") else ""
            raise InvalidArgument(
                f"'{self.url}' is not a gRPC address: remove '{scheme}://' and give host:port of the server's gRPC"
                f" port (8001 by default), as in '{rest.rstrip('/')}'{tls}"
            )

    def channel(self, makers: Any) -> Any:
        """Return a new channel. `makers`: the module grpc or grpc.aio."""
        if self.tls is None:
            return makers.insecure_channel(self.url, self.options())
        return makers.secure_channel(self.url, self.tls.credentials(), self.options())

    def options(self) -> ChannelOptions:
        chosen: dict[str, int | str] = {
            "grpc.max_send_message_length": -1,
            "grpc.max_receive_message_length": -1,
            # A starting server is found soon after it listens. gRPC's own first pause is a second.
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 2_000,
        }
        if self.keepalive is not None:
            chosen["grpc.keepalive_time_ms"] = self.keepalive.time_ms
            chosen["grpc.keepalive_timeout_ms"] = self.keepalive.timeout_ms
            chosen["grpc.keepalive_permit_without_calls"] = int(self.keepalive.permit_without_calls)
            chosen["grpc.http2.max_pings_without_data"] = self.keepalive.max_pings_without_data
        if self.balancing is not None:
            chosen["grpc.service_config"] = self.balancing.service_config()
            # gRPC's core (1.85) sometimes crashes if a connection ends while several channels check its health.
            chosen["grpc.use_local_subchannel_pool"] = 1
            # gRPC retries only messages that fit into this buffer (256 KiB by default).
            chosen["grpc.per_rpc_retry_buffer_size"] = _LONGEST_MESSAGE
        chosen.update(self.channel_options)
        return tuple(chosen.items())

    def check_request(self, options: RequestOptions) -> None:
        """Raises InvalidArgument for a sequence's request if calls are balanced, because it may go to any server."""
        if self.balancing is not None and options.get("parameters", {}).get("sequence_id"):
            raise InvalidArgument(
                "the requests of a sequence belong on one server, once each: send them on a stream, or by a client"
                " without `balancing`"
            )

    def metadata(self, headers: Headers) -> tuple[tuple[str, str | bytes], ...]:
        """Return the headers of the connection and of one call, which wins if names are equal. gRPC takes names in
        lower case only. Raises InvalidArgument if gRPC does not take a header."""
        merged: dict[str, str | bytes] = {}
        for name, value in (*self.headers.items(), *(headers or {}).items()):
            _check_header(name, value)
            merged[name.lower()] = value
        return tuple(merged.items())


class BaseClient:
    """The common part of the clients: the connection's settings, its channel, and the channel's methods."""

    _grpc: ClassVar[Any]
    """grpc, or grpc.aio."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        tls: Tls | None = None,
        headers: Headers = None,
        keepalive: KeepAlive | None = None,
        balancing: Balancing | None = None,
        channel_options: ChannelOptions = (),
    ) -> None:
        """Connects with the first call. The arguments are those of `Connection`."""
        self._connection = Connection(url, tls, headers or {}, keepalive, balancing, channel_options)
        self._channel = self._connection.channel(self._grpc)
        self._methods: dict[str, Any] = {}


def _check_header(name: str, value: str | bytes) -> None:
    """Raises InvalidArgument. The text never shows the value, because values may be secrets."""
    if _HEADER_NAME.fullmatch(name) is None:
        raise InvalidArgument(f"header '{name}': expected a name of letters, digits and -_.")
    if name.lower().endswith("-bin"):
        if not isinstance(value, bytes):
            raise InvalidArgument(f"header '{name}': expected bytes, as its name ends in -bin")
        return
    raw = value.encode(errors="surrogatepass") if isinstance(value, str) else value
    if not isinstance(raw, bytes) or _HEADER_VALUE.fullmatch(raw) is None:
        raise InvalidArgument(f"header '{name}': expected a value of printable ASCII, without a line end behind it")


def grpc_timeout(seconds: float | None) -> float | None:
    """Return a call's timeout for gRPC; None (never) if the timeout is longer than gRPC can count."""
    return None if seconds is not None and seconds > _LONGEST_TIMEOUT_S else seconds


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
