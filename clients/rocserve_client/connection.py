"""How a client reaches its server: address, TLS, keepalive, headers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
"""gRPC counts nanoseconds in 64 bits, some 290 years of them; what is longer it takes for passed."""

_HEADER_NAME = re.compile(r"[0-9A-Za-z_.-]+")
_HEADER_VALUE = re.compile(rb"[ -~]*")

ChannelOptions = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. Without a root certificate the ones that come with gRPC are trusted."""

    root_certificates: Path | None = None
    private_key: Path | None = None
    """For mutual TLS, together with `certificate_chain`."""
    certificate_chain: Path | None = None

    def __post_init__(self) -> None:
        """Raises: InvalidArgument: gRPC would end the process."""
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
    """HTTP/2 pings that find a connection which died silently. The server may forbid frequent ones."""

    time_ms: int
    """A ping is sent after so long without traffic."""
    timeout_ms: int = 20_000
    """The connection is given up when a ping is not answered within this time."""
    permit_without_calls: bool = False
    max_pings_without_data: int = 2
    """0: without bound."""


@dataclass(frozen=True, slots=True)
class Balancing:
    """Spreads calls over all servers that the URL stands for, and tries those again that may be, by gRPC's own service
    config: a stream stays on one server."""

    attempts: int = 4
    """Of a call that a server or a connection failed; 1: it is not tried again. gRPC makes 5 at most."""
    health_check: bool = True
    """Leave out the servers that are not ready (grpc.health.v1)."""

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
                # As gRPC's core answers what comes while it shuts down.
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            }
            names = [{"service": SERVICE, "method": method} for method in IDEMPOTENT_METHODS]
            config["methodConfig"] = [{"name": names, "retryPolicy": policy}]
            # Servers that fail most calls are not asked for more.
            config["retryThrottling"] = {"maxTokens": 100, "tokenRatio": 0.1}
        return json.dumps(config)


@dataclass(frozen=True, slots=True)
class Connection:
    """Everything that a channel is made from; messages of any size pass in both directions."""

    url: str = DEFAULT_URL
    """host:port, unix:/path, or any other name that gRPC resolves; for several servers ipv4:host:port,host:port with
    their addresses, or dns:///name:port."""
    tls: Tls | None = None
    headers: Mapping[str, str | bytes] = field(default_factory=dict)
    """Sent with every call; a name that ends in "-bin" takes bytes."""
    keepalive: KeepAlive | None = None
    balancing: Balancing | None = None
    """None: one server is asked, and no call is tried again."""
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

    def channel(self, makers: Any) -> Any:
        """A new channel. `makers`: grpc, or grpc.aio."""
        if self.tls is None:
            return makers.insecure_channel(self.url, self.options())
        return makers.secure_channel(self.url, self.tls.credentials(), self.options())

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
        if self.balancing is not None:
            chosen["grpc.service_config"] = self.balancing.service_config()
            # gRPC's core (1.85) crashes at times when a connection ends whose health several channels of it check.
            chosen["grpc.use_local_subchannel_pool"] = 1
            # What is longer than this, 256 KiB otherwise, is not kept to be sent again.
            chosen["grpc.per_rpc_retry_buffer_size"] = _LONGEST_MESSAGE
        chosen.update(self.channel_options)
        return tuple(chosen.items())

    def check_request(self, options: RequestOptions) -> None:
        """Raises: InvalidArgument: it is one that neither another server nor a second attempt may get."""
        if self.balancing is not None and options.get("parameters", {}).get("sequence_id"):
            raise InvalidArgument(
                "the requests of a sequence belong on one server, once each: send them on a stream, or by a client"
                " without `balancing`"
            )

    def metadata(self, headers: Mapping[str, str | bytes] | None) -> tuple[tuple[str, str | bytes], ...]:
        """The headers of one call; its own win. gRPC takes names in lower case only. Raises: InvalidArgument: one that
        gRPC does not take."""
        merged = {**self.headers, **(headers or {})}
        for name, value in merged.items():
            _check_header(name, value)
        return tuple((name.lower(), value) for name, value in merged.items())


def _check_header(name: str, value: str | bytes) -> None:
    """Values may be secrets: the text shows none."""
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
    """The timeout of a call for gRPC: None, never, in the place of one that is longer than it counts."""
    return None if seconds is not None and seconds > _LONGEST_TIMEOUT_S else seconds


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
