"""The settings of the front ends: HTTP, gRPC, metrics, traces and the log."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rocserve.settings.flag import (
    BOOLEAN,
    COUNT,
    FILE_OR_NONE,
    LARGEST_INT32,
    MESSAGE_BYTES,
    MILLISECONDS,
    PORT,
    POSITIVE,
    POSITIVE_MILLISECONDS,
    POSITIVE_SECONDS,
    REGULAR_EXPRESSION,
    SECONDS,
    SETTING,
    Kind,
    flag,
    level,
    number,
    one_of,
    repeated,
    text,
)
from rocserve.settings.unix_place import listening_address

T = TypeVar("T")

RESTRICTED_PROTOCOLS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)


@dataclass(frozen=True, slots=True)
class RestrictedProtocols:
    """Methods that are open only to clients that send a header."""

    protocols: tuple[str, ...]
    """Triton's names, from RESTRICTED_PROTOCOLS."""
    header: str
    value: str = ""
    file: Path | None = None
    """File with the header's value, instead of `value`; may change while the server runs."""


def restricted_protocols(text: str) -> RestrictedProtocols:
    """Read `protocol,protocol:header=value`; or `header@file=path` or `header@env=name`, which name the source of the
    value. The `@` is unambiguous because no header's name has one."""
    names, separator, header = text.partition(":")
    protocols = tuple(name.strip() for name in names.split(","))
    place, equals, value = header.partition("=")
    key, at, source = place.partition("@")
    if not separator or not equals or not key or not all(protocols) or (at and source not in ("file", "env")):
        # The text may contain a secret.
        raise ValueError(
            "expected PROTOCOL[,PROTOCOL...]:HEADER=VALUE, or with @file=PATH or @env=NAME instead of =VALUE"
        )
    if not value:
        # For example from a shell variable that is not set.
        raise ValueError(f"expected a value of the header '{key}', got an empty one, which anybody could send")
    unknown = [name for name in protocols if name not in RESTRICTED_PROTOCOLS]
    if unknown:
        raise ValueError(
            f"unknown restricted protocol '{unknown[0]}', expected one of {', '.join(RESTRICTED_PROTOCOLS)}"
        )
    if source == "file":
        return RestrictedProtocols(protocols, key, file=Path(value))
    if source == "env":
        name, value = value, os.environ.get(value, "")
        if not value:
            raise ValueError(f"the environment variable '{name}' is not set, or empty; set it to the header's value")
    return RestrictedProtocols(protocols, key, value)


def origins(text: str) -> tuple[str, ...]:
    """Read the origins of web pages as browsers write them."""
    found = tuple(text.split(","))
    for origin in found:
        if origin != "*" and not re.fullmatch(r"https?://[a-z0-9.:\[\]-]+", origin):
            raise ValueError(
                f"expected origins such as https://app.example.com or http://localhost:3000, or *, got '{origin}'"
            )
    return found


ADDRESS = Kind("ADDRESS", lambda value: listening_address(text("ADDRESS").read(value)))
_RESTRICTED = Kind("PROTOCOLS:HEADER=VALUE", restricted_protocols)
_RESTRICTED_HELP = "serve these protocols only to clients that send the header"
_FORWARD_HELP = "headers whose names match this regular expression become parameters of the request"
_SSL_HELP = "serve TLS only"
_MUTUAL_HELP = "serve TLS only, and only to clients with a certificate"


def tls(default: T, kind: Kind, help_text: str) -> T:
    return flag(default, kind, help_text, group="TLS")


def connection(default: T, kind: Kind, help_text: str, name: str = "") -> T:
    return flag(default, kind, help_text, name=name, group="connections")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The flags of the HTTP port."""

    allow: bool = flag(True, BOOLEAN, "serve HTTP/REST", name="allow-http")
    address: str = flag("0.0.0.0", ADDRESS, "the address to listen on, or unix:/PATH[,mode=0660][,owner=USER:GROUP]")
    port: int = flag(8000, PORT, "the port to listen on; 0 = any free one")
    reuse_port: bool = flag(False, BOOLEAN, "let several servers share the port", name="reuse-http-port")
    max_input_size: int = flag(
        64 << 20, POSITIVE, "largest JSON, form or compressed body in bytes, also after decompression"
    )
    request_timeout_seconds: float = flag(
        0.0, SECONDS, "how long an inference request may take, even if its client sets no deadline; 0 = no limit"
    )
    keepalive_timeout_seconds: float = flag(75.0, POSITIVE_SECONDS, "how long a connection may stay without a request")
    restricted: tuple[RestrictedProtocols, ...] = repeated(_RESTRICTED, _RESTRICTED_HELP, name="http-restricted-api")
    header_forward_pattern: str = flag("", REGULAR_EXPRESSION, _FORWARD_HELP)
    allow_ui: bool = flag(True, BOOLEAN, "serve the page at / and its requests", name="allow-ui")
    cors_origins: tuple[str, ...] = flag(
        (),
        Kind("ORIGIN,...", origins),
        "origins whose pages may call the server, e.g. https://app.example.com, or * (default: only the server's own)",
    )
    use_ssl: bool = tls(False, BOOLEAN, _SSL_HELP)
    use_ssl_mutual: bool = tls(False, BOOLEAN, _MUTUAL_HELP)


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """The flags of the gRPC port."""

    allow: bool = flag(True, BOOLEAN, "serve gRPC", name="allow-grpc")
    address: str = flag("0.0.0.0", ADDRESS, "the address to listen on, or unix:/PATH[,mode=0660][,owner=USER:GROUP]")
    port: int = flag(8001, PORT, "the port to listen on; 0 = any free one")
    reuse_port: bool = flag(False, BOOLEAN, "let several servers share the port", name="reuse-grpc-port")
    infer_response_compression_level: str = flag(
        "none", one_of(("none", "low", "medium", "high")), "compression level of responses"
    )
    max_message_bytes: int = flag((1 << 31) - 1, MESSAGE_BYTES, "largest message in bytes, in both directions")
    message_timeout_seconds: float = flag(
        60.0, SECONDS, "time from a call's start until its message has arrived completely; 0 = no limit"
    )
    max_waiting_calls: int = flag(
        8192,
        POSITIVE,
        "most calls whose message has not arrived completely within a second, with streams that have no open request",
    )
    restricted: tuple[RestrictedProtocols, ...] = repeated(
        _RESTRICTED, _RESTRICTED_HELP, name="grpc-restricted-protocol"
    )
    header_forward_pattern: str = flag("", REGULAR_EXPRESSION, _FORWARD_HELP)
    reflection: bool = flag(False, BOOLEAN, "tell tools such as grpcurl what the methods take (gRPC's reflection)")
    use_ssl: bool = tls(False, BOOLEAN, _SSL_HELP)
    use_ssl_mutual: bool = tls(False, BOOLEAN, _MUTUAL_HELP)
    server_cert: Path | None = tls(None, FILE_OR_NONE, "the server's certificate chain for all ports, PEM")
    server_key: Path | None = tls(None, FILE_OR_NONE, "the server's private key for all ports, PEM")
    root_cert: Path | None = tls(None, FILE_OR_NONE, "certificates that verify clients' certificates, PEM")
    keepalive_time_ms: int = connection(
        7_200_000, POSITIVE_MILLISECONDS, "idle time after which the server sends a ping", name="grpc-keepalive-time"
    )
    keepalive_timeout_ms: int = connection(
        20_000,
        POSITIVE_MILLISECONDS,
        "how long the server waits for the reply to a ping before it closes the connection",
        name="grpc-keepalive-timeout",
    )
    keepalive_permit_without_calls: bool = connection(False, BOOLEAN, "also send pings on connections without calls")
    http2_max_pings_without_data: int = connection(
        2, COUNT, "pings that the server sends without data in between; 0 = no limit"
    )
    http2_min_recv_ping_interval_without_data_ms: int = connection(
        300_000,
        MILLISECONDS,
        "shortest pause between a client's pings without data",
        name="grpc-http2-min-recv-ping-interval-without-data",
    )
    http2_max_ping_strikes: int = connection(2, COUNT, "early pings until the connection is closed; 0 = no limit")
    max_connection_age_ms: int = connection(
        0, MILLISECONDS, "--max-connection-age-secs for gRPC only; 0 = as that flag", name="grpc-max-connection-age"
    )
    max_connection_idle_ms: int = connection(
        3_600_000, MILLISECONDS, "idle time before a connection is closed; 0 = never", name="grpc-max-connection-idle"
    )
    max_connection_age_grace_ms: int = connection(
        0,
        MILLISECONDS,
        "time to finish for the calls of a connection at its maximum age; 0 = no limit",
        name="grpc-max-connection-age-grace",
    )


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The flags of the metrics port."""

    allow: bool = flag(True, BOOLEAN, "serve metrics over HTTP, at /metrics", name="allow-metrics")
    address: str = flag(
        "",
        ADDRESS,
        "the address to listen on, also unix:/PATH (default: that of --http-address, or 127.0.0.1 if that is a Unix"
        " socket)",
    )
    port: int = flag(8002, PORT, "the port to listen on; 0 = any free one")
    interval_ms: int = flag(2000, POSITIVE_MILLISECONDS, "pause between readings of the gauges of GPUs and CPUs")
    gpu: bool = flag(True, BOOLEAN, "serve metrics of GPUs", name="allow-gpu-metrics")
    cpu: bool = flag(True, BOOLEAN, "serve metrics of processors and memory", name="allow-cpu-metrics")
    config: tuple[tuple[str, str], ...] = repeated(
        SETTING,
        "how latencies are reported: counter_latencies, summary_latencies or histogram_latencies=true|false,"
        " summary_quantiles=0.5:0.05,...",
    )
    use_ssl: bool = tls(False, BOOLEAN, _SSL_HELP)
    use_ssl_mutual: bool = tls(False, BOOLEAN, _MUTUAL_HELP)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The flags of the log."""

    info: bool = flag(True, BOOLEAN, "write information")
    warning: bool = flag(True, BOOLEAN, "write warnings")
    error: bool = flag(True, BOOLEAN, "write errors")
    verbose: int = flag(0, number("N", 0, level, LARGEST_INT32), "write details, from 1 on; true = 1")
    format: str = flag("default", one_of(("default", "ISO8601", "json")), "how a line looks; json: one object")
    file: Path | None = flag(None, FILE_OR_NONE, "write to this file instead of standard error")
