"""The front ends that the settings ask for: started together, drained together."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocserve.backends.parameters import usable_cpus
from rocserve.core.request_memory import RequestMemory
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.certificates import CertificateFiles, RenewedContext
from rocserve.frontends.grpc.service import GrpcService
from rocserve.frontends.grpc.transport import Route, TransportOptions, file_limit, transport_options
from rocserve.plane.loop import PlaneLoop
from rocserve.services.admin_calls import ADMIN_METHODS, AdminCalls
from rocserve.services.forwarded_headers import header_forwarding
from rocserve.services.inference import InferenceService
from rocserve.services.methods import Method
from rocserve.services.readiness import Readiness
from rocserve.services.restrictions import GRPC_HEADER_PREFIX, Restriction, restrictions
from rocserve.settings import HttpSettings, MetricsSettings, ServerSettings, default_front_ends

if TYPE_CHECKING:
    # A server of gRPC alone is spared HTTP's modules, one whose front ends are processes gRPC itself.
    from rocserve.frontends.grpc.inference import InferenceHandlers
    from rocserve.frontends.grpc.reactor import ReactorTransport
    from rocserve.frontends.http.listener import HttpListener
    from rocserve.frontends.metrics.endpoint import MetricsEndpoint
    from rocserve.frontends.processes.supervisor import FrontEndProcesses

_KEPT_DESCRIPTORS = 256
"""For the server itself, of the files that may be open: workers take some, and so do files that are read."""
_TLS_BYTES = 320 << 10
"""That an HTTP connection with TLS takes: asyncio has a buffer of 256 KiB for each. Together they may take as much as
requests."""
_LEAST_TLS_CONNECTIONS = 64
"""However little that is."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, whatever it is asked by."""

    inference: InferenceService
    methods: Mapping[str, Method]
    tables: ServingTableHolder
    readiness: Readiness
    subscribe: Callable[[Callable[[], None]], object]
    """Has its argument called, on the loop, whenever readiness may have changed."""
    write_metrics: Callable[[], str]
    memory: RequestMemory


class FrontEnds:
    """All calls are made on the loop."""

    def __init__(
        self,
        settings: ServerSettings,
        command: Sequence[str],
        served: Served,
        plane: PlaneLoop,
        log: logging.Logger,
    ) -> None:
        """`command`: the flags that the settings come from."""
        self._settings = settings
        self._command = command
        self._served = served
        self._plane = plane
        self._log = log
        self.ports: dict[str, int] = {}
        """Of the parts that listen, by their settings' names."""
        self._metrics: MetricsEndpoint | None = None
        self._http: HttpListener | None = None
        self._grpc: GrpcService | None = None
        self._handlers: InferenceHandlers | None = None
        self._transport: ReactorTransport | None = None
        self._processes: FrontEndProcesses | None = None

    async def start(self) -> None:
        """Listen on all ports.

        Raises:
            OSError, RuntimeError, ValueError: one of them cannot be served; what had been started is stopped.
        """
        try:
            await self._start_metrics()
            await self._start_http()
            await self._start_grpc()
        except (OSError, RuntimeError, ValueError):
            await self.drain(time.monotonic())
            await self.stop_metrics()
            raise

    def begin_exit(self) -> None:
        """The server has begun to end: tell who watches, and end streams that wait for nothing."""
        if self._grpc is not None:
            self._grpc.begin_exit()
        if self._handlers is not None:
            self._plane.call_soon(self._handlers.begin_exit)
        if self._processes is not None:
            self._processes.begin_exit()

    async def drain(self, deadline: float) -> None:
        """Refuse what is new, let what is open finish until the deadline (time.monotonic()), close all but metrics;
        at once when cancelled.

        Raises:
            BaseException: one of them could not be closed; the other has been.
        """
        grace = max(0.0, deadline - time.monotonic())
        transport, processes, http = self._transport, self._processes, self._http
        self._transport = self._processes = self._http = None
        try:
            outcomes = await asyncio.gather(
                *([asyncio.to_thread(transport.stop, grace)] if transport is not None else []),
                *([processes.stop(grace)] if processes is not None else []),
                *([http.stop(grace)] if http is not None else []),
                return_exceptions=True,
            )
        except asyncio.CancelledError:
            # The thread goes on waiting for the grace time, unless it is told that there is none.
            if transport is not None:
                await asyncio.to_thread(transport.stop, 0.0)
            raise
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
        from rocserve.frontends.http.protocol import ConnectionLimits
        from rocserve.frontends.metrics.endpoint import MOST_CONNECTIONS, MetricsEndpoint

        limits = ConnectionLimits(
            write_seconds=self._settings.write_timeout_seconds,
            most=MOST_CONNECTIONS,
            most_descriptors=_most_descriptors(),
        )
        endpoint = MetricsEndpoint(
            settings.address,
            settings.port,
            self._served.write_metrics,
            limits,
            self._log.getChild("metrics"),
            self._tls(settings, "metrics"),
        )
        port = self.ports["metrics"] = await endpoint.start()
        self._metrics = endpoint
        self._log.info("Started Metrics Service at %s:%d", settings.address, port)

    def _tls(self, port: HttpSettings | MetricsSettings, user: str) -> ssl.SSLContext | None:
        """Raises: OSError."""
        grpc = self._settings.grpc
        if not (port.use_ssl or port.use_ssl_mutual) or grpc.server_cert is None or grpc.server_key is None:
            return None
        root = grpc.root_cert if port.use_ssl_mutual else None
        return RenewedContext(CertificateFiles(grpc.server_cert, grpc.server_key, root), user, self._log)

    async def _start_http(self) -> None:
        settings = self._settings.http
        if not settings.allow:
            return
        from rocserve.frontends.http.listener import HttpListener
        from rocserve.frontends.http.protocol import ConnectionLimits
        from rocserve.frontends.http.service import HttpService

        served, log = self._served, self._log.getChild("http")
        service = HttpService(
            served.inference,
            served.methods,
            served.tables,
            settings,
            served.memory,
            log,
            self._settings.admin_addresses,
        )
        tls = self._tls(settings, "HTTP")
        limits = ConnectionLimits(
            idle_seconds=settings.keepalive_seconds,
            write_seconds=self._settings.write_timeout_seconds,
            most=None if tls is None else max(served.memory.limit_bytes // _TLS_BYTES, _LEAST_TLS_CONNECTIONS),
            most_descriptors=_most_descriptors(),
        )
        listener = HttpListener(service.handle, log, limits, tls)
        port = await listener.start("HTTP", "http", settings.address, settings.port, settings.reuse_port)
        self.ports["http"] = port
        self._http = listener
        self._log.info("HTTP: %s", service.describe_access())
        self._log.info("Started HTTPService at %s:%d", settings.address, port)

    async def _start_grpc(self) -> None:
        settings = self._settings.grpc
        if not settings.allow:
            return
        served, plane, log = self._served, self._plane, self._log.getChild("grpc")
        cpus = usable_cpus()
        asked = self._settings.front_ends
        count = default_front_ends(cpus) if asked is None else asked
        loop = asyncio.get_running_loop()
        restricted = restrictions(settings.restricted, log, GRPC_HEADER_PREFIX)
        admin = AdminCalls(self._settings.admin_addresses, ADMIN_METHODS if settings.use_ssl_mutual else restricted)
        service = self._grpc = GrpcService(
            served.methods,
            served.tables,
            served.readiness,
            served.subscribe,
            loop,
            loop.call_soon if count else plane.call_soon,
            log,
            restricted,
            admin,
            served.memory,
        )
        options = transport_options(settings, self._settings.write_timeout_seconds)
        why = f"by default with {cpus} CPUs" if asked is None else "as --front-ends says"
        if count:
            port = await self._start_processes(count, options, service.routes(), log)
            log.info("gRPC is served by %d processes, %s", count, why)
        else:
            port = self._start_transport(options, restricted, service.routes(), log)
            log.info("gRPC is served by this process, %s", why)
        self.ports["grpc"] = port
        self._log.info("gRPC: %s", service.describe_access())
        self._log.info("Started GRPCInferenceService at %s:%d", settings.address, port)

    async def _start_processes(
        self, count: int, options: TransportOptions, routes: Mapping[str, Route], log: logging.Logger
    ) -> int:
        from rocserve.frontends.processes.supervisor import FrontEndProcesses

        served = self._served
        processes = FrontEndProcesses(
            count, self._command, options, routes, served.inference, self._plane, served.memory, log
        )
        port = await processes.start()
        self._processes = processes
        return port

    def _start_transport(
        self,
        options: TransportOptions,
        restricted: Mapping[str, Restriction],
        routes: Mapping[str, Route],
        log: logging.Logger,
    ) -> int:
        from rocserve.frontends.grpc.codec import InferCodec
        from rocserve.frontends.grpc.inference import InferenceHandlers
        from rocserve.frontends.grpc.reactor import ReactorTransport

        served = self._served
        forwarding = header_forwarding(self._settings.grpc.header_forward_pattern)
        handlers = InferenceHandlers(served.inference, InferCodec(), served.memory, forwarding)
        all_routes = {**routes, **handlers.routes(restricted)}
        transport = ReactorTransport(options, all_routes, log, self._plane, served.memory)
        port = transport.start()
        self._handlers, self._transport = handlers, transport
        return port


def _most_descriptors() -> int | None:
    """That HTTP's connections and all else may take together; None = any number."""
    limit = file_limit()
    return None if limit is None else limit - min(_KEPT_DESCRIPTORS, limit // 4)
