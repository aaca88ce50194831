"""Guards routes: some are only for clients that send a secret header (--grpc-restricted-protocol), or that are where
admin calls may come from (--admin-address)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import unquote

from google.protobuf.message import Message

from rocserve.core.errors import ServeError
from rocserve.frontends.grpc.transport import Route, StreamCall, StreamReceiver, StreamRoute, UnaryCall, UnaryRoute
from rocserve.protocol.faults import parse_message
from rocserve.services.access import FORWARDING_HEADERS, AdminCalls, Peer, Restriction

_INFERENCE = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/"
_HEALTH_METHODS = frozenset({"Check", "Watch"})


def full_name(method: str) -> str:
    """As the transport has it, of a method of either service."""
    return f"{_HEALTH if method in _HEALTH_METHODS else _INFERENCE}{method}"


def guarded_routes(routes: Mapping[str, Route], restrictions: Mapping[str, Restriction]) -> Mapping[str, Route]:
    """By full names, those that are restricted behind a check of the call's metadata. What anybody may call is left as
    it is, so that it costs nothing."""
    return {full_name(name): _guarded(route, restrictions.get(name)) for name, route in routes.items()}


def admin_guarded(route: UnaryRoute, method: str, request: type[Message], admin: AdminCalls) -> UnaryRoute:
    """The route, behind a check of where the call comes from."""
    serve = route.handler

    def handle(call: UnaryCall) -> None:
        try:
            admin.check(method, peer_of(call), lambda: parse_message(call.message, request))
        except ServeError as error:
            call.reply_error(error)
        else:
            serve(call)

    return UnaryRoute(handle)


def peer_of(call: UnaryCall) -> Peer:
    return Peer(address_of(call.peer), any(key.lower() in FORWARDING_HEADERS for key, _ in call.metadata))


def address_of(peer: str) -> str:
    """From gRPC's notation: "ipv4:127.0.0.1:40000", "ipv6:[::1]:40000" (also in URL's escapes), "unix:/path"."""
    kind, _, rest = peer.partition(":")
    return "unix" if kind in ("unix", "unix-abstract") else unquote(rest).rpartition(":")[0].strip("[]")


def _guarded(route: Route, restriction: Restriction | None) -> Route:
    if restriction is None:
        return route
    refusal, admits = restriction.refusal(), restriction.admits_metadata
    if isinstance(route, UnaryRoute):
        answer = route.handler

        def answer_admitted(call: UnaryCall) -> None:
            if admits(call.metadata):
                answer(call)
            else:
                call.reply_error(refusal)

        return replace(route, handler=answer_admitted)
    open_stream = route.handler

    def open_admitted(call: StreamCall) -> StreamReceiver:
        if admits(call.metadata):
            return open_stream(call)
        call.finish(refusal.code, refusal.text)
        return _RefusedStream()

    return StreamRoute(open_admitted)


class _RefusedStream:
    """What the client had sent already goes nowhere."""

    def on_message(self, message: bytes) -> None: ...

    def on_half_close(self) -> None: ...

    def on_cancel(self) -> None: ...
