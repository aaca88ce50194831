"""Defines the interface between gRPC's handlers and the transport: calls, routes, limits.

Messages are bytes; nothing here knows protobuf. The transport calls handlers on its own thread. Handlers must not
block, and may use a call only on that thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from rocserve.backends.host import Host
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import RequestMemory
from rocserve.core.tensors import Buffer
from rocserve.frontends.grpc.relay import user_of
from rocserve.frontends.limits import LEAST_BYTES_PER_SECOND, file_limit
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.tls import CertificateFiles
from rocserve.services.access import Restriction
from rocserve.settings import GrpcSettings, ServerSettings

Metadata = Sequence[tuple[str, str | bytes]]
"""If a key ends in "-bin" its value is bytes, else text."""


RECEIVE_WINDOW_BYTES = 4 << 20
"""Bytes of a message that a client may send before gRPC's core accepts more. With fewer, a message from far away takes
many round trips; with more, the core reads more without a pause."""

LINGER_SECONDS = 1.0
"""Connections stay open for this time after the last answer when the server shuts down."""


class _Call(Protocol):
    """A call in flight. The transport silently drops what a handler sends after the call's end."""

    @property
    def method(self) -> str:
        """ "/package.Service/Method"."""

    @property
    def metadata(self) -> Metadata: ...

    @property
    def deadline(self) -> float | None:
        """time.monotonic() seconds after which the client no longer waits; None = no deadline."""

    @property
    def peer(self) -> str:
        """The client's address in gRPC's notation ("ipv4:127.0.0.1:40000")."""

    def reply_error(self, error: ServeError) -> None:
        """End the call with an error; on a stream, after the queued messages."""


class UnaryCall(_Call, Protocol):
    """A unary call. `reply` or `reply_error` ends it."""

    @property
    def message(self) -> Buffer: ...

    def reply(self, message: bytes) -> None:
        """Answer with status OK. Raises TypeError if the message is not bytes; the call stays open then."""

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Call back once if the client cancels, vanishes, or lets its deadline pass before the call has ended.

        A call takes any number of callbacks. If the client is known to be gone, `callback` runs immediately. Watching
        costs one more event, so only calls that have to wait should be watched.
        """


class StreamReceiver(Protocol):
    """Receives the messages of a stream. The transport calls all three methods on its thread, in order."""

    def on_message(self, message: bytes) -> None: ...

    def on_half_close(self) -> None:
        """The client sends no more messages, but still reads.

        gRPC shows a cancelled stream as half-closed a moment before it shows it as cancelled. So `on_cancel` may follow
        immediately, unless this method has finished the stream.
        """

    def on_cancel(self) -> None:
        """The client cancelled, vanished or let its deadline pass before the stream ended. This is the last call."""


class StreamCall(_Call, Protocol):
    """A stream. A call with one message in and many out (server streaming) is a stream, too.

    Memory stays bounded: the next message is read only while fewer than `stream_unanswered_limit` messages are
    unanswered and fewer than `stream_backlog_bytes` wait to be sent.
    """

    unanswered: int
    """Messages given to `on_message` that have not been answered in full."""

    def send(self, message: bytes) -> None:
        pass

    def request_next(self) -> None:
        """Note that one message given to `on_message` has been answered in full."""

    def finish(self, code: StatusCode, text: str) -> None:
        """End the stream after all queued messages have been sent."""


@dataclass(frozen=True, slots=True)
class UnaryRoute:
    """What handles the calls of a unary method."""

    handler: Callable[[Any], None]
    """Takes a UnaryCall, or a call of `call_type`."""
    call_type: Callable[..., Any] | None = None
    """Makes the calls that the handler gets, a subclass of `ServerUnaryCall`; None = `ServerUnaryCall` itself."""


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """What handles the calls of a streaming method."""

    handler: Callable[[StreamCall], StreamReceiver | None]
    """Returns None if it has finished the stream."""


Route = UnaryRoute | StreamRoute
Routes = Mapping[str, Route]
"""Full name of a method ("/package.Service/Method") -> route."""


def full_name(method: str) -> str:
    service = "grpc.health.v1.Health" if method in ("Check", "Watch") else "inference.GRPCInferenceService"
    return f"/{service}/{method}"


_AnyRoute = TypeVar("_AnyRoute", bound=UnaryRoute | StreamRoute)


def guarded(route: _AnyRoute, restriction: Restriction) -> _AnyRoute:
    """Return a route that first checks the metadata of calls."""
    handler: Callable[[Any], Any] = route.handler

    def handle(call: Any) -> Any:
        if restriction.admits_metadata(call.metadata):
            return handler(call)
        return call.reply_error(restriction.refusal())

    return replace(route, handler=handle)


def guarded_routes(routes: Routes, restrictions: Mapping[str, Restriction]) -> Routes:
    """Return full name -> route. Restricted routes check the metadata first; the others cost nothing more."""
    return {
        full_name(name): guarded(route, restrictions[name]) if name in restrictions else route
        for name, route in routes.items()
    }


def address_of(peer: str) -> str:
    """Return the client's address. `peer` is in gRPC's notation: "ipv4:1.2.3.4:4000", "ipv6:[::1]:4000" (or
    URL-escaped), "unix:/path", or what the relay has made of it."""
    kind, _, rest = peer.partition(":")
    if user := user_of(peer):
        return user
    return "unix" if kind in ("unix", "unix-abstract") else unquote(rest).rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """How many calls may wait for their messages, and for how long."""

    most: int = 8192
    """Calls that may wait for longer than `patience_seconds`."""
    patience_seconds: float = 1.0
    """A burst of requests takes some time to arrive, and none may be lost."""
    burst: int = 8192
    """Calls that may wait for any time; they take about 110 MB."""
    message_seconds: float = 60.0
    """From the beginning of a unary call until its message is complete; 0 = no limit. Streams may open in advance."""


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """The bounds of a transport, in addition to its settings."""

    renewal_ms: int = 0
    """Age at which connections are renewed at the latest, so that clients find other processes; 0 = never. Their calls
    may run as long as the settings allow."""
    handshake_timeout_ms: int = 10_000
    """The time for a new connection's TLS and its first frames of HTTP/2."""
    write_timeout_seconds: float = 60.0
    """The time for a client to read an answer before its call is cancelled; see `write_seconds` for large answers."""
    max_connections: int | None = None
    """One more connection is closed immediately; None = any number."""
    max_concurrent_calls: int = 20_000
    """Calls in flight; one more is refused with UNAVAILABLE. Calls that wait for their clients have separate bounds."""
    waiting: WaitingLimits = field(default_factory=WaitingLimits)
    most_private_bytes: int | None = None
    """Memory of this process beyond which calls whose messages arrive slowly are ended; None = any amount."""
    stream_unanswered_limit: int = 1024
    """Unanswered messages of one stream at which the next is not read. Many, because the next message may end the
    sequence for whose slot the earlier ones wait."""
    stream_backlog_bytes: int = 16 << 20
    """Unsent bytes of one stream at which no more of its messages are read."""
    stream_backlog_limit_bytes: int = 1 << 30
    """Unsent bytes of one stream at which the stream ends with RESOURCE_EXHAUSTED, because its client does not read."""

    @classmethod
    def of(cls, settings: ServerSettings, memory: RequestMemory, renewal_ms: int = 0) -> TransportLimits:
        limit, total_bytes = file_limit(), Host().memory_limit()
        return cls(
            renewal_ms=renewal_ms,
            write_timeout_seconds=settings.write_timeout_seconds,
            # gRPC's connections may take half of the files that a process may open. gRPC's core counts only
            # connections; the other half is for models and for HTTP.
            max_connections=None if limit is None else limit // 2,
            # The processes that serve gRPC may take half of the memory. By default, requests and answers take no
            # more; the other half is for models.
            most_private_bytes=None if total_bytes is None else total_bytes // 2 // memory.front_ends,
            waiting=WaitingLimits(
                most=settings.grpc.max_waiting_calls,
                burst=max(settings.grpc.max_waiting_calls, WaitingLimits().burst),
                message_seconds=settings.grpc.message_timeout_seconds,
            ),
        )

    def write_seconds(self, nbytes: int) -> float:
        """Return the time for a client to read an answer of `nbytes`. gRPC does not report how much has been read."""
        return self.write_timeout_seconds + nbytes / LEAST_BYTES_PER_SECOND


def transport_settings(settings: ServerSettings) -> GrpcSettings:
    """Return gRPC's settings; without a connection age they get the age for connections on all ports."""
    age_ms = settings.grpc.max_connection_age_ms or int(settings.max_connection_age_seconds * 1000)
    return replace(settings.grpc, max_connection_age_ms=age_ms)


def listen_address(settings: GrpcSettings) -> ListenAddress:
    return ListenAddress("gRPC", "grpc", settings.address, settings.port, settings.reuse_port)


def channel_arguments(settings: GrpcSettings, limits: TransportLimits) -> tuple[tuple[str, int], ...]:
    """Return settings and limits under the names of gRPC's core (grpc/impl/channel_arg_names.h)."""
    most_calls = limits.max_concurrent_calls + limits.waiting.burst
    age_ms, grace_ms = _connection_age(settings, limits.renewal_ms)
    arguments = {
        "grpc.so_reuseport": int(settings.reuse_port),
        # With more in one read, the core continues on its own thread, which does not wake the loop (server.py). It
        # accepts no higher limit.
        "grpc.http2.max_requests_per_read": 10_000,
        # With windows that grow, the core would read 100 MiB of a connection without a pause.
        "grpc.http2.bdp_probe": 0,
        "grpc.http2.lookahead_bytes": RECEIVE_WINDOW_BYTES,
        "grpc.max_receive_message_length": settings.max_message_bytes,
        "grpc.max_send_message_length": settings.max_message_bytes,
        "grpc.keepalive_time_ms": settings.keepalive_time_ms,
        "grpc.keepalive_timeout_ms": settings.keepalive_timeout_ms,
        "grpc.keepalive_permit_without_calls": int(settings.keepalive_permit_without_calls),
        "grpc.http2.max_pings_without_data": settings.http2_max_pings_without_data,
        "grpc.http2.min_ping_interval_without_data_ms": settings.http2_min_recv_ping_interval_without_data_ms,
        "grpc.http2.max_ping_strikes": settings.http2_max_ping_strikes,
        "grpc.server_handshake_timeout_ms": limits.handshake_timeout_ms,
        # Calls that the server has not requested yet. The core's own limit of 1,000 would refuse calls of a burst at
        # random.
        "grpc.server.max_pending_requests": most_calls,
        "grpc.server.max_pending_requests_hard_limit": 2 * most_calls,
    }
    compression_levels = ("none", "low", "medium", "high")
    optional = {
        "grpc.default_compression_level": compression_levels.index(settings.infer_response_compression_level),
        "grpc.max_allowed_incoming_connections": limits.max_connections,
        "grpc.max_connection_idle_ms": settings.max_connection_idle_ms,
        "grpc.max_connection_age_ms": age_ms,
        "grpc.max_connection_age_grace_ms": grace_ms,
    }
    return (*arguments.items(), *((name, number) for name, number in optional.items() if number and number > 0))


def _connection_age(settings: GrpcSettings, renewal_ms: int) -> tuple[int, int]:
    """Return the age at which connections get no further calls, and the time until their calls are cancelled; 0 =
    never."""
    age_ms, grace_ms = settings.max_connection_age_ms, settings.max_connection_age_grace_ms
    if not renewal_ms or 0 < age_ms <= renewal_ms:
        return age_ms, grace_ms
    return renewal_ms, age_ms - renewal_ms + grace_ms if age_ms and grace_ms else 0


def binding_error(where: ListenAddress, files: CertificateFiles | None) -> OSError:
    """Return why gRPC could not bind. gRPC does not say, so a plain socket asks the system again."""
    if where.unix is None:
        try:
            with where.bind() as probe:
                probe.listen()
        except OSError as error:
            return where.refusal(error)
    if files is not None:
        return OSError(errno.EINVAL, f"cannot serve gRPC with TLS: {files.expected}")
    return where.refusal(OSError(errno.EADDRINUSE, ""))


SERVER_EXITING = "Server exiting"
