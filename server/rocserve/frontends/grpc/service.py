"""The routes of all methods of gRPC but inference, the health service among them: how they are served, how errors reach
clients, who may call them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from google.protobuf.message import Message

from rocserve.core.errors import ServeError, StatusCode, not_found
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.serving import ServingTableHolder
from rocserve.core.tensors import Buffer
from rocserve.frontends.grpc.transport import (
    SERVER_EXITING,
    Route,
    StreamCall,
    StreamRoute,
    UnaryCall,
    UnaryRoute,
    address_of,
    guarded_routes,
)
from rocserve.observability.failures import RequestFailures
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol import health_pb2 as pb
from rocserve.protocol.faults import parse_message
from rocserve.services.access import ADMIN_METHODS, FORWARDING_HEADERS, PROTOCOLS, Access, Peer
from rocserve.services.methods import Method
from rocserve.services.queries import Readiness

SERVER_SERVICES = ("", "inference.GRPCInferenceService", "grpc.health.v1.Health")


@dataclass(eq=False)
class HealthHandlers:
    """The service "" is the server; any other name that is not one of our services is a model's. On the data plane's
    thread."""

    _tables: ServingTableHolder
    _readiness: Readiness
    watches: set[HealthWatch] = field(default_factory=set, init=False)

    def check(self, message: Buffer) -> bytes:
        service = parse_message(message, pb.HealthCheckRequest).service
        status = self.status(service)
        if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            raise not_found(f"unknown service '{service}': neither a service of this server nor a model")
        return pb.HealthCheckResponse(status=status).SerializeToString()

    def status(self, service: str) -> pb.HealthCheckResponse.ServingStatus:
        if service in SERVER_SERVICES:
            serving = self._readiness.is_ready()
        else:
            model = self._tables.table.models.get(service)
            if model is None:
                return pb.HealthCheckResponse.SERVICE_UNKNOWN
            serving = model.latest is not None and not self._readiness.is_exiting
        return pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING

    def publish(self) -> None:
        for watch in list(self.watches):
            watch.send_change()

    def end(self) -> None:
        """End all watches: the server is going."""
        for watch in list(self.watches):
            watch.finish(StatusCode.UNAVAILABLE, SERVER_EXITING)


class HealthWatch:
    """One Watch call: a message for the state now, and one for each change of it."""

    def __init__(self, call: StreamCall, handlers: HealthHandlers) -> None:
        self._call = call
        self._handlers = handlers
        self._service: str | None = None
        self._last: int | None = None
        handlers.watches.add(self)

    def on_message(self, message: bytes) -> None:
        self._service = parse_message(message, pb.HealthCheckRequest).service
        self.send_change()
        self._call.request_next()

    def on_half_close(self) -> None:
        if self._service is None:
            self.finish(StatusCode.INVALID_ARGUMENT, "expected one HealthCheckRequest, got none")

    def on_cancel(self) -> None:
        self._handlers.watches.discard(self)

    def send_change(self) -> None:
        if self._service is None:
            return
        status = self._handlers.status(self._service)
        if status != self._last:
            self._last = status
            self._call.send(pb.HealthCheckResponse(status=status).SerializeToString())

    def finish(self, code: StatusCode, text: str) -> None:
        self._call.finish(code, text)
        self._handlers.watches.discard(self)


class MethodRoutes:
    """Makes routes, which anybody may call."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, plane: PlaneLoop, memory: RequestMemory, log: logging.Logger
    ) -> None:
        """`loop`: runs what takes long. `plane`: calls the routes."""
        self._loop = loop
        self._plane = plane
        self._memory = memory
        self._failures = RequestFailures(log)
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, method: Method) -> UnaryRoute:
        if not method.is_slow:
            return self.quick(lambda message: method.answer(parse_message(message, method.request)).SerializeToString())

        async def run(call: UnaryCall, holding: Holding) -> None:
            try:
                answer = await method.answer(parse_message(call.message, method.request))
                self._plane.call_soon(partial(call.reply, answer.SerializeToString()))
            except Exception as error:
                # Not in a variable: the error's traceback has this frame, and the two would keep each other alive.
                self._plane.call_soon(partial(self._fail, call, error))
            finally:
                self._memory.release(holding)

        def begin(call: UnaryCall, holding: Holding) -> None:
            task = self._loop.create_task(run(call, holding))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def hand_over(call: UnaryCall) -> None:
            holding = Holding()
            try:
                self._memory.admit(holding, len(call.message))
            except ServeError as error:
                self._fail(call, error)
            else:
                self._loop.call_soon_threadsafe(begin, call, holding)

        return UnaryRoute(hand_over)

    def quick(self, answer: Callable[[Buffer], bytes]) -> UnaryRoute:
        """A handler that answers in place."""

        def handle(call: UnaryCall) -> None:
            try:
                call.reply(answer(call.message))
            except Exception as error:
                self._fail(call, error)

        return UnaryRoute(handle)

    def _fail(self, call: UnaryCall, error: Exception) -> None:
        call.reply_error(self._failures.error_of(call.method, error))


def method_routes(
    methods: Mapping[str, Method], health: HealthHandlers, access: Access, routes: MethodRoutes
) -> Mapping[str, Route]:
    """Those of all methods of gRPC but ModelInfer and ModelStreamInfer, and of the health service, by full names."""
    found: dict[str, Route] = {
        "Check": routes.quick(health.check),
        "Watch": StreamRoute(lambda call: HealthWatch(call, health)),
    }
    for name, method in methods.items():
        if name in PROTOCOLS:
            route = routes.of(method)
            if name in ADMIN_METHODS:
                route = _admin_guarded(route, name, method.request, access)
            found[name] = route
    return guarded_routes(found, access.restrictions)


def _admin_guarded(route: UnaryRoute, method: str, request: type[Message], access: Access) -> UnaryRoute:

    def handle(call: UnaryCall) -> None:
        try:
            access.check_admin(method, peer_of(call), lambda: parse_message(call.message, request))
        except ServeError as error:
            call.reply_error(error)
        else:
            route.handler(call)

    return UnaryRoute(handle)


def peer_of(call: UnaryCall) -> Peer:
    return Peer(address_of(call.peer), any(key.lower() in FORWARDING_HEADERS for key, _ in call.metadata))
