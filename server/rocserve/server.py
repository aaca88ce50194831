"""The server: builds the parts, starts them, and drains them at the end."""

from __future__ import annotations

import asyncio
import resource
import signal
import time

from rocserve.backends.registry import discover_backends
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.grpc.select import create_transport
from rocserve.frontends.grpc.service import GrpcService
from rocserve.frontends.grpc.transport import Transport, TransportOptions
from rocserve.frontends.metrics.collection import ServerMetrics
from rocserve.frontends.metrics.endpoint import MetricsEndpoint
from rocserve.frontends.metrics.exposition import exposition
from rocserve.observability.logs import ServerLog
from rocserve.observability.tracing.creation import create_tracing
from rocserve.observability.tracing.tracing import Tracing
from rocserve.repository.fallbacks import FallbackCounter
from rocserve.repository.item_version import ItemVersionLoader
from rocserve.repository.machine import ThisMachine
from rocserve.repository.model_repository import ModelRepository
from rocserve.repository.settings import RepositorySettings
from rocserve.repository.version_loader import WorkerVersionLoader
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.response_cache import ResponseCache
from rocserve.services.amd_inference_server import AmdInferenceServerService
from rocserve.services.client_memory.attachment import ClientMemory
from rocserve.services.client_memory.regions import ClientRegions
from rocserve.services.client_memory.service import ClientMemoryService
from rocserve.services.inference import InferenceService
from rocserve.services.log_control import LogControlService
from rocserve.services.methods import Services, methods
from rocserve.services.observation import RequestObserver
from rocserve.services.queries import QueryService
from rocserve.services.readiness import Readiness
from rocserve.services.repository_control import RepositoryControlService
from rocserve.services.trace_control import TraceControlService
from rocserve.settings import GrpcSettings, ServerSettings
from rocserve.workers.completion import CompletionThread
from rocserve.workers.launcher import WorkerLauncher


def run_server(settings: ServerSettings, launcher: WorkerLauncher, log: ServerLog) -> int:
    """Serve until a signal ends it; the result is the process's exit status."""
    _allow_many_descriptors()
    try:
        tracing = create_tracing(settings.trace.values, settings.server_id, log.logger.getChild("tracing"))
    except ValueError as error:
        log.logger.error("%s", error)
        asyncio.run(launcher.close())
        return 1
    try:
        return asyncio.run(Server(settings, launcher, log, tracing).run())
    finally:
        tracing.close()


class Server:
    def __init__(
        self, settings: ServerSettings, launcher: WorkerLauncher, server_log: ServerLog, tracing: Tracing
    ) -> None:
        self._settings = settings
        self._launcher = launcher
        self._server_log = server_log
        self._tracing = tracing
        self._log = log = server_log.logger
        self._completion = CompletionThread(log.getChild("completion"))
        self._tables = ServingTableHolder()
        self._client_regions = ClientRegions()
        self._fallbacks = FallbackCounter()
        registry = discover_backends()
        loader = WorkerVersionLoader(
            launcher=launcher,
            completion=self._completion,
            tables=self._tables,
            limits=QueueLimits(settings.max_queue_requests, settings.max_queue_bytes),
            strict=settings.strict_model_config,
            engines=settings.engines,
            machine=ThisMachine(settings.engines),
            fallbacks=self._fallbacks,
            cache=ResponseCache(settings.cache.size_bytes) if settings.cache.name else None,
            limiter=(
                RateLimiter(settings.rate_limit_resources, self._completion.call_soon)
                if settings.rate_limit == "execution_count"
                else None
            ),
            log=log,
        )
        self._repository = ModelRepository(
            _repository_settings(settings),
            registry,
            ItemVersionLoader(loader),
            self._tables,
            log.getChild("repository"),
        )

    async def run(self) -> int:
        """Start, serve, drain; returns the exit status."""
        loop = asyncio.get_running_loop()
        ending = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number, ending)
        self._completion.start()
        readiness = Readiness(self._repository.is_ready)
        service = GrpcService(
            self._inference_service(readiness),
            methods(self._services(readiness)),
            self._tables,
            readiness,
            self._repository.subscribe,
            loop,
            self._log.getChild("grpc"),
            self._settings.grpc,
        )
        metrics = self._metrics_endpoint()
        try:
            if metrics is not None:
                port = await metrics.start()
                self._log.info("Started Metrics Service at %s:%d", self._settings.metrics.address, port)
            transport = create_transport(
                self._settings.grpc.transport,
                _transport_options(self._settings.grpc),
                service.routes(),
                self._log.getChild("grpc"),
                self._completion,
            )
            port = transport.start()
        except (OSError, RuntimeError, ValueError) as error:
            # An errno says nothing to people; a file that cannot be read is told by name.
            self._log.error("%s", error.strerror if isinstance(error, OSError) and not error.filename else error)
            if metrics is not None:
                metrics.stop()
            await self._stop_workers()
            return 1
        self._log.info("Started GRPCInferenceService at %s:%d", self._settings.grpc.address, port)
        status = await self._serve(ending)
        readiness.begin_exit()
        await self._drain(service, transport)
        if metrics is not None:
            metrics.stop()
        return status

    def _inference_service(self, readiness: Readiness) -> InferenceService:
        observer = RequestObserver(self._tracing, self._tables, self._log.getChild("requests"))
        self._server_log.on_change = observer.switch
        return InferenceService(self._tables, readiness, ClientMemory(self._tables, self._client_regions), observer)

    def _services(self, readiness: Readiness) -> Services:
        return Services(
            queries=QueryService(self._tables, self._repository, self._settings.server_id, readiness.is_ready),
            repository_control=RepositoryControlService(self._repository),
            client_memory=ClientMemoryService(self._client_regions, self._settings.allow_client_shared_memory),
            trace_control=TraceControlService(self._tracing, self._tables),
            log_control=LogControlService(self._server_log),
            amd=AmdInferenceServerService(self._tables, self._repository, ThisMachine(self._settings.engines)),
        )

    def _metrics_endpoint(self) -> MetricsEndpoint | None:
        if not self._settings.metrics.allow:
            return None
        metrics = ServerMetrics(self._tables, self._fallbacks.snapshot)
        return MetricsEndpoint(
            self._settings.metrics.address,
            self._settings.metrics.port,
            lambda: exposition(metrics.families()),
            self._log.getChild("metrics"),
        )

    def _on_signal(self, number: int, ending: asyncio.Event) -> None:
        name = signal.Signals(number).name
        if ending.is_set():
            self._log.warning("%s again: ending at once", name)
            raise SystemExit(1)
        self._log.info("%s: finishing the work in hand (at most %g s)", name, self._settings.exit_timeout_seconds)
        ending.set()

    async def _serve(self, ending: asyncio.Event) -> int:
        """Load what is there, then wait for the end."""
        started = asyncio.ensure_future(self._repository.start())
        stopped = asyncio.ensure_future(ending.wait())
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            return 0
        started.result()
        failed = self._repository.failed_models()
        if failed and self._settings.exit_on_error:
            for name, reason in failed.items():
                self._log.error("model '%s' failed to load: %s", name, reason)
            self._log.error("ending because of models that failed to load; --exit-on-error=false serves the others")
            stopped.cancel()
            return 1
        await stopped
        return 0

    async def _drain(self, service: GrpcService, transport: Transport) -> None:
        """Not ready first, and no more loads; then the work in hand finishes; then the workers end. Within the exit
        time-out."""
        deadline = time.monotonic() + self._settings.exit_timeout_seconds
        service.begin_exit()
        self._repository.begin_stop()
        await asyncio.to_thread(transport.stop, max(0.0, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(max(0.5, deadline - time.monotonic())):
                await self._repository.stop()
        except TimeoutError:
            self._log.warning("the exit time-out passed while models were being unloaded")
        await self._stop_workers()
        self._log.info("ended")

    async def _stop_workers(self) -> None:
        await self._launcher.close()
        self._completion.stop()


def _allow_many_descriptors() -> None:
    """Raise the soft limit of open files to the hard one. The soft one is 1024 nearly everywhere, for programs that use
    select(), and an instance of a model takes up to 17. The zygote runs already: workers, which need few and whose
    engines may use select(), keep the limit that was given."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _repository_settings(settings: ServerSettings) -> RepositorySettings:
    return RepositorySettings(
        roots=settings.model_repositories,
        control_mode=settings.control_mode,
        poll_seconds=settings.poll_seconds,
        settle_seconds=settings.settle_seconds,
        worker_load_folders=settings.worker_load_folders,
        load_models=settings.load_models,
        concurrent_loads=settings.load_thread_count,
        strict_model_config=settings.strict_model_config,
        model_config_name=settings.model_config_name,
        strict_readiness=settings.strict_readiness,
    )


def _transport_options(grpc: GrpcSettings) -> TransportOptions:
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
    )
