"""The front ends that the settings ask for: started together, drained together."""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocserve.core.request_memory import RequestMemory
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.certificates import CertificateFiles, RenewedContext
from rocserve.frontends.grpc.dense_traffic import Companion
from rocserve.frontends.grpc.select import create_transport
from rocserve.frontends.grpc.service import GrpcService
from rocserve.frontends.grpc.transport import Transport, TransportOptions
from rocserve.frontends.grpc.unfinished import WaitingLimits
from rocserve.services.inference import InferenceService
from rocserve.services.methods import Method
from rocserve.services.readiness import Readiness
from rocserve.settings import GrpcSettings, HttpSettings, MetricsSettings, ServerSettings

if TYPE_CHECKING:
    # A server of gRPC alone is spared aiohttp: a fifth of a second, and 14 MB.
    from rocserve.frontends.http.endpoint import HttpEndpoint
    from rocserve.frontends.metrics.endpoint import MetricsEndpoint

_READING_WATCH_SECONDS = 1.0
"""How often clients are looked for that do not read their answers; their time-outs are many times as long."""
_KEPT_DESCRIPTORS = 256
"""For the server itself, of the files that may be open: workers take some, and so do files that are read."""
_TLS_BYTES = 320 << 10
"""That an HTTP connection with TLS takes: asyncio has a buffer of 256 KiB for each. Together they may take as much as
requests."""
_LEAST_TLS_CONNECTIONS = 64
"""However little that is."""
_GRPC_SHARE = 2
"""gRPC's connections are one part in so many of the files that may be open. Its core counts nothing but them, so that
the rest has to do for models, however many, and for HTTP."""


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

    def __init__(self, settings: ServerSettings, served: Served, companion: Companion, log: logging.Logger) -> None:
        """`companion`: the thread whose work the gRPC transport's may do as well."""
        self._settings = settings
        self._served = served
        self._companion = companion
        self._log = log
        self._metrics: MetricsEndpoint | None = None
        self._http: HttpEndpoint | None = None
        self._grpc: GrpcService | None = None
        self._transport: Transport | None = None
        self._reading_watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on all ports.

        Raises:
            OSError, RuntimeError, ValueError: one of them cannot be served; what had been started is stopped.
        """
        try:
            await self._start_metrics()
            await self._start_http()
            self._start_grpc()
        except (OSError, RuntimeError, ValueError):
            await self.drain(time.monotonic())
            await self.stop_metrics()
            raise

    def begin_exit(self) -> None:
        """The server has begun to end: tell who watches, and end streams that wait for nothing."""
        if self._grpc is not None:
            self._grpc.begin_exit()

    async def drain(self, deadline: float) -> None:
        """Refuse what is new, let what is open finish until the deadline (time.monotonic()), close all but metrics;
        at once when cancelled.

        Raises:
            BaseException: one of them could not be closed; the other has been.
        """
        grace = max(0.0, deadline - time.monotonic())
        if self._reading_watch is not None:
            self._reading_watch.cancel()
        transport, http = self._transport, self._http
        self._transport = self._http = None
        try:
            outcomes = await asyncio.gather(
                *([asyncio.to_thread(transport.stop, grace)] if transport is not None else []),
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
        from rocserve.frontends.http.connection import ConnectionLimits
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
        port = await endpoint.start()
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
        from rocserve.frontends.http.connection import ConnectionLimits
        from rocserve.frontends.http.endpoint import HttpEndpoint
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
        endpoint = HttpEndpoint(service, settings, limits, log, tls)
        port = await endpoint.start()
        self._http = endpoint
        self._log.info("HTTP: %s", service.describe_access())
        self._log.info("Started HTTPService at %s:%d", settings.address, port)

    def _start_grpc(self) -> None:
        settings = self._settings.grpc
        if not settings.allow:
            return
        served, log = self._served, self._log.getChild("grpc")
        service = GrpcService(
            served.inference,
            served.methods,
            served.tables,
            served.readiness,
            served.subscribe,
            asyncio.get_running_loop(),
            log,
            settings,
            served.memory,
            self._settings.admin_addresses,
        )
        options = _transport_options(settings, self._settings.write_timeout_seconds)
        transport = create_transport(settings.transport, options, service.routes(), log, self._companion, served.memory)
        port = transport.start()
        self._grpc, self._transport = service, transport
        self._reading_watch = asyncio.ensure_future(_watch_reading(transport))
        self._log.info("gRPC: %s", service.describe_access())
        self._log.info("Started GRPCInferenceService at %s:%d", settings.address, port)


async def _watch_reading(transport: Transport) -> None:
    while True:
        await asyncio.sleep(_READING_WATCH_SECONDS)
        transport.give_up_unread()


def _most_descriptors() -> int | None:
    """That HTTP's connections and all else may take together; None = any number."""
    limit = _file_limit()
    return None if limit is None else limit - min(_KEPT_DESCRIPTORS, limit // 4)


def _file_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def _transport_options(grpc: GrpcSettings, write_timeout_seconds: float) -> TransportOptions:
    return TransportOptions(
        address=grpc.address,
        port=grpc.port,
        reuse_port=grpc.reuse_port,
        use_ssl=grpc.use_ssl,
        use_ssl_mutual=grpc.use_ssl_mutual,
        server_cert=grpc.server_cert,
        server_key=grpc.server_key,
        root_cert=grpc.root_cert,
        max_receive_message_bytes=grpc.max_message_bytes,
        max_send_message_bytes=grpc.max_message_bytes,
        response_compression_level=grpc.response_compression_level,
        keepalive_time_ms=grpc.keepalive_time_ms,
        keepalive_timeout_ms=grpc.keepalive_timeout_ms,
        keepalive_permit_without_calls=grpc.keepalive_permit_without_calls,
        http2_max_pings_without_data=grpc.http2_max_pings_without_data,
        http2_min_recv_ping_interval_without_data_ms=grpc.http2_min_recv_ping_interval_without_data_ms,
        http2_max_ping_strikes=grpc.http2_max_ping_strikes,
        max_connection_age_ms=grpc.max_connection_age_ms,
        max_connection_age_grace_ms=grpc.max_connection_age_grace_ms,
        max_connection_idle_ms=grpc.max_connection_idle_ms,
        write_timeout_ms=int(write_timeout_seconds * 1000),
        max_connections=None if (limit := _file_limit()) is None else limit // _GRPC_SHARE,
        waiting=WaitingLimits(message_seconds=grpc.message_timeout_seconds),
    )
