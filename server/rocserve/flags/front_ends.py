"""Flags of the front ends."""

from __future__ import annotations

from rocserve.flags.flag import Flag
from rocserve.flags.values import (
    COUNT,
    MESSAGE_BYTES,
    MILLISECONDS,
    PORT,
    POSITIVE,
    POSITIVE_MILLISECONDS,
    POSITIVE_SECONDS,
    SECONDS,
    boolean,
    file,
    origins,
    regular_expression,
    restricted_protocols,
)

HTTP = (
    Flag("allow-http", "http.allow", boolean, "serve HTTP/REST (default true)"),
    Flag("http-address", "http.address", str, "the address to listen on (default 0.0.0.0)", value="ADDRESS"),
    Flag("http-port", "http.port", PORT, "the port to listen on; 0 = any free one (default 8000)"),
    Flag("reuse-http-port", "http.reuse_port", boolean, "let several servers share the port (default false)"),
    Flag(
        "http-thread-count",
        "http.thread_count",
        POSITIVE,
        "taken as tritonserver takes it; the event loop serves HTTP (default 8)",
    ),
    Flag(
        "http-max-input-size",
        "http.max_input_size",
        POSITIVE,
        "bytes of a request's body, decompressed (default 67108864)",
    ),
    Flag(
        "http-request-timeout-secs",
        "http.request_timeout_seconds",
        SECONDS,
        "how long an inference request may take, also one without a deadline of its own; 0 = as long as it takes"
        " (default 0)",
    ),
    Flag(
        "http-keepalive-timeout-secs",
        "http.keepalive_seconds",
        POSITIVE_SECONDS,
        "how long a connection may stay without a request (default 75)",
    ),
    Flag(
        "http-restricted-api",
        "http.restricted",
        restricted_protocols,
        "serve these only to clients that send the header; repeatable",
        repeatable=True,
    ),
    Flag(
        "http-header-forward-pattern",
        "http.header_forward_pattern",
        regular_expression,
        "headers whose names match this regular expression become parameters of the request",
        value="REGEX",
    ),
    Flag("allow-ui", "http.allow_ui", boolean, "serve the page at / and what it asks (default true)"),
    Flag(
        "http-cors-origins",
        "http.cors_origins",
        origins,
        "whose pages' scripts may ask, e.g. https://app.example.com, or * (default none but the server's own)",
        value="ORIGIN,...",
    ),
)

GRPC = (
    Flag("allow-grpc", "grpc.allow", boolean, "serve gRPC (default true)"),
    Flag("grpc-address", "grpc.address", str, "the address to listen on (default 0.0.0.0)", value="ADDRESS"),
    Flag("grpc-port", "grpc.port", PORT, "the port to listen on; 0 = any free one (default 8001)"),
    Flag("reuse-grpc-port", "grpc.reuse_port", boolean, "let several servers share the port (default false)"),
    Flag(
        "grpc-infer-response-compression-level",
        "grpc.response_compression_level",
        str,
        "how hard to compress responses (default none)",
        choices=("none", "low", "medium", "high"),
    ),
    Flag(
        "grpc-max-message-bytes",
        "grpc.max_message_bytes",
        MESSAGE_BYTES,
        "the largest message, either way (default 2147483647)",
    ),
    Flag(
        "grpc-message-timeout-secs",
        "grpc.message_timeout_seconds",
        SECONDS,
        "time from a call's beginning until its message has come whole; 0 = any (default 60)",
    ),
    Flag(
        "grpc-restricted-protocol",
        "grpc.restricted",
        restricted_protocols,
        "serve these only to clients that send the header; repeatable",
        repeatable=True,
    ),
    Flag(
        "grpc-header-forward-pattern",
        "grpc.header_forward_pattern",
        regular_expression,
        "headers whose names match this regular expression become parameters of the request",
        value="REGEX",
    ),
)

_USE_SSL = "serve TLS only (default false)"
_USE_SSL_MUTUAL = "serve TLS only, to clients that show a certificate (default false)"

TLS = (
    Flag("grpc-use-ssl", "grpc.use_ssl", boolean, _USE_SSL),
    Flag("grpc-use-ssl-mutual", "grpc.use_ssl_mutual", boolean, _USE_SSL_MUTUAL),
    Flag("http-use-ssl", "http.use_ssl", boolean, _USE_SSL),
    Flag("http-use-ssl-mutual", "http.use_ssl_mutual", boolean, _USE_SSL_MUTUAL),
    Flag("metrics-use-ssl", "metrics.use_ssl", boolean, _USE_SSL),
    Flag("metrics-use-ssl-mutual", "metrics.use_ssl_mutual", boolean, _USE_SSL_MUTUAL),
    Flag("grpc-server-cert", "grpc.server_cert", file, "the server's certificate chain, of all ports, PEM"),
    Flag("grpc-server-key", "grpc.server_key", file, "the server's private key, of all ports, PEM"),
    Flag("grpc-root-cert", "grpc.root_cert", file, "what clients' certificates are checked against, PEM"),
    Flag(
        "allow-mixed-tls",
        "allow_mixed_tls",
        boolean,
        "let one of gRPC and HTTP ask clients for certificates while the other, reachable from elsewhere, does not"
        " (default false)",
    ),
)

CONNECTIONS = (
    Flag(
        "max-connection-age-secs",
        "max_connection_age_seconds",
        SECONDS,
        "age at which a connection, of gRPC or HTTP, is ended after the calls in hand, for its client to find new"
        " servers; 0 = never (default 0)",
    ),
    Flag(
        "grpc-keepalive-time",
        "grpc.keepalive_time_ms",
        POSITIVE_MILLISECONDS,
        "pause in the traffic at which the server pings (default 7200000)",
    ),
    Flag(
        "grpc-keepalive-timeout",
        "grpc.keepalive_timeout_ms",
        POSITIVE_MILLISECONDS,
        "wait for the answer to a ping before the connection is ended (default 20000)",
    ),
    Flag(
        "grpc-keepalive-permit-without-calls",
        "grpc.keepalive_permit_without_calls",
        boolean,
        "ping connections without calls too (default false)",
    ),
    Flag(
        "grpc-http2-max-pings-without-data",
        "grpc.http2_max_pings_without_data",
        COUNT,
        "pings that the server sends without data between them; 0 = no limit (default 2)",
    ),
    Flag(
        "grpc-http2-min-recv-ping-interval-without-data",
        "grpc.http2_min_recv_ping_interval_without_data_ms",
        MILLISECONDS,
        "least pause between a client's pings without data (default 300000)",
    ),
    Flag(
        "grpc-http2-max-ping-strikes",
        "grpc.http2_max_ping_strikes",
        COUNT,
        "pings that come too soon before the connection is ended; 0 = no limit (default 2)",
    ),
    Flag(
        "grpc-max-connection-age",
        "grpc.max_connection_age_ms",
        MILLISECONDS,
        "the same in milliseconds for gRPC alone; 0 = as that says (default 0)",
    ),
    Flag(
        "grpc-max-connection-idle",
        "grpc.max_connection_idle_ms",
        MILLISECONDS,
        "time without calls after which a connection is ended; 0 = never (default 3600000)",
    ),
    Flag(
        "grpc-max-connection-age-grace",
        "grpc.max_connection_age_grace_ms",
        MILLISECONDS,
        "time that its calls then have to finish; 0 = as long as they take (default 0)",
    ),
)
