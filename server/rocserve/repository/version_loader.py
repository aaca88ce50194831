"""Loading of a version: starts workers, completes the configuration, and creates the scheduler over their instances."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from rocserve.backends.base import Machine
from rocserve.backends.parameters import LOAD_CHECK, load_check_mode
from rocserve.config.definition import ModelDefinition, complete_definition, with_places
from rocserve.config.model_folder import read_initial_states
from rocserve.core.custom_metrics import CustomMetrics, EventLabels, event_labels
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError
from rocserve.core.latencies import LatencyOptions
from rocserve.core.load_check import (
    KINDS,
    RECORDED_FILE,
    ROWS,
    LoadCheckFailed,
    LoadCheckMode,
    LoadCheckReport,
)
from rocserve.core.model_config import with_sequence_tensors
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import Signature
from rocserve.core.statistics import ModelStatistics
from rocserve.observability.log_fields import about
from rocserve.repository.connected_workers import ConnectedWorkers
from rocserve.repository.engine_plan import EngineFailed, EnginePlan, load_on_engine
from rocserve.repository.ensemble_trials import EnsembleTrials
from rocserve.repository.load_order import LoadedVersion, LoadOrder
from rocserve.repository.loaded_versions import ItemEnsemble, ItemModelVersion, LoadedEnsemble, LoadedModelVersion
from rocserve.repository.worker_options import config_text
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.response_cache import CachedAnswers, ResponseCache
from rocserve.scheduling.scheduler import Scheduler, SchedulerParts
from rocserve.scheduling.sequence.router import SequenceRouters
from rocserve.scheduling.sequence.scheduler import SequenceScheduler
from rocserve.settings import NO_TIME_LIMITS, EngineSettings, TimeLimits
from rocserve.workers.instance import InstanceMail
from rocserve.workers.launcher import WorkerLauncher


@dataclass(frozen=True)
class WorkerVersionLoader:
    """Loads versions into worker processes."""

    launcher: WorkerLauncher
    mail: InstanceMail
    dispatcher: Dispatcher
    machine: Machine
    log: logging.Logger
    fallbacks: Counter[EventLabels] = field(default_factory=Counter)
    failed_checks: Counter[EventLabels] = field(default_factory=Counter)
    """Both are counted since the server's start."""
    custom_metrics: CustomMetrics = field(default_factory=CustomMetrics)
    """Receives the metrics that models define."""
    memory: RequestMemory = field(default_factory=RequestMemory)
    """Memory of requests; tensors between the steps of an ensemble count too."""
    engines: EngineSettings = field(default_factory=EngineSettings)
    limits: QueueLimits = field(default_factory=QueueLimits)
    time_limits: TimeLimits = NO_TIME_LIMITS
    """Limits of models that set none."""
    latencies: LatencyOptions = field(default_factory=LatencyOptions)
    """Which latencies of the models are recorded."""
    strict: bool = False
    """Complete nothing from the models."""
    cache: ResponseCache | None = None
    limiter: RateLimiter | None = None
    """Decides which instances may run; None = an instance runs whenever it is free."""
    sequences: SequenceRouters = field(default_factory=SequenceRouters)

    async def load(self, order: LoadOrder) -> LoadedVersion:
        definition, version = order.definition, order.version
        if definition.backend is not None:
            load = functools.partial(self._load_on, order)
            return await load_on_engine(order, self.machine, load, self.log)
        complete, statistics, answers = self._completed(
            complete_definition(definition, None, strict=self.strict), order
        )
        self._warn_of_completion(order, complete)
        kind = ItemEnsemble if definition.is_amd else LoadedEnsemble
        config, message, plane = complete.config, complete.serialized, self.mail.plane
        ensemble = kind(config, message, version, statistics, self.dispatcher, self.memory, answers, plane=plane)
        trials = EnsembleTrials(ensemble, plane)
        await trials.warm_up(definition.folder)
        if (file := await self._recorded_answers(order)) is not None:
            order.on_progress(f"comparing its answer with {RECORDED_FILE}", True)
            try:
                ensemble.load_check = await trials.check_recorded_answers(file)
            except LoadCheckFailed as failure:
                self._count_failed_check(order, failure.kind)
                raise
            self._tell_of_check(order, ensemble.load_check)
        return ensemble

    async def _load_on(self, order: LoadOrder, plan: EnginePlan) -> LoadedVersion:
        """Load a version on one engine. Raises EngineFailed with its error; ServeError if no engine can help."""
        started = time.monotonic()
        definition, version = order.definition, order.version
        assert definition.backend is not None, "an ensemble has no workers"
        if definition.backend.choose_engine is not None and not plan.replaces:
            fields = about(model=order.definition.name, version=order.version)
            self.log.debug("%s: engine %s: %s", order.name, plan.engine.name, plan.reason, extra=fields)
        workers = ConnectedWorkers(
            order,
            plan,
            launcher=self.launcher,
            mail=self.mail,
            dispatcher=self.dispatcher,
            engines=self.engines,
            default_limits=self.time_limits,
            limiter=self.limiter,
            custom_metrics=self.custom_metrics,
            log=self.log,
        )
        try:
            try:
                signature = await workers.load()
            except ServeError as error:
                raise self._failed(order, error) from None
            complete = with_places(complete_definition(definition, signature, strict=self.strict), plan.places)
            complete, statistics, answers = self._completed(complete, order)
            self._warn_of_completion(order, complete)
            parts = SchedulerParts(
                complete.config,
                version,
                statistics,
                self.mail.plane,
                self.limits,
                self.log.getChild("scheduler"),
                definition.backend.answers_requests,
                self.limiter,
                self.sequences.of(f"{definition.folder}:{definition.name}"),
                read_initial_states(complete.config, complete.files),
                signature.padding,
            )
            self._check_rows(order, complete, signature, workers.load_check)
            recorded = await self._recorded_answers(order)
            try:
                await workers.warm_up(
                    with_sequence_tensors(complete.config), config_text(complete), str(recorded or "")
                )
            except ServeError as error:
                raise self._failed(order, error) from None
        except BaseException:
            await asyncio.shield(workers.stop(0.0))
            raise
        report = workers.load_check
        if signature.dependent_rows and not complete.config.max_batch_size:
            # The engine saw a dialect's default as the written size; completion has removed it.
            report = replace(report, warning="", failures=tuple(kind for kind in report.failures if kind != ROWS))
        workers.checked = report
        self._tell_of_check(order, report)
        scheduler = new_scheduler(parts)
        workers.connect(scheduler)
        if plan.replaces:
            labels = event_labels(
                model=definition.name, version=version, engine=plan.replaces, replaced_by=plan.engine.name
            )
            self.fallbacks[labels] += 1
        kind = ItemModelVersion if definition.is_amd else LoadedModelVersion
        return kind(
            complete.config,
            complete.serialized,
            version,
            statistics,
            scheduler,
            answers,
            workers.inputs,
            workers=workers,
            load_seconds=time.monotonic() - started,
        )

    def _failed(self, order: LoadOrder, error: ServeError) -> EngineFailed:
        if isinstance(error, LoadCheckFailed):
            self._count_failed_check(order, error.kind)
        return EngineFailed(error)

    def _count_failed_check(self, order: LoadOrder, kind: str) -> None:
        self.failed_checks[event_labels(model=order.definition.name, version=order.version, kind=kind)] += 1

    async def _recorded_answers(self, order: LoadOrder) -> Path | None:
        """Return the file of recorded answers; None = there is no such file, or nothing is checked. Raises ServeError
        (INVALID_ARGUMENT)."""
        if load_check_mode(order.definition.config, self.engines) is LoadCheckMode.OFF:
            return None
        return await asyncio.to_thread(order.definition.recorded_answers, order.folder)

    def _check_rows(
        self, order: LoadOrder, complete: ModelDefinition, signature: Signature, report: LoadCheckReport
    ) -> None:
        """Raises LoadCheckFailed if the configuration joins dependent rows and the check is strict."""
        is_strict = load_check_mode(complete.config, self.engines) is LoadCheckMode.STRICT
        if is_strict and complete.config.max_batch_size > 0 and signature.dependent_rows and ROWS in report.failures:
            self._count_failed_check(order, ROWS)
            raise LoadCheckFailed(
                ROWS,
                f"max_batch_size is {complete.config.max_batch_size}, but {signature.dependent_rows}; write"
                f' max_batch_size: 0, or set parameter "{LOAD_CHECK}" to "on" to serve it with a warning',
            )

    def _tell_of_check(self, order: LoadOrder, report: LoadCheckReport) -> None:
        for kind in report.failures:
            # A model's code may send unknown kinds, which would create new metrics without limit.
            if kind in KINDS:
                self._count_failed_check(order, kind)
        if report.parts:
            took = f"{report.seconds:.2g} s" if report.seconds else "known from the cache or the file"
            fields = about(model=order.definition.name, version=order.version)
            self.log.info("%s %d: %s; %s", order.definition.name, order.version, report.text, took, extra=fields)
        if report.warning:
            self._log_once(logging.WARNING, order, f"{order.name}: {report.warning}")

    def _completed(
        self, definition: ModelDefinition, order: LoadOrder
    ) -> tuple[ModelDefinition, ModelStatistics, CachedAnswers | None]:
        """Return the definition as it will run, its statistics and its response cache."""
        config = definition.config
        if self.cache is None and config.response_cache:
            self._log_once(
                logging.WARNING,
                order,
                f"model '{definition.name}' asks for the response cache, but the server has none; enable it with"
                " --cache-config=local,size=BYTES",
            )
            config = replace(config, response_cache=False)
        statistics = ModelStatistics(self.latencies.distributions(config))
        answers = None
        # An answer in a sequence depends on the requests before it.
        if self.cache is not None and config.response_cache and config.sequence_batching is None:
            answers = CachedAnswers(self.cache, config, statistics, self.log)
        return replace(definition, config=config), statistics, answers

    def _warn_of_completion(self, order: LoadOrder, complete: ModelDefinition) -> None:
        for warning in complete.warnings[len(order.definition.warnings) :]:
            self._log_once(logging.WARNING, order, f"model '{complete.name}': {warning}")
        for note in complete.notes:
            self._log_once(logging.DEBUG, order, f"model '{complete.name}': {note}")

    def _log_once(self, level: int, order: LoadOrder, text: str) -> None:
        """Log only once for each content, because a version may be loaded often."""
        if text not in order.reported_warnings:
            order.reported_warnings.add(text)
            fields = about(model=order.definition.name, version=order.version)
            self.log.getChild("config").log(level, "%s", text, extra=fields)


def new_scheduler(parts: SchedulerParts) -> Scheduler:
    """Create the scheduler of a configuration, still without instances."""
    return ModelScheduler(parts) if parts.config.sequence_batching is None else SequenceScheduler(parts)
