"""Serves clients over gRPC and HTTP in this process: in the server's, or in a front end's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.transport import Routes, TransportLimits, transport_settings
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.shared_ports import has_connections
from rocserve.plane.loop import PlaneLoop
from rocserve.services.access import GRPC_HEADER_PREFIX, restrictions
from rocserve.services.inference import Inference, header_forwarding
from rocserve.settings import ServerSettings
from rocserve.settings.unix_place import UnixPlace

if TYPE_CHECKING:
    # The modules of a protocol that is switched off are not imported.
    from rocserve.frontends.grpc.inference import InferenceHandlers
    from rocserve.frontends.grpc.relay import UserRelay
    from rocserve.frontends.grpc.server import GrpcServer
    from rocserve.frontends.http.inference import HttpParts
    from rocserve.frontends.http.listener import HttpListener
    from rocserve.plane.guest_loop import GuestLoop


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers the requests of clients: the server's services, or the link to them."""

    inference: Inference
    memory: RequestMemory
    routes: Routes
    """gRPC's routes, without those of inference."""
    http_parts: Callable[[], HttpParts]
    """Makes the parts of HTTP's requests."""


class Transports:
    """The transports of both protocols. Its methods are called on one event loop; clients are served on the plane's
    thread."""

    def __init__(
        self,
        settings: ServerSettings,
        plane: PlaneLoop,
        guest: GuestLoop,
        answering: Answering,
        log: logging.Logger,
        renewal_ms: int = 0,
    ) -> None:
        """`renewal_ms`: the age at which gRPC's connections are renewed; 0 = not at all."""
        self._settings = settings
        self._plane = plane
        self._guest = guest
        self._answering = answering
        self._log = log
        self._renewal_ms = renewal_ms
        self._ports: list[int] = []
        self._relay: UserRelay | None = None
        self._handlers: InferenceHandlers | None = None
        self._grpc: GrpcServer | None = None
        self._http: HttpListener | None = None

    async def start(self, where: ListenAddress) -> int:
        """Listen at the address of a protocol, and return the port (meaningless for a Unix socket). Raises
        OSError, RuntimeError or ValueError if that is impossible."""
        port = await (self._start_http(where) if where.protocol == "HTTP" else self._start_grpc(where))
        self._ports.append(port)
        return port

    async def _start_grpc(self, where: ListenAddress) -> int:
        from rocserve.frontends.grpc.inference import InferenceHandlers
        from rocserve.frontends.grpc.server import GrpcServer

        settings, memory, log = self._settings, self._answering.memory, self._log.getChild("grpc")
        handlers = InferenceHandlers(
            self._answering.inference, memory, header_forwarding(settings.grpc.header_forward_pattern)
        )
        restricted = restrictions(settings.grpc.restricted, log, GRPC_HEADER_PREFIX)
        routes = {**self._answering.routes, **handlers.routes(restricted)}
        if settings.grpc.reflection:
            from rocserve.frontends.grpc.reflection import METHOD, reflection_routes

            routes |= reflection_routes(restricted.get(METHOD))
        transport = GrpcServer(
            replace(transport_settings(settings), port=where.port, reuse_port=where.reuse_port),
            routes,
            log,
            self._plane,
            memory,
            TransportLimits.of(settings, memory, self._renewal_ms),
            behind_relay=where.unix is not None and settings.tells_users_apart,
        )
        port = transport.start()
        self._handlers, self._grpc = handlers, transport
        if where.unix is not None and settings.tells_users_apart:
            try:
                self._relay = await self._guest.run(_start_relay(where.unix, transport, log))
            except OSError as error:
                raise where.refusal(error) from None
        return port

    async def _start_http(self, where: ListenAddress) -> int:
        from rocserve.frontends.http.service import start_http

        parts, log = self._answering.http_parts(), self._log.getChild("http")
        self._http, port = await self._guest.run(start_http(self._settings, where, parts, log))
        return port

    def close_after_answers(self, closes: bool = True) -> None:
        """Let HTTP's clients connect again after their next answer, here or elsewhere; or no longer."""
        if self._http is not None:
            self._plane.call_soon(partial(self._http.close_after_answers, closes))

    @property
    def in_flight(self) -> int:
        """Return the number of calls, open streams and requests of clients."""
        calls = 0 if self._grpc is None else len(self._grpc.calls.live)
        # Copied in one step, because the plane's thread changes the set.
        connections = [] if self._http is None else list(self._http.connections)
        return calls + sum(one.current is not None for one in connections)

    def has_clients(self) -> bool:
        return any(map(has_connections, self._ports))

    def end_streams(self) -> None:
        """End the streams that wait for no answer, because the server has begun to end."""
        if self._handlers is not None:
            self._plane.call_soon(self._handlers.begin_exit)

    async def stop(self, grace_seconds: float) -> None:
        """Stop listening, let requests finish within the grace time, and close; immediately if cancelled. Raises the
        first error after both have been closed."""
        grpc, http, relay = self._grpc, self._http, self._relay
        self._grpc = self._http = self._relay = None
        if relay is not None:
            # The plane's thread closes the relay's connections with those of the core.
            self._plane.call_soon(relay.stop_listening)
        try:
            outcomes = await asyncio.gather(
                *([asyncio.to_thread(grpc.stop, grace_seconds)] if grpc is not None else []),
                *([self._guest.run(http.stop(grace_seconds))] if http is not None else []),
                return_exceptions=True,
            )
        except asyncio.CancelledError:
            # The thread waits for the grace time unless `stop` is called again without a grace time.
            if grpc is not None:
                await asyncio.to_thread(grpc.stop, 0.0)
            raise
        if relay is not None:
            await self._guest.run(relay.close())
        for outcome in outcomes:
            if outcome is not None:
                raise outcome


async def _start_relay(place: UnixPlace, transport: GrpcServer, log: logging.Logger) -> UserRelay:
    from rocserve.frontends.grpc.relay import UserRelay

    return UserRelay(place, transport.relay_path, log)
