"""Starts the front ends that the settings ask for together, and drains them together."""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from rocserve.backends.parameters import usable_cpus
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_memory import RequestMemory, table_bytes
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.grpc.service import HealthHandlers, MethodRoutes
from rocserve.frontends.grpc.transport import Route, TransportLimits, listen_address, transport_settings
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.tls import tls_context
from rocserve.observability.failures import log_loop_error
from rocserve.plane import anonymous_file
from rocserve.plane.loop import PlaneLoop
from rocserve.services.access import Access
from rocserve.services.inference import InferenceService, header_forwarding
from rocserve.services.methods import Method, on_loop
from rocserve.services.readiness import Readiness
from rocserve.settings import GrpcSettings, HttpSettings, ServerSettings, default_front_ends

if TYPE_CHECKING:
    # A server with gRPC alone does not import HTTP's modules. A server with front end processes does not import gRPC's.
    from rocserve.frontends.grpc.inference import InferenceHandlers
    from rocserve.frontends.grpc.server import GrpcServer
    from rocserve.frontends.http.listener import HttpListener
    from rocserve.frontends.processes.supervisor import FrontEndParts, FrontEndProcesses
    from rocserve.plane.guest_loop import GuestLoop


_PROTOCOLS = 2
_ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Served:
    inference: InferenceService
    methods: Mapping[str, Method]
    tables: ServingTableHolder
    readiness: Readiness
    subscribe: Callable[[Callable[[], None]], object]
    """Calls its argument, on the event loop, whenever readiness may have changed."""
    write_metrics: Callable[[], str]
    memory: RequestMemory


@dataclass(frozen=True, slots=True)
class _Started:
    """A front end that has started."""

    line: str
    """For the log: where it listens, in Triton's words."""
    details: Sequence[str] = ()
    """For the log, if it is verbose."""


@dataclass(eq=False)
class FrontEnds:
    """Starts and drains the front ends, on the event loop."""

    _settings: ServerSettings
    _command: Sequence[str]
    """The flags that the settings come from."""
    _served: Served
    _plane: PlaneLoop
    _log: logging.Logger

    def __post_init__(self) -> None:
        self._ports: dict[str, int] = {}
        """"http", "grpc" or "metrics" -> the port that is listened on."""
        self._metrics: HttpListener | None = None
        self._http: HttpListener | None = None
        self._guest: GuestLoop | None = None
        """The event loop of HTTP."""
        self._health = HealthHandlers(self._served.tables, self._served.readiness)
        self._handlers: InferenceHandlers | None = None
        self._transport: GrpcServer | None = None
        cpus, asked = usable_cpus(), self._settings.front_ends
        self._count = default_front_ends(cpus) if asked is None else asked
        """Number of processes that serve each protocol; 0 = the server's own process does."""
        self._why_so_many = f"by default with {cpus} CPUs" if asked is None else "as --front-ends says"
        self._processes: dict[str, FrontEndProcesses] = {}
        self._common: FrontEndParts | None = None
        self._routes = MethodRoutes(asyncio.get_running_loop(), self._plane, self._served.memory, self._log)

    async def start(self) -> Sequence[Exception]:
        """Listen on all ports. Returns the errors of ports that cannot be served; then all others have been closed."""
        starts = (self._start_metrics(), self._start_http(), self._start_grpc())
        # All start together: processes take long to start, and all ports in use are reported.
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        refusals = []
        for outcome in outcomes:
            if isinstance(outcome, (OSError, RuntimeError, ValueError)):
                refusals.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        if refusals:
            await self.drain(time.monotonic())
            await self.stop_metrics()
            return refusals
        for started in outcomes:
            if isinstance(started, _Started):
                for line in started.details:
                    self._log.debug("%s", line)
                self._log.info("%s", started.line)
        return ()

    def status_command(self) -> str:
        """Return the command that shows people this server's models."""
        grpc = self._settings.grpc
        if not grpc.allow:
            return "the repository index"
        tls = " --tls" if grpc.use_ssl or grpc.use_ssl_mutual else ""
        return f"`rocserve status --url={_host(grpc)}:{self._ports['grpc']}{tls}`"

    def plain_addresses(self) -> Mapping[str, str]:
        """Return "http" and "grpc" -> address on this machine, for protocols that need no TLS and no secret."""
        parts: dict[str, HttpSettings | GrpcSettings] = {"http": self._settings.http, "grpc": self._settings.grpc}
        return {
            name: f"{_host(part)}:{self._ports[name]}"
            for name, part in parts.items()
            if part.allow and not (part.use_ssl or part.use_ssl_mutual or part.restricted)
        }

    def begin_drain(self) -> None:
        """Announce the end of the server: notify health watchers, and let HTTP's clients connect again elsewhere."""
        self._publish_health()
        if self._http is not None:
            self._plane.call_soon(self._http.close_after_answers)
        if "HTTP" in self._processes:
            self._processes["HTTP"].begin_exit()

    def begin_exit(self) -> None:
        """End health watches and the streams that wait for no answer, because the server has begun to end."""
        self._plane.call_soon(self._health.end)
        if self._handlers is not None:
            self._plane.call_soon(self._handlers.begin_exit)
        if "gRPC" in self._processes:
            self._processes["gRPC"].begin_exit()

    def _publish_health(self) -> None:
        self._plane.call_soon(self._health.publish)

    async def drain(self, deadline: float) -> None:
        """Stop listening, let requests finish until the deadline (time.monotonic()), close all but metrics; immediately
        if cancelled. Raises the first error after all are closed."""
        grace = max(0.0, deadline - time.monotonic())
        transport, processes, http, guest = self._transport, self._processes, self._http, self._guest
        self._transport = self._http = self._guest = None
        self._processes = {}
        try:
            outcomes = await asyncio.gather(
                *([asyncio.to_thread(transport.stop, grace)] if transport is not None else []),
                *(each.stop(grace) for each in processes.values()),
                *([guest.run(http.stop(grace))] if guest is not None and http is not None else []),
                return_exceptions=True,
            )
        except asyncio.CancelledError:
            # The thread waits for the grace time unless `stop` is called again without a grace time.
            if transport is not None:
                await asyncio.to_thread(transport.stop, 0.0)
            raise
        finally:
            if guest is not None:
                self._plane.call_soon(guest.close)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def stop_metrics(self) -> None:
        if self._metrics is not None:
            await self._metrics.stop()
            self._metrics = None

    async def _start_metrics(self) -> _Started | None:
        settings = self._settings.metrics
        if not settings.allow:
            return None
        from rocserve.frontends.http.connection import ConnectionLimits
        from rocserve.frontends.http.listener import most_descriptors
        from rocserve.frontends.metrics.endpoint import MOST_CONNECTIONS, metrics_listener

        limits = ConnectionLimits(
            write_seconds=self._settings.write_timeout_seconds,
            most=MOST_CONNECTIONS,
            most_descriptors=most_descriptors(),
        )
        listener = metrics_listener(
            self._served.write_metrics,
            limits,
            self._log.getChild("metrics"),
            tls_context(self._settings.grpc, settings, "metrics", self._log),
        )
        address = settings.address or self._settings.http.address
        port = self._ports["metrics"] = await listener.start(
            ListenAddress("metrics", "metrics", address, settings.port)
        )
        self._metrics = listener
        return _Started(f"Started Metrics Service at {address}:{port}")

    async def _start_http(self) -> _Started | None:
        settings = self._settings.http
        if not settings.allow:
            return None
        served, log = self._served, self._log.getChild("http")
        where = ListenAddress("HTTP", "http", settings.address, settings.port, settings.reuse_port)
        access = Access.of(self._settings, settings, log)
        if self._count:
            port = await self._start_processes(where, self._routes.open(served.methods), log)
        else:
            from rocserve.frontends.http.body import LargeBodies
            from rocserve.frontends.http.inference import HttpParts
            from rocserve.frontends.http.service import start_http
            from rocserve.plane.guest_loop import GuestLoop

            self._guest = GuestLoop(self._plane)
            self._guest.set_exception_handler(partial(log_loop_error, log))
            methods = {name: on_loop(method, asyncio.get_running_loop()) for name, method in served.methods.items()}

            def find_model(name: str, version: str) -> ModelConfig:
                return served.tables.table.find(name, version).config

            parts = HttpParts(served.inference, methods, find_model, served.memory, LargeBodies(), settings)
            self._http, port = await self._guest.run(start_http(self._settings, where, parts, log))
        started = self._started("HTTP", "HTTPService", access, settings.address, port)
        if not settings.allow_ui:
            return started
        scheme, host = "https" if settings.use_ssl or settings.use_ssl_mutual else "http", _host(settings)
        page = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
        return replace(started, line=f"{started.line}, with a page at {page}")

    async def _start_grpc(self) -> _Started | None:
        settings = self._settings.grpc
        if not settings.allow:
            return None
        served, log = self._served, self._log.getChild("grpc")
        access = Access.of(self._settings, settings, log)
        served.subscribe(self._publish_health)
        routes = self._routes.guarded(served.methods, self._health, access)
        if self._count:
            port = await self._start_processes(listen_address(settings), routes, log)
        else:
            from rocserve.frontends.grpc.inference import InferenceHandlers
            from rocserve.frontends.grpc.server import GrpcServer

            handlers = InferenceHandlers(
                served.inference, served.memory, header_forwarding(settings.header_forward_pattern)
            )
            transport = GrpcServer(
                transport_settings(self._settings),
                {**routes, **handlers.routes(access.restrictions)},
                log,
                self._plane,
                served.memory,
                TransportLimits.of(self._settings, served.memory),
            )
            port = transport.start()
            self._handlers, self._transport = handlers, transport
        return self._started("gRPC", "GRPCInferenceService", access, settings.address, port)

    def _started(self, protocol: str, name: str, access: Access, address: str, port: int) -> _Started:
        """Store the port."""
        self._ports[protocol.lower()] = port
        who = f"{self._count} processes" if self._count else "this process"
        return _Started(
            f"Started {name} at {address}:{port}",
            (f"{protocol} is served by {who}, {self._why_so_many}", f"{protocol}: {access.describe()}"),
        )

    async def _start_processes(self, where: ListenAddress, routes: Mapping[str, Route], log: logging.Logger) -> int:
        from rocserve.frontends.processes.supervisor import FrontEndParts, FrontEndProcesses

        served, loop = self._served, asyncio.get_running_loop()
        if self._common is None:
            edition = anonymous_file.create("rocserve:edition", mmap.PAGESIZE)
            served.subscribe(partial(_count, anonymous_file.map_file(edition, to_write=True).cast("Q")))
            uses = anonymous_file.create("rocserve:uses", table_bytes(1 + _PROTOCOLS * self._count))
            served.memory.share(anonymous_file.map_file(uses, to_write=True), 0)
            self._common = FrontEndParts(
                self._command,
                served.inference,
                self._plane,
                served.memory,
                (anonymous_file.open_for_reading(edition), uses),
            )

            def send_wants_origins() -> None:
                for each in self._processes.values():
                    each.send_wants_origins()

            served.inference.watch_wants(lambda: loop.call_soon_threadsafe(send_wants_origins))
        processes = FrontEndProcesses(where, self._count, routes, self._common, log)
        port = await processes.start()
        self._processes[where.protocol] = processes
        return port


def _count(edition: memoryview) -> None:
    """Note that the serving table has been replaced."""
    edition[0] += 1


def _host(part: GrpcSettings | HttpSettings) -> str:
    """Return the host by which clients on this machine reach the address."""
    return "localhost" if part.address in _ANY_ADDRESS else part.address
