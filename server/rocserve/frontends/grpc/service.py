"""The routes of all methods but inference: which is served how, and how its errors reach the client."""

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
from rocserve.services.admin_calls import ADMIN_METHODS, AdminCalls, describe_access
from rocserve.services.methods import Method, QuickMethod, SlowMethod
from rocserve.services.readiness import Readiness
from rocserve.services.restrictions import Restriction


class GrpcService:
    """All methods but ModelInfer and ModelStreamInfer, and the health service."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        tables: ServingTableHolder,
        readiness: Readiness,
        subscribe: Callable[[Callable[[], None]], object],
        loop: asyncio.AbstractEventLoop,
        call_soon: Callable[[Callable[[], None]], object],
        log: logging.Logger,
        restrictions: Mapping[str, Restriction],
        admin: AdminCalls,
        memory: RequestMemory,
    ) -> None:
        """
        Args:
            subscribe: has its argument called, on the event loop, whenever readiness may have changed.
            call_soon: calls on the thread that the routes are called on.
        """
        self._methods = methods
        self._loop = loop
        self._call_soon = call_soon
        self._memory = memory
        self._failures = RequestFailures(log)
        self._restrictions = restrictions
        self._admin = admin
        self._health = HealthHandlers(tables, readiness.is_ready)
        self._tasks: set[asyncio.Task[None]] = set()
        subscribe(self._publish)

    def begin_exit(self) -> None:
        """The server has begun to end: tell who watches. On the event loop."""
        self._call_soon(self._end_health)

    def _end_health(self) -> None:
        self._health.publish()
        self._health.end()

    def _publish(self) -> None:
        self._call_soon(self._health.publish)

    def describe_access(self) -> str:
        """Who may call what, for the log."""
        return describe_access(self._restrictions, self._admin)

    def routes(self) -> Mapping[str, Route]:
        """By full names."""
        routes: dict[str, Route] = {name: self._route(name, method) for name, method in self._methods.items()}
        routes |= {"Check": self._quick(self._health.check), "Watch": StreamRoute(self._health.watch)}
        return guarded_routes(routes, self._restrictions)

    def _route(self, name: str, method: Method) -> UnaryRoute:
        route = self._slow(method) if isinstance(method, SlowMethod) else self._quick(_on_bytes(method))
        return admin_guarded(route, name, method.request, self._admin) if name in ADMIN_METHODS else route

    def _quick(self, answer: Callable[[bytes], bytes]) -> UnaryRoute:
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
        told = self._failures.error_of(call.method, error)
        call.fail(told.code, told.text)


def _on_bytes(method: QuickMethod) -> Callable[[bytes], bytes]:
    return lambda message: method.answer(parse_message(message, method.request)).SerializeToString()
