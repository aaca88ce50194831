"""The routes of the gRPC front end: which method is served how, and how its errors reach the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from rocserve.core.errors import ServeError
from rocserve.core.request_memory import Holding, RequestMemory
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.grpc.codec import InferCodec
from rocserve.frontends.grpc.guards import admin_guarded, guarded
from rocserve.frontends.grpc.health import HealthHandlers
from rocserve.frontends.grpc.inference import InferenceHandlers
from rocserve.frontends.grpc.transport import Route, StreamRoute, UnaryCall, UnaryRoute
from rocserve.observability.failures import RequestFailures
from rocserve.protocol.faults import parse_message
from rocserve.services.admin_calls import ADMIN_METHODS, AdminCalls, describe_access
from rocserve.services.forwarded_headers import header_forwarding
from rocserve.services.inference import InferenceService
from rocserve.services.methods import Method, QuickMethod, SlowMethod
from rocserve.services.readiness import Readiness
from rocserve.services.restrictions import GRPC_HEADER_PREFIX, restrictions
from rocserve.settings import AdminAddresses, GrpcSettings

INFERENCE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"


class GrpcService:
    """Everything behind the transport."""

    def __init__(
        self,
        inference: InferenceService,
        methods: Mapping[str, Method],
        tables: ServingTableHolder,
        readiness: Readiness,
        subscribe: Callable[[Callable[[], None]], object],
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        settings: GrpcSettings,
        memory: RequestMemory,
        admin_addresses: AdminAddresses | None,
    ) -> None:
        """`subscribe`: has its argument called, on the loop, whenever readiness may have changed."""
        self._methods = methods
        self._loop = loop
        self._memory = memory
        self._failures = RequestFailures(log)
        self._restrictions = restrictions(settings.restricted, log, GRPC_HEADER_PREFIX)
        self._admin = AdminCalls(admin_addresses, ADMIN_METHODS if settings.use_ssl_mutual else self._restrictions)
        forwarding = header_forwarding(settings.header_forward_pattern)
        self._inference = InferenceHandlers(inference, InferCodec(), memory, forwarding)
        self._health = HealthHandlers(tables, readiness.is_ready)
        self._tasks: set[asyncio.Task[None]] = set()
        subscribe(self._health.publish)

    def begin_exit(self) -> None:
        """The server has begun to end: tell who watches, and end streams that wait for nothing. On the event loop."""
        self._health.publish()
        self._health.end()
        self._inference.begin_exit()

    def describe_access(self) -> str:
        """Who may call what, for the log."""
        return describe_access(self._restrictions, self._admin)

    def routes(self) -> Mapping[str, Route]:
        """All methods of the two services."""
        routes: dict[str, Route] = {
            INFERENCE + name: self._route(name, method) for name, method in self._methods.items()
        }
        routes |= {
            INFERENCE + "ModelInfer": UnaryRoute(self._inference.model_infer),
            INFERENCE + "ModelStreamInfer": StreamRoute(self._inference.model_stream_infer),
            HEALTH + "Check": self._quick(self._health.check),
            HEALTH + "Watch": StreamRoute(self._health.watch),
        }
        return {name: self._guarded(name, route) for name, route in routes.items()}

    def _guarded(self, name: str, route: Route) -> Route:
        """What anybody may call is left as it is, so that it costs nothing."""
        restriction = self._restrictions.get(name.rpartition("/")[2])
        return route if restriction is None else guarded(route, restriction)

    def _route(self, name: str, method: Method) -> UnaryRoute:
        route = self._slow(method) if isinstance(method, SlowMethod) else self._quick(_on_bytes(method))
        return admin_guarded(route, name, method.request, self._admin) if name in ADMIN_METHODS else route

    def _quick(self, answer: Callable[[bytes], bytes]) -> UnaryRoute:
        """A handler that answers in place, on the transport's thread."""

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
