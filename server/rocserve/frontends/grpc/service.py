"""The routes of all methods of gRPC but inference, and who may call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.grpc.guards import admin_guarded, guarded_routes
from rocserve.frontends.grpc.health import HealthHandlers
from rocserve.frontends.grpc.method_routes import MethodRoutes
from rocserve.frontends.grpc.transport import Route, StreamRoute, UnaryRoute
from rocserve.services.admin_calls import ADMIN_METHODS, Access
from rocserve.services.method import Method
from rocserve.services.readiness import Readiness
from rocserve.services.restrictions import PROTOCOLS


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
