"""The interface between the gRPC service and what moves its bytes: calls, routes, limits.

Messages are bytes; nothing here knows protobuf. Handlers are called on the transport's own thread and must not
block; what they ask of a call they ask on that thread.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import unquote

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import Buffer
from rocserve.frontends.grpc.unfinished import WaitingLimits
from rocserve.frontends.listen_address import CertificateFiles, ListenAddress
from rocserve.services.access import Restriction
from rocserve.settings import GrpcSettings, ServerSettings

Metadata = Sequence[tuple[str, str | bytes]]
"""Keys that end in "-bin" carry bytes, all others text."""

_GRPC_SHARE = 2
"""gRPC's connections are half of the files that a process may open. Its core counts nothing but them, so
that the rest has to do for models, however many, and for HTTP."""

_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}

LEAST_READ_BYTES_PER_SECOND = 64 << 10
"""A client that reads slower than half a megabit a second is taken for one that does not read."""

MOST_REQUESTS_PER_READ = 10_000
"""That gRPC's core may begin out of what it has read of a connection at once; its limit of this number."""

RECEIVE_WINDOW_BYTES = 4 << 20
"""That a client may send of a message before gRPC's core has said that it takes more. With less a message from far away
takes many round trips; with more the core reads more in one go."""

LINGER_SECONDS = 1.0
"""How long connections stay open after the last answer when the server shuts down."""


class _Call(Protocol):
    """An RPC in flight; what comes after its end is dropped silently."""

    @property
    def method(self) -> str:
        """The full name, "/package.Service/Method"."""

    @property
    def metadata(self) -> Metadata: ...

    @property
    def deadline(self) -> float | None:
        """time.monotonic() seconds after which the client no longer waits; None = it waits for ever."""

    @property
    def peer(self) -> str:
        """Where the client is, in gRPC's notation ("ipv4:127.0.0.1:40000")."""

    def reply_error(self, error: ServeError) -> None:
        """End with an error, a stream behind what is queued."""


class UnaryCall(_Call, Protocol):
    """`reply` or `reply_error` ends it."""

    @property
    def message(self) -> Buffer: ...

    def reply(self, message: bytes) -> None:
        """Answer with status OK. Raises: TypeError: the message is not bytes; the call stays open."""

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Call back once if the client cancels, vanishes, or lets its deadline pass before the call has ended.

        Any number of callbacks. They run within this very call when the client is already known to be gone. It costs an
        event a call, so ask only for calls that have to wait.
        """


class StreamReceiver(Protocol):
    """What a handler gives for a stream. All three are called on the transport's thread, in order."""

    def on_message(self, message: bytes) -> None: ...

    def on_half_close(self) -> None:
        """The client sends no more; it still reads.

        gRPC shows a cancelled stream as half-closed a moment before it shows it as cancelled, so `on_cancel` may
        follow at once, unless the stream has been finished here.
        """

    def on_cancel(self) -> None:
        """The client cancelled, vanished or let its deadline pass before the stream had ended. Nothing follows."""


class StreamCall(_Call, Protocol):
    """One message in and many out (server streaming) is a case of it.

    Memory stays bounded: the next message is read only while fewer than `stream_unanswered_limit` messages are
    unanswered and fewer than `stream_backlog_bytes` wait to be sent.
    """

    def send(self, message: bytes) -> None:
        """Queue a message for the client."""

    def request_next(self) -> None:
        """One message given to `on_message` has been answered in full."""

    def finish(self, code: StatusCode, text: str) -> None:
        """End the stream once all that is queued has been sent."""


@dataclass(frozen=True, slots=True)
class UnaryRoute:
    handler: Callable[[Any], None]
    """Takes a UnaryCall, or what `call_type` makes."""
    call_type: Callable[..., Any] | None = None
    """Of its calls, which the handler gets: a kind of `ServerUnaryCall`; None: just that."""


@dataclass(frozen=True, slots=True)
class StreamRoute:
    handler: Callable[[StreamCall], StreamReceiver | None]
    """None = the stream has been finished."""


Route = UnaryRoute | StreamRoute
Routes = Mapping[str, Route]
"""By the method's full name, "/package.Service/Method"."""


def full_name(method: str) -> str:
    service = "grpc.health.v1.Health" if method in ("Check", "Watch") else "inference.GRPCInferenceService"
    return f"/{service}/{method}"


def guarded_routes(routes: Routes, restrictions: Mapping[str, Restriction]) -> Routes:
    """By full names, those that are restricted behind a check of the call's metadata. What anybody may call is left as
    it is, so that it costs nothing."""

    def guarded(route: Route, restriction: Restriction) -> Route:
        handler: Callable[[Any], Any] = route.handler

        def handle(call: Any) -> Any:
            if restriction.admits_metadata(call.metadata):
                return handler(call)
            return call.reply_error(restriction.refusal())

        return replace(route, handler=handle)

    return {
        full_name(name): guarded(route, restrictions[name]) if name in restrictions else route
        for name, route in routes.items()
    }


def address_of(peer: str) -> str:
    """From gRPC's notation: "ipv4:127.0.0.1:40000", "ipv6:[::1]:40000" (also in URL's escapes), "unix:/path"."""
    kind, _, rest = peer.partition(":")
    return "unix" if kind in ("unix", "unix-abstract") else unquote(rest).rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds of a transport, beside those of its settings."""

    handshake_timeout_ms: int = 10_000
    """What a new connection has for TLS and for HTTP/2's first frames."""
    write_timeout_seconds: float = 60.0
    """An answer that its client has not taken by then is given up; a large one has longer, see `write_seconds`."""
    max_connections: int | None = None
    """One more is closed at once; None = any number."""
    max_concurrent_calls: int = 20_000
    """Calls and streams in flight; one more is refused with UNAVAILABLE. Those that wait for their clients have bounds
    of their own."""
    waiting: WaitingLimits = field(default_factory=WaitingLimits)
    stream_unanswered_limit: int = 1024
    """Messages of one stream that may be unanswered before the next is read. Many: the next message may be what those
    wait for, the end of the sequence that has their slot."""
    stream_backlog_bytes: int = 16 << 20
    """Unsent bytes of one stream at which no more of its messages are read."""
    stream_backlog_limit_bytes: int = 1 << 30
    """Unsent bytes of one stream at which it is ended with RESOURCE_EXHAUSTED: its client does not read."""

    @classmethod
    def of(cls, settings: ServerSettings) -> TransportLimits:
        limit = file_limit()
        return cls(
            write_timeout_seconds=settings.write_timeout_seconds,
            max_connections=None if limit is None else limit // _GRPC_SHARE,
            waiting=WaitingLimits(message_seconds=settings.grpc.message_timeout_seconds),
        )

    def write_seconds(self, nbytes: int) -> float:
        """The time for the client to take an answer of `nbytes`. gRPC does not report how far it has got."""
        return self.write_timeout_seconds + nbytes / LEAST_READ_BYTES_PER_SECOND


def transport_settings(settings: ServerSettings) -> GrpcSettings:
    """gRPC's own, with the age that connections on all ports may have where it has none."""
    age_ms = settings.grpc.max_connection_age_ms or int(settings.max_connection_age_seconds * 1000)
    return replace(settings.grpc, max_connection_age_ms=age_ms)


def listen_address(settings: GrpcSettings) -> ListenAddress:
    return ListenAddress("gRPC", "grpc", settings.address, settings.port, settings.reuse_port)


def file_limit() -> int | None:
    """How many files this process may have open; None = any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def channel_arguments(settings: GrpcSettings, limits: TransportLimits) -> tuple[tuple[str, int], ...]:
    """Both under the names of gRPC's core (grpc/impl/channel_arg_names.h)."""
    most_calls = limits.max_concurrent_calls + limits.waiting.total
    arguments = {
        "grpc.so_reuseport": int(settings.reuse_port),
        # With more in one read the core has a thread of its own go on, which does not wake the loop (server.py).
        "grpc.http2.max_requests_per_read": MOST_REQUESTS_PER_READ,
        # Windows that grow with what is received have the core read 100 MiB of a connection in one go.
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
        # Calls that wait for being asked for. The core's own limit of 1,000 would refuse a burst at random.
        "grpc.server.max_pending_requests": most_calls,
        "grpc.server.max_pending_requests_hard_limit": 2 * most_calls,
    }
    where_given = {
        "grpc.default_compression_level": _COMPRESSION_LEVELS[settings.infer_response_compression_level],
        "grpc.max_allowed_incoming_connections": limits.max_connections,
        "grpc.max_connection_idle_ms": settings.max_connection_idle_ms,
        "grpc.max_connection_age_ms": settings.max_connection_age_ms,
        "grpc.max_connection_age_grace_ms": settings.max_connection_age_grace_ms,
    }
    return (*arguments.items(), *((name, number) for name, number in where_given.items() if number and number > 0))


def binding_error(where: ListenAddress, files: CertificateFiles | None) -> OSError:
    """Why gRPC could not bind. It does not say, so a plain socket asks the system again."""
    try:
        with where.bind() as probe:
            probe.listen()
    except OSError as error:
        return where.refusal(error)
    if files is not None:
        return OSError(errno.EINVAL, f"cannot serve gRPC with TLS: {files.expected}")
    return where.refusal(OSError(errno.EADDRINUSE, ""))


SERVER_EXITING = "Server exiting"
