"""Routes all gRPC methods but inference to their services, checks who may call them, and sends errors to clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rocserve.core.errors import ServeError, StatusCode, not_found
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.grpc.transport import (
    SERVER_EXITING,
    Route,
    StreamCall,
    StreamRoute,
    UnaryCall,
    UnaryRoute,
    address_of,
    full_name,
    guarded_routes,
)
from rocserve.observability.failures import RequestFailures
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol import health_pb2 as pb
from rocserve.protocol.faults import parse_message
from rocserve.services.access import ADMIN_METHODS, PROTOCOLS, Access, Peer
from rocserve.services.methods import Method
from rocserve.services.readiness import Readiness

SERVER_SERVICES = ("", "inference.GRPCInferenceService", "grpc.health.v1.Health")


@dataclass(eq=False)
class HealthHandlers:
    """Answers the health service: for the server (service "" or a name in SERVER_SERVICES) and for models (any other
    name). On the data plane's thread."""

    _tables: ServingTableHolder
    _readiness: Readiness
    watches: set[HealthWatch] = field(default_factory=set, init=False)

    def check(self, request: pb.HealthCheckRequest) -> Any:
        """Asks the models that define a check. Returns a HealthCheckResponse, or a coroutine for it."""
        service = request.service
        is_server = service in SERVER_SERVICES
        if not is_server and service not in self._tables.table.models:
            raise not_found(f"unknown service '{service}': neither a service of this server nor a model")
        ready = self._readiness.of_server() if is_server else self._readiness.of_model(service)
        if isinstance(ready, bool):
            return pb.HealthCheckResponse(status=_status(ready))

        async def answer(ready: Coroutine[Any, Any, bool]) -> pb.HealthCheckResponse:
            return pb.HealthCheckResponse(status=_status(await ready))

        return answer(ready)

    def status(self, service: str) -> pb.HealthCheckResponse.ServingStatus:
        """Return the status that is known without asking models."""
        if service in SERVER_SERVICES:
            return _status(self._readiness.is_ready())
        model = self._tables.table.models.get(service)
        if model is None:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return _status(model.latest is not None and not self._readiness.is_exiting)

    def publish(self) -> None:
        for watch in list(self.watches):
            watch.send_change()

    def end(self) -> None:
        for watch in list(self.watches):
            watch.finish(StatusCode.UNAVAILABLE, SERVER_EXITING)


def _status(is_serving: bool) -> pb.HealthCheckResponse.ServingStatus:
    return pb.HealthCheckResponse.SERVING if is_serving else pb.HealthCheckResponse.NOT_SERVING


@dataclass(eq=False)
class HealthWatch:
    """One Watch call: sends the present state, and each change of it."""

    _call: StreamCall
    _handlers: HealthHandlers
    _service: str | None = field(default=None, init=False)
    _last: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._handlers.watches.add(self)

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


@dataclass(frozen=True, slots=True)
class ServerRoutes:
    """The routes of all methods but inference. Full name -> route."""

    guarded: Mapping[str, Route]
    """Routes that decide which clients may make the call."""
    open: Mapping[str, Route]
    """Routes that do not: a front end has decided."""


class MethodRoutes:
    """Makes routes for methods. Full name -> route."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, plane: PlaneLoop, memory: RequestMemory, log: logging.Logger
    ) -> None:
        """`loop` runs slow methods. `plane` calls the routes."""
        self._loop = loop
        self._plane = plane
        self._memory = memory
        self._failures = RequestFailures(log)
        self._running: set[Future[None]] = set()

    def open(self, methods: Mapping[str, Method]) -> Mapping[str, Route]:
        """Return routes that do not check the client."""
        return {full_name(name): self._route(method) for name, method in methods.items()}

    def guarded(self, methods: Mapping[str, Method], health: HealthHandlers, access: Access) -> Mapping[str, Route]:
        """Return the routes of all methods but ModelInfer and ModelStreamInfer, and of the health service. Each checks
        first whether the client may call it."""
        found: dict[str, Route] = {
            "Check": self._route(Method(pb.HealthCheckRequest, health.check)),
            "Watch": StreamRoute(lambda call: HealthWatch(call, health)),
        }
        for name, method in methods.items():
            if name in ADMIN_METHODS:
                found[name] = self._admin_route(name, method, access)
            elif name in PROTOCOLS:
                found[name] = self._route(method)
        return guarded_routes(found, access.restrictions)

    def _admin_route(self, name: str, method: Method, access: Access) -> UnaryRoute:
        route = self._route(method)

        def handle(call: UnaryCall) -> None:
            try:
                access.check_admin(name, peer_of(call), lambda: parse_message(call.message, method.request))
            except ServeError as error:
                call.reply_error(error)
            else:
                route.handler(call)

        return UnaryRoute(handle)

    def _route(self, method: Method) -> UnaryRoute:
        async def run(call: UnaryCall, holding: Holding, pending: Coroutine[Any, Any, Any] | None) -> None:
            try:
                answer = await (pending or method.answer(parse_message(call.message, method.request)))
                self._plane.call_soon(partial(call.reply, answer.SerializeToString()))
            except Exception as error:
                # Passed on without a variable: the error's traceback has this frame, and frame and error would keep
                # each other alive.
                self._plane.call_soon(partial(self._fail, call, error))
            finally:
                self._memory.requests.release(holding)

        def hand_over(call: UnaryCall, pending: Coroutine[Any, Any, Any] | None = None) -> None:
            holding = Holding()
            try:
                self._memory.requests.admit(holding, len(call.message))
            except ServeError as error:
                self._fail(call, error)
                return
            running = asyncio.run_coroutine_threadsafe(run(call, holding, pending), self._loop)
            self._running.add(running)
            running.add_done_callback(self._running.discard)

        def answer_now(call: UnaryCall) -> None:
            try:
                answer = method.answer(parse_message(call.message, method.request))
                if isinstance(answer, Coroutine):
                    hand_over(call, answer)
                else:
                    call.reply(answer.SerializeToString())
            except Exception as error:
                self._fail(call, error)

        return UnaryRoute(hand_over if method.is_slow else answer_now)

    def _fail(self, call: UnaryCall, error: Exception) -> None:
        call.reply_error(self._failures.error_of(call.method, error))


def peer_of(call: UnaryCall) -> Peer:
    return Peer.of(address_of(call.peer), (key.lower() for key, _ in call.metadata))
