"""Starts the front ends that the settings ask for together, and drains them together."""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rocserve.backends.parameters import usable_cpus
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_memory import RequestMemory, table_bytes
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.demand import PACE, Demand
from rocserve.frontends.grpc.service import HealthHandlers, MethodRoutes, ServerRoutes
from rocserve.frontends.grpc.transport import Route, listen_address
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.moves import Moves
from rocserve.frontends.shared_ports import SharedPorts, kernel_has_filters
from rocserve.frontends.tls import tls_context
from rocserve.frontends.transports import Answering, Transports
from rocserve.observability.failures import log_loop_error
from rocserve.plane import anonymous_file
from rocserve.plane.guest_loop import GuestLoop
from rocserve.plane.loop import PlaneLoop
from rocserve.services.access import Access
from rocserve.services.inference import InferenceService
from rocserve.services.methods import Method, on_loop
from rocserve.services.readiness import Readiness
from rocserve.settings import GrpcSettings, HttpSettings, ServerSettings, default_front_ends
from rocserve.settings.unix_place import unix_place

if TYPE_CHECKING:
    # The modules of a service that is switched off are not imported.
    from rocserve.frontends.http.inference import HttpParts
    from rocserve.frontends.http.listener import HttpListener
    from rocserve.frontends.processes.supervisor import FrontEndProcesses


@dataclass(frozen=True, slots=True)
class Served:
    """What the front ends serve."""

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
    """A service that has started."""

    port: int
    line: str
    """For the log: its address, in Triton's words."""
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
        http, grpc = self._settings.http, self._settings.grpc
        self._addresses = (
            *([ListenAddress("HTTP", "http", http.address, http.port, http.reuse_port)] if http.allow else []),
            *([listen_address(grpc)] if grpc.allow else []),
        )
        """The address of each protocol that is served."""
        self._access: dict[str, Access] = {}
        """"http" or "grpc" -> who may call what."""
        self._started: dict[str, _Started] = {}
        """"metrics", "http" or "grpc" -> what listens for it."""
        self._metrics: HttpListener | None = None
        self._health = HealthHandlers(self._served.tables, self._served.readiness)
        cpus, asked = usable_cpus(), self._settings.front_ends
        self._count = default_front_ends(cpus) if asked is None else asked
        """The most front end processes; 0 = the server's own process serves clients."""
        self._why_so_many = f"by default with {cpus} CPUs" if asked is None else "as --front-ends says"
        if self._settings.unix_sockets:
            self._count, self._why_so_many = 0, "because processes cannot share a Unix socket"
        shares_ports = any(where.reuse_port for where in self._addresses)
        # Other servers' sockets would be among those that the kernel chooses from.
        self._on_demand = asked is None and self._count > 0 and not shares_ports
        """Whether the front ends start and end by demand."""
        self._renewal_ms = round(1000 * PACE.renewal_seconds) if self._on_demand else 0
        self._ports = SharedPorts(self._addresses)
        self._own: Transports | None = None
        self._guest: GuestLoop | None = None
        """The event loop of HTTP in this process."""
        self._processes: FrontEndProcesses | None = None
        self._uses = -1
        """Descriptor of the table in which all processes count the memory of requests."""
        self._moving: asyncio.Task[None] | None = None

    async def start(self) -> Sequence[Exception]:
        """Listen on all ports. Returns the errors of ports that cannot be served; then all others have been closed."""
        refusals = self._read_access()
        if self._count:
            refusals += self._ports.reserve()
        # All start together: processes take long to start, and all ports in use are reported.
        starts = (self._start_metrics(), *([] if refusals else self._start_services()))
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, (OSError, RuntimeError, ValueError)):
                refusals.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        if refusals:
            await self.drain(time.monotonic())
            await self.stop_metrics()
            return refusals
        for started in filter(None, map(self._started.get, ("metrics", "http", "grpc"))):
            for line in started.details:
                self._log.debug("%s", line)
            self._log.info("%s", started.line)
        if self._on_demand:
            self._watch_demand()
        return ()

    def status_command(self) -> str:
        """Return the command by which users see this server's models."""
        grpc = self._settings.grpc
        if not grpc.allow:
            return "the repository index"
        tls = " --tls" if grpc.use_ssl or grpc.use_ssl_mutual else ""
        return f"`rocserve status --url={self._address(grpc, 'grpc')}{tls}`"

    def plain_addresses(self) -> Mapping[str, str]:
        """Return "http" and "grpc" -> address on this machine, for protocols that need no TLS and no secret."""
        parts: dict[str, HttpSettings | GrpcSettings] = {"http": self._settings.http, "grpc": self._settings.grpc}
        return {
            name: self._address(part, name)
            for name, part in parts.items()
            if part.allow and not (part.use_ssl or part.use_ssl_mutual or part.restricted)
        }

    def begin_drain(self) -> None:
        """Announce the end of the server: notify health watchers, and let HTTP's clients connect again elsewhere."""
        if self._moving is not None:
            self._moving.cancel()
        self._publish_health()
        if self._own is not None:
            self._own.close_after_answers()
        if self._processes is not None:
            self._processes.close_after_answers()

    def begin_exit(self) -> None:
        """End health watches and the streams that wait for no answer, because the server has begun to end."""
        self._plane.call_soon(self._health.end)
        if self._own is not None:
            self._own.end_streams()
        if self._processes is not None:
            self._processes.end_streams()

    def _publish_health(self) -> None:
        self._plane.call_soon(self._health.publish)

    async def drain(self, deadline: float) -> None:
        """Stop listening, let requests finish until the deadline (time.monotonic()), close all but metrics; immediately
        if cancelled. Raises the first error after all are closed."""
        grace = max(0.0, deadline - time.monotonic())
        stopping = [one.stop(grace) for one in (self._own, self._processes) if one is not None]
        self._own = self._processes = None
        try:
            outcomes = await asyncio.gather(*stopping, return_exceptions=True)
        finally:
            if self._guest is not None:
                self._plane.call_soon(self._guest.close)
                self._guest = None
            self._ports.close()
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def stop_metrics(self) -> None:
        if self._metrics is not None:
            await self._metrics.stop()
            self._metrics = None

    async def _start_metrics(self) -> None:
        settings = self._settings.metrics
        if not settings.allow:
            return
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
        http = self._settings.http.address
        address = settings.address or (http if unix_place(http) is None else "127.0.0.1")
        where = ListenAddress("metrics", "metrics", address, settings.port)
        port = await listener.start(where)
        self._metrics = listener
        self._started["metrics"] = _Started(port, f"Started Metrics Service at {where.shown(port)}")

    def _read_access(self) -> list[Exception]:
        """Store who may call what. Returns the errors of files that hold no secret."""
        refusals: list[Exception] = []
        for where in self._addresses:
            try:
                settings, log = self._part(where), self._log.getChild(where.flags)
                self._access[where.flags] = Access.of(self._settings, settings, log)
            except (OSError, ValueError) as error:
                refusals.append(error)
        return refusals

    @cached_property
    def _routes(self) -> ServerRoutes:
        served = self._served
        methods = MethodRoutes(asyncio.get_running_loop(), self._plane, served.memory, self._log)
        guarded: Mapping[str, Route] = {}
        if "grpc" in self._access:
            served.subscribe(self._publish_health)
            guarded = methods.guarded(served.methods, self._health, self._access["grpc"])
        return ServerRoutes(guarded, methods.open(served.methods))

    def _start_services(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what starts each protocol."""
        if self._count:
            self._uses = anonymous_file.create("rocserve:uses", table_bytes(1 + self._count))
            self._served.memory.share(anonymous_file.map_file(self._uses, to_write=True), 0)
        if self._count and not self._on_demand:
            return [self._start_processes()]
        served, loop = self._served, asyncio.get_running_loop()
        self._guest = GuestLoop(self._plane)
        self._guest.set_exception_handler(partial(log_loop_error, self._log.getChild("http")))

        def http_parts() -> HttpParts:
            from rocserve.frontends.http.body import LargeBodies
            from rocserve.frontends.http.inference import HttpParts

            methods = {name: on_loop(method, loop) for name, method in served.methods.items()}
            settings = self._settings.http
            return HttpParts(served.inference, methods, find_model, served.memory, LargeBodies(), settings)

        def find_model(name: str, version: str) -> ModelConfig:
            return served.tables.table.find(name, version).config

        async def start(where: ListenAddress) -> None:
            if self._on_demand:
                where = replace(where, port=self._ports.ports[where.protocol], reuse_port=True)
            self._note_start(where, await own.start(where))

        answering = Answering(served.inference, served.memory, self._routes.guarded, http_parts)
        own = self._own = Transports(self._settings, self._plane, self._guest, answering, self._log, self._renewal_ms)
        return [start(where) for where in self._addresses]

    async def _start_processes(self) -> None:
        await self._make_processes().start()
        for where in self._addresses:
            self._note_start(where, self._ports.ports[where.protocol])

    def _make_processes(self) -> FrontEndProcesses:
        from rocserve.frontends.processes.supervisor import FrontEndParts, FrontEndProcesses

        served, loop = self._served, asyncio.get_running_loop()
        edition = anonymous_file.create("rocserve:edition", mmap.PAGESIZE)
        served.subscribe(partial(_count, anonymous_file.map_file(edition, to_write=True).cast("Q")))
        tables = (anonymous_file.open_for_reading(edition), self._uses)
        parts = FrontEndParts(self._command, served.inference, self._plane, served.memory, self._renewal_ms, tables)
        processes = self._processes = FrontEndProcesses(self._ports, self._count, self._routes, parts, self._log)
        served.inference.watch_wants(lambda: loop.call_soon_threadsafe(processes.send_wants_origins))
        return processes

    def _watch_demand(self) -> None:
        assert self._own is not None
        has_filters = kernel_has_filters()
        if has_filters:
            self._ports.give_to_this_process()
        else:
            self._log.debug("the kernel cannot choose the process of a connection: front ends stay once started")
        moves = Moves(Demand(PACE), self._plane, self._own, self._ports, has_filters, self._make_processes, self._log)
        self._moving = asyncio.create_task(moves.run())

    def _note_start(self, where: ListenAddress, port: int) -> None:
        settings = self._part(where)
        who = f"{self._count} processes" if self._count else "this process"
        if self._on_demand:
            who = f"this process, and by {who} while it is busy"
        service = "HTTPService" if where.protocol == "HTTP" else "GRPCInferenceService"
        line = f"Started {service} at {where.shown(port)}"
        if isinstance(settings, HttpSettings) and settings.allow_ui and where.unix is None:
            scheme, host = "https" if settings.use_ssl or settings.use_ssl_mutual else "http", _host(settings)
            line += f", with a page at {scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
        details = (
            f"{where.protocol} is served by {who}, {self._why_so_many}",
            f"{where.protocol}: {self._access[where.flags].describe()}",
        )
        self._started[where.flags] = _Started(port, line, details)

    def _address(self, part: GrpcSettings | HttpSettings, name: str) -> str:
        """Return the address by which clients on this machine reach a service."""
        return str(unix_place(part.address) or f"{_host(part)}:{self._started[name].port}")

    def _part(self, where: ListenAddress) -> HttpSettings | GrpcSettings:
        return self._settings.http if where.protocol == "HTTP" else self._settings.grpc


def _count(edition: memoryview) -> None:
    """Note that the serving table has been replaced."""
    edition[0] += 1


def _host(part: GrpcSettings | HttpSettings) -> str:
    """Return the host by which clients on this machine reach the address."""
    return "localhost" if part.address in ("0.0.0.0", "::") else part.address
