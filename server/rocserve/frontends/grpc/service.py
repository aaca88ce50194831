"""The routes of all methods of gRPC but inference: how they are served, how errors reach clients, who may call them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from rocserve.core.errors import ServeError
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.grpc.guards import admin_guarded, guarded_routes
from rocserve.frontends.grpc.health import HealthHandlers
from rocserve.frontends.grpc.transport import Route, StreamRoute, UnaryCall, UnaryRoute
from rocserve.observability.failures import RequestFailures
from rocserve.protocol.faults import parse_message
from rocserve.services.admin_calls import ADMIN_METHODS, Access
from rocserve.services.method import Method, QuickMethod, SlowMethod
from rocserve.services.readiness import Readiness
from rocserve.services.restrictions import PROTOCOLS


class MethodRoutes:
    """Makes routes, which anybody may call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, memory: RequestMemory, log: logging.Logger) -> None:
        self._loop = loop
        self._memory = memory
        self._failures = RequestFailures(log)
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, method: Method) -> UnaryRoute:
        return self._slow(method) if isinstance(method, SlowMethod) else self.quick(_on_bytes(method))

    def quick(self, answer: Callable[[bytes], bytes]) -> UnaryRoute:
        """A handler that answers in place."""

        def handle(call: UnaryCall) -> None:
            try:
                call.reply(answer(call.message))
            except Exception as error:
                self._fail(call, error)

        return UnaryRoute(handle)

    def _slow(self, method: SlowMethod) -> UnaryRoute:
        """A handler that runs as a task of the event loop."""

        async def run(call: UnaryCall, holding: Holding) -> None:
            try:
                answer = await method.answer(parse_message(call.message, method.request))
                call.reply(answer.SerializeToString())
            except Exception as error:
                self._fail(call, error)
            finally:
                self._memory.release(holding)

        def begin(call: UnaryCall, holding: Holding) -> None:
            task = self._loop.create_task(run(call, holding))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return UnaryRoute(lambda call: self._hand_over(begin, call))

    def _hand_over(self, begin: Callable[[UnaryCall, Holding], None], call: UnaryCall) -> None:
        holding = Holding()
        try:
            self._memory.admit(holding, len(call.message))
        except ServeError as error:
            self._fail(call, error)
            return
        self._loop.call_soon_threadsafe(begin, call, holding)

    def _fail(self, call: UnaryCall, error: Exception) -> None:
        call.reply_error(self._failures.error_of(call.method, error))


def _on_bytes(method: QuickMethod) -> Callable[[bytes], bytes]:
    return lambda message: method.answer(parse_message(message, method.request)).SerializeToString()


class GrpcService:
    """All methods of gRPC but ModelInfer and ModelStreamInfer, and the health service."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        tables: ServingTableHolder,
        readiness: Readiness,
        subscribe: Callable[[Callable[[], None]], object],
        call_soon: Callable[[Callable[[], None]], object],
        access: Access,
        method_routes: MethodRoutes,
    ) -> None:
        """
        Args:
            subscribe: has its argument called, on the event loop, whenever readiness may have changed.
            call_soon: calls on the thread that the routes are called on.
        """
        self._methods = methods
        self._call_soon = call_soon
        self._method_routes = method_routes
        self._access = access
        self._health = HealthHandlers(tables, readiness)
        subscribe(self.publish)

    def publish(self) -> None:
        """Readiness may have changed: tell who watches. On the event loop."""
        self._call_soon(self._health.publish)

    def end_watches(self) -> None:
        """The server goes. On the event loop."""
        self._call_soon(self._health.end)

    def routes(self) -> Mapping[str, Route]:
        """By full names."""
        routes: dict[str, Route] = {
            name: self._route(name, method) for name, method in self._methods.items() if name in PROTOCOLS
        }
        routes |= {"Check": self._method_routes.quick(self._health.check), "Watch": StreamRoute(self._health.watch)}
        return guarded_routes(routes, self._access.restrictions)

    def _route(self, name: str, method: Method) -> UnaryRoute:
        route = self._method_routes.of(method)
        return admin_guarded(route, name, method.request, self._access.admin) if name in ADMIN_METHODS else route
