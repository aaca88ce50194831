"""Routes that are only for clients that send a secret header (--grpc-restricted-protocol)."""

from __future__ import annotations

from rocserve.frontends.grpc.transport import Route, StreamCall, StreamReceiver, StreamRoute, UnaryCall, UnaryRoute
from rocserve.services.restrictions import Restriction


def guarded(route: Route, restriction: Restriction) -> Route:
    """The route, behind a look at the call's metadata."""
    if isinstance(route, UnaryRoute):
        return _guarded_unary(route, restriction)
    return _guarded_stream(route, restriction)


def _guarded_unary(route: UnaryRoute, restriction: Restriction) -> UnaryRoute:
    serve, refusal = route.handler, restriction.refusal()

    def handle(call: UnaryCall) -> None:
        if restriction.admits_metadata(call.metadata):
            serve(call)
        else:
            call.fail(refusal.code, refusal.text)

    return UnaryRoute(handle)


def _guarded_stream(route: StreamRoute, restriction: Restriction) -> StreamRoute:
    serve, refusal = route.handler, restriction.refusal()

    def handle(call: StreamCall) -> StreamReceiver:
        if restriction.admits_metadata(call.metadata):
            return serve(call)
        call.finish(refusal.code, refusal.text)
        return _RefusedStream()

    return StreamRoute(handle)


class _RefusedStream:
    """What the client had sent already goes nowhere."""

    def on_message(self, message: bytes) -> None: ...

    def on_half_close(self) -> None: ...

    def on_cancel(self) -> None: ...
