"""The server: builds its parts, starts them, and drains them at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from rocserve.amd_inference_server.service import AmdInferenceServerService
from rocserve.backends.host import Host
from rocserve.backends.parameters import usable_cpus
from rocserve.backends.registry import discover_backends, with_backend_config
from rocserve.core.custom_metrics import CustomMetrics, EventLabels
from rocserve.core.dispatch import Dispatcher
from rocserve.core.latencies import read_latency_options
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import RequestMemory, default_limit
from rocserve.core.serving import ServingTableHolder
from rocserve.frontends.metrics.collection import (
    MachineMetrics,
    load_check_families,
    machine_metrics,
    memory_families,
    repository_families,
    residency_families,
    server_families,
)
from rocserve.frontends.metrics.exposition import exposition
from rocserve.frontends.running import FrontEnds, Served
from rocserve.observability.failures import log_loop_error
from rocserve.observability.logs import ServerLog
from rocserve.observability.tracing.tracing import Tracing, create_tracing
from rocserve.plane.freed_memory import FreedMemory
from rocserve.plane.guarded_mapping import FaultGuard
from rocserve.plane.loop import PlaneLoop, default_poll_seconds, default_spin
from rocserve.presets import PREPROCESS, ensemble_name
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import page_pb2
from rocserve.repository.machine import ThisMachine
from rocserve.repository.model_repository import ModelRepository, summary
from rocserve.repository.residency.resident_models import ResidentModels
from rocserve.repository.version_loader import WorkerVersionLoader
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.response_cache import ResponseCache
from rocserve.service_manager import ServiceManager
from rocserve.services.client_limits import ClientLimits
from rocserve.services.client_memory.attachment import ClientMemory
from rocserve.services.client_memory.regions import ClientRegions
from rocserve.services.control import log_settings, repository_methods, trace_setting
from rocserve.services.inference import InferenceService, RequestObserver
from rocserve.services.methods import Method, without_paths
from rocserve.services.page_acts import PageActService
from rocserve.services.queries import QueryService
from rocserve.services.readiness import Readiness
from rocserve.services.server_state import ServerHistory, server_state
from rocserve.services.version_details import version_details
from rocserve.settings import ServerSettings
from rocserve.settings.repository import ReadinessRule, WhatKind
from rocserve.signals import Signals
from rocserve.standard_output import PatientWriter, Printed
from rocserve.start_table import print_sample, print_table, print_way_to_first_model
from rocserve.workers.instance import InstanceMail
from rocserve.workers.launcher import WorkerLauncher


def run_server(
    settings: ServerSettings,
    command: Sequence[str],
    launcher: WorkerLauncher,
    signals: Signals,
    log: ServerLog,
) -> int:
    """Serve until a signal, and return the process's exit status. `command`: the flags from which the settings come."""
    # The soft limit of open files is 1024 on nearly all systems, for programs that use select(), and each instance of a
    # model and each connection takes some. The zygote runs already: its workers keep the original limit, because they
    # need few files and their engines may use select().
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        tracing = create_tracing(settings.trace, settings.server_id, log.logger.getChild("tracing"))
    except ValueError as error:
        log.logger.error("%s", error)
        asyncio.run(launcher.close())
        return 1
    try:
        return asyncio.run(Server(settings, command, launcher, signals, log, tracing).run())
    finally:
        tracing.close()


@dataclass(eq=False)
class Server:
    """Builds the server's parts, and runs them until a signal."""

    _settings: ServerSettings
    _command: Sequence[str]
    _launcher: WorkerLauncher
    _signals: Signals
    _server_log: ServerLog
    _tracing: Tracing

    def __post_init__(self) -> None:
        settings = self._settings
        self._log = log = self._server_log.logger
        self._manager = ServiceManager(os.environ, log)
        spin = default_spin(usable_cpus()) if settings.spin is None else settings.spin
        self._plane = PlaneLoop(log.getChild("plane"), spin)
        mail = InstanceMail(self._plane, 0.0 if settings.spin == 0 else default_poll_seconds(usable_cpus()))
        self._plane.add_source(mail)
        self._tables = ServingTableHolder()
        self._history = ServerHistory(self._tables)
        self._dispatcher = Dispatcher(self._tables, self._plane.work_off)
        self._client_regions = ClientRegions(FaultGuard(), settings.allow_client_shm)
        self._paths = PrivatePaths((*settings.repository.roots, *settings.repository.worker_load_folders))
        self._fallbacks = Counter[EventLabels]()
        self._failed_checks = Counter[EventLabels]()
        self._custom_metrics = CustomMetrics()
        self._memory = RequestMemory(settings.max_request_memory or default_limit(Host().memory_limit()))
        mail.trimmer.trim_process(FreedMemory(), lambda: self._memory.used_bytes)
        self._latencies, problems = read_latency_options(dict(settings.metrics.config))
        for problem in problems:
            log.warning("--metrics-config: %s; ignored", problem)
        registry, warnings = with_backend_config(discover_backends(), settings.backend_config)
        for warning in warnings:
            log.warning("%s", warning)
        loader = WorkerVersionLoader(
            launcher=self._launcher,
            mail=mail,
            dispatcher=self._dispatcher,
            limits=QueueLimits(settings.max_queue_requests, settings.max_queue_bytes),
            strict=settings.repository.strict_model_config,
            engines=settings.engines,
            machine=ThisMachine(settings.engines, settings.host_policies, settings.repository.max_model_instances),
            fallbacks=self._fallbacks,
            failed_checks=self._failed_checks,
            cache=None if settings.response_cache_bytes is None else ResponseCache(settings.response_cache_bytes),
            limiter=(
                RateLimiter(settings.rate_limit_resources, self._plane.call_soon, log.getChild("scheduler"))
                if settings.rate_limit == "execution_count"
                else None
            ),
            log=log,
            latencies=self._latencies,
            custom_metrics=self._custom_metrics,
            memory=self._memory,
            time_limits=settings.limits,
        )
        self._sequences = loader.sequences
        self._residents = ResidentModels(
            settings.residency,
            self._plane,
            self._dispatcher,
            pinned=settings.repository.load_models,
            limits=QueueLimits(settings.max_queue_requests, settings.max_queue_bytes),
            concurrent_loads=settings.repository.concurrent_loads,
            log=log.getChild("repository"),
        )
        if single := settings.repository.single:
            log.debug("'%s' is %s; the model's name is '%s'", settings.what, single.kind.value, single.name)
        elif settings.what is not None:
            log.debug("'%s' is %s", settings.what, WhatKind.REPOSITORY.value)
        self._repository = ModelRepository(
            settings.repository, registry, loader.load, self._tables, log.getChild("repository"), self._residents
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(partial(log_loop_error, self._log))
        ending = Ending(self._log, self._settings.drain_seconds, self._settings.exit_timeout_seconds)
        self._signals.watch(
            lambda number: self._reload() if number == signal.SIGHUP else ending.on_signal(number),
            loop,
        )
        self._plane.start()
        self._manager.begin(self._plane.call_soon)
        asks_models = self._settings.repository.readiness is not ReadinessRule.STARTED
        readiness = Readiness(self._tables, self._repository.is_ready, asks_models)
        front_ends = FrontEnds(self._settings, self._command, self._served(readiness), self._plane, self._log)
        started: asyncio.Future[None] | None = None
        if self._settings.listen_when_loaded:
            started = asyncio.ensure_future(self._repository.start())
            stopped = asyncio.ensure_future(ending.asked.wait())
            await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
        if refusals := await front_ends.start():
            for error in refusals:
                # Users need the name of an unreadable file, not the errno.
                self._log.error("%s", error.strerror if isinstance(error, OSError) and not error.filename else error)
            await self._end_workers(ending)
            self._manager.close()
            return 1
        history = asyncio.ensure_future(self._history.run()) if self._settings.http.allow_ui else None
        try:
            loads = started or asyncio.ensure_future(self._repository.start())
            status = await self._serve(loads, ending, front_ends)
        except Exception:
            self._log.critical("the server failed unexpectedly", exc_info=True)
            status = 1
        readiness.is_exiting = True
        if history is not None:
            history.cancel()
        drain_seconds = self._settings.drain_seconds if status == 0 else 0.0
        # The end may take 15 seconds beyond both settings.
        self._manager.stopping(drain_seconds + self._settings.exit_timeout_seconds + 15.0)
        await self._drain(front_ends, ending, drain_seconds)
        self._manager.close()
        return 1 if ending.end_now.is_set() else status

    def _served(self, readiness: Readiness) -> Served:
        machine = machine_metrics(self._settings.metrics, self._log.getChild("metrics"))
        sources = (
            lambda: memory_families(self._memory),
            lambda: load_check_families(self._failed_checks),
            self._custom_metrics.read,
            lambda: repository_families(self._repository.index(ready_only=False)),
            lambda: residency_families(self._residents),
            machine.families,
        )
        observer = RequestObserver(self._tracing, self._tables, self._log.getChild("requests"))
        loop = asyncio.get_running_loop()
        set_verbose, log, settings = self._launcher.set_verbose, self._server_log, self._settings
        log.on_change += [
            observer.switch,
            lambda: loop.call_soon_threadsafe(lambda: set_verbose(log.settings.verbose > 0)),
        ]
        most, rate = settings.max_requests_per_client, settings.max_request_rate_per_client
        inference = InferenceService(
            self._dispatcher,
            ClientMemory(self._tables, self._client_regions, settings.max_queue_bytes, self._plane.work_off),
            observer,
            self._paths,
            self._plane,
            # None saves the work per request if neither limit is set.
            ClientLimits(most, rate) if most or rate else None,
        )
        return Served(
            inference=inference,
            methods=without_paths(self._methods(readiness, machine), self._paths),
            tables=self._tables,
            readiness=readiness,
            subscribe=self._repository.subscribe,
            write_metrics=lambda: exposition(server_families(self._tables, self._fallbacks, self._latencies, sources)),
            memory=self._memory,
        )

    def _methods(self, readiness: Readiness, machine: MachineMetrics) -> Mapping[str, Method]:
        """Return all methods except ModelInfer and ModelStreamInfer, which each front end implements."""
        name, shm = self._settings.server_id, self._settings.allow_client_shm
        state = partial(server_state, self._history, machine.families, time.time_ns() // 1_000_000)
        details = partial(version_details, self._tables, self._repository)
        trace = partial(trace_setting, self._tracing, self._tables)
        return {
            "ServerState": Method(page_pb2.ServerStateRequest, state, is_slow=True),
            "VersionDetails": Method(page_pb2.VersionDetailsRequest, details, is_slow=True),
            "TraceSetting": Method(pb.TraceSettingRequest, trace),
            "LogSettings": Method(pb.LogSettingsRequest, partial(log_settings, self._server_log)),
            **QueryService(self._tables, self._repository, name, readiness, self._paths, shm).methods(),
            **PageActService(
                self._repository,
                self._server_log,
                self._launcher.recent_lines,
                self._settings.repository.control_mode,
                self._log.getChild("page"),
            ).methods(),
            **repository_methods(self._repository),
            **self._client_regions.methods(),
            **AmdInferenceServerService(self._tables, self._repository, ThisMachine(self._settings.engines)).methods(),
        }

    def _reload(self) -> None:
        """Scan the repositories. Certificates are read per connection, and the log line reopens a moved log file."""
        self._log.info("SIGHUP: scanning the model repositories")
        self._repository.scan_soon()

    async def _serve(self, started: asyncio.Future[None], ending: Ending, front_ends: FrontEnds) -> int:
        """Serve until `ending.asked`; return the exit status. `started`: the loads of the start."""
        stopped = asyncio.ensure_future(ending.asked.wait())
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            return 0
        started.result()
        failed = self._repository.failed_models()
        if failed and self._settings.exit_on_error:
            self._repository.log_failures()
            names = ", ".join(failed)
            self._log.error(
                "ending, because these models failed to load: %s; --exit-on-error=false serves the others", names
            )
            stopped.cancel()
            return 1

        def served() -> str:
            return summary(self._repository.index(ready_only=False), front_ends.status_command())

        self._log.info("%s", served())
        self._manager.ready(served())
        if self._manager.listens:
            self._repository.subscribe(lambda: self._manager.show(served()))
        with contextlib.ExitStack() as printing:
            if sys.stdout and self._settings.log.format != "json":
                # The output is optional, and programs that read JSON often get both streams as one.
                with contextlib.suppress(OSError):
                    octets = self._start_text(front_ends, sys.stdout)
                    printing.callback(PatientWriter(sys.stdout.fileno(), octets).close)
            await stopped
        return 0

    def _start_text(self, front_ends: FrontEnds, stream: TextIO) -> bytes:
        table, settings = self._tables.table, self._settings.repository
        printed = Printed(stream)
        entries, addresses = self._repository.index(ready_only=False), front_ends.plain_addresses()
        http = addresses.get("http", "")
        print_table(entries, table, printed)
        print_way_to_first_model(entries, settings, http, printed)
        name = "" if settings.single is None else settings.single.name
        model = table.models.get(name)
        preset = "" if model is None or model.latest is None else model.latest.config.parameters.get(PREPROCESS, "")
        if preset:
            # The user wants to send images or texts.
            model = table.models.get(ensemble_name(name, preset), model)
        if model is not None and model.latest is not None:
            print_sample(model.latest, table, http, addresses.get("grpc", ""), printed)
        return printed.octets

    async def _drain(self, front_ends: FrontEnds, ending: Ending, drain_seconds: float) -> None:
        """Drain: report not ready and load no more models, still serving; then finish the work in flight; then end the
        workers. The exit timeout begins after the drain period."""
        await ending.end("the health service", _call(front_ends.begin_drain))
        await ending.end("the loads of models", _call(self._repository.begin_stop))
        await ending.end("the drain", asyncio.sleep(drain_seconds))
        deadline = time.monotonic() + self._settings.exit_timeout_seconds
        await ending.end("sequences", self._sequences_end(), self._settings.exit_timeout_seconds)
        await ending.end("the streams", _call(front_ends.begin_exit))
        await ending.end("the front ends", front_ends.drain(deadline))
        await ending.end("the models", self._repository.stop(), max(0.5, deadline - time.monotonic()))
        await self._end_workers(ending)
        await ending.end("the metrics", front_ends.stop_metrics())
        self._log.info("ended")

    async def _sequences_end(self) -> None:
        """Wait for the end of all sequences, whose next requests come on open connections."""
        while self._sequences.have_sequences:  # noqa: ASYNC110 - another thread ends them
            await asyncio.sleep(0.05)

    async def _end_workers(self, ending: Ending) -> None:
        await ending.end("the zygote", self._launcher.close())
        await ending.end("the data plane's thread", _call(self._plane.stop))


@dataclass(frozen=True, slots=True)
class Ending:
    """Ends each part; errors and timeouts are logged, and the next part follows. The first signal asks for the end. A
    second cuts short the current part and all later ones. A third ends this process (signals.py)."""

    _log: logging.Logger
    _drain_seconds: float
    _exit_timeout_seconds: float
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    end_now: asyncio.Event = field(default_factory=asyncio.Event)
    """`asked`: the first signal came. `end_now`: the second signal came."""

    def on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self.asked.is_set():
            pause = f"not ready from now on; in {self._drain_seconds:g} s " if self._drain_seconds else ""
            self._log.info("%s: %sfinishing the work in flight (at most %g s)", name, pause, self._exit_timeout_seconds)
            self.asked.set()
            return
        self._log.warning("%s again: ending immediately", name)
        self.end_now.set()

    async def end(self, part: str, work: Coroutine[Any, Any, object], seconds: float | None = None) -> None:
        """End a part, for at most `seconds` or until the second signal. Never raises."""
        task = asyncio.ensure_future(work)
        cut_short = asyncio.ensure_future(self.end_now.wait())
        await asyncio.wait((task, cut_short), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        cut_short.cancel()
        if not task.done():
            if not self.end_now.is_set():
                self._log.warning("%s did not end within the exit timeout", part)
            task.cancel()
            # It releases its resources in this time.
            await asyncio.wait((task,), timeout=5.0)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("%s did not end properly; the other parts end anyway", part, exc_info=error)


async def _call(end: Callable[[], object]) -> None:
    end()
