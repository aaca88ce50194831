"""Loads a version of a model: workers, then the completed configuration, then the scheduler over their instances."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rocserve.amd_inference_server.single_items import SingleItems
from rocserve.backends.base import Machine
from rocserve.config.definition import ModelDefinition, complete_definition, with_places
from rocserve.config.model_folder import read_initial_states
from rocserve.config.model_limits import time_limits
from rocserve.core.custom_metrics import CustomMetrics, OwnedMetrics
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.latencies import LatencyOptions
from rocserve.core.model_config import ModelConfig, with_sequence_tensors
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.core.statistics import ModelStatistics
from rocserve.plane.loop import PlaneLoop
from rocserve.protocol import model_config_pb2 as messages
from rocserve.repository.engine_plan import EngineFailure, EnginePlan, Fallback, FallbackCounter, plan_engine
from rocserve.repository.ensemble_warmup import warm_up_ensemble
from rocserve.repository.lifecycle import LoadedVersion
from rocserve.repository.version_wiring import VersionWiring, drained
from rocserve.repository.version_workers import config_text, load_message, worker_group
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.scheduling.model_calls import start_call
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter, needs_of
from rocserve.scheduling.response_cache import CachedAnswers, ResponseCache
from rocserve.scheduling.scheduler import Scheduler, SchedulerParts
from rocserve.scheduling.sequence.router import SequenceRouters
from rocserve.scheduling.sequence.scheduler import SequenceScheduler
from rocserve.scheduling.served_version import ScheduledVersion
from rocserve.settings import NO_TIME_LIMITS, EngineSettings, TimeLimits
from rocserve.workers.group import WorkerGroup
from rocserve.workers.instance_mail import InstanceMail
from rocserve.workers.launcher import WorkerLauncher

STOP_SECONDS = 10.0
"""How long a worker may take to end by itself once it has nothing to do."""


@dataclass(frozen=True, slots=True)
class _Order:
    """One load."""

    definition: ModelDefinition
    version: int
    folder: Path
    content: str
    on_change: Callable[[], None]
    on_progress: Callable[[str], None]

    @property
    def name(self) -> str:
        return f"model '{self.definition.name}' version {self.version}"


class _EngineFailed(Exception):
    """The engine could not load the model, or not warm it up; another might."""

    def __init__(self, error: ServeError) -> None:
        super().__init__(error.text)
        self.error = error


@dataclass(frozen=True)
class WorkerVersionLoader:
    """Loads versions into worker processes."""

    launcher: WorkerLauncher
    mail: InstanceMail
    dispatcher: Dispatcher
    machine: Machine
    log: logging.Logger
    fallbacks: FallbackCounter = field(default_factory=FallbackCounter)
    custom_metrics: CustomMetrics = field(default_factory=CustomMetrics)
    """Takes those that models define."""
    memory: RequestMemory = field(default_factory=RequestMemory)
    """Of requests; what goes from step to step of an ensemble counts against it."""
    engines: EngineSettings = field(default_factory=EngineSettings)
    limits: QueueLimits = field(default_factory=QueueLimits)
    time_limits: TimeLimits = NO_TIME_LIMITS
    """Of models that say nothing of their own."""
    latencies: LatencyOptions = field(default_factory=LatencyOptions)
    """What is kept of the models' latencies."""
    strict: bool = False
    """Nothing is completed from the models."""
    cache: ResponseCache | None = None
    limiter: RateLimiter | None = None
    """Says which instances may run; None = each as it is free."""
    sequences: SequenceRouters = field(default_factory=SequenceRouters)

    async def load(
        self,
        definition: ModelDefinition,
        version: int,
        version_folder: Path,
        content: str,
        on_change: Callable[[], None],
        on_progress: Callable[[str], None],
    ) -> LoadedVersion:
        """See lifecycle.LoadVersion."""
        if definition.backend is None:
            complete = self._with_the_cache_there_is(complete_definition(definition, None, strict=self.strict))
            statistics = ModelStatistics(self.latencies.distributions(complete.config))
            answers = self._cached_answers(complete, version, statistics)
            kind = ItemEnsemble if definition.is_amd else LoadedEnsemble
            ensemble = kind(
                complete.config,
                complete.serialized,
                version,
                statistics,
                self.dispatcher,
                self.memory,
                answers,
                self.mail.plane,
            )
            await warm_up_ensemble(ensemble, definition.folder, self.mail.plane)
            return ensemble
        order = _Order(definition, version, version_folder, content, on_change, on_progress)
        plan = plan_engine(definition, version_folder, self.machine)
        if definition.backend.choose_engine is not None:
            self.log.info("%s: engine %s: %s", order.name, plan.engine.name, plan.reason)
        try:
            return await self._load_on(plan, order)
        except _EngineFailed as failed:
            failure = EngineFailure(plan, failed.error)
        return await self._load_in_place(failure, order)

    async def _load_in_place(self, failure: EngineFailure, order: _Order) -> LoadedVersion:
        """On the engine that takes the place of the one that failed.

        Raises:
            ServeError: there is none, or it cannot load the model either.
        """
        plan = failure.plan_in_its_place(order.definition, self.machine)
        engine = plan.engine.name
        self.log.warning("%s: %s; engine %s takes its place", order.name, failure.text, engine)
        try:
            loaded = await self._load_on(plan, order)
        except _EngineFailed as second:
            raise failure.and_then(plan.engine, second.error) from None
        self.fallbacks.count(Fallback(order.definition.name, order.version, plan.replaces, engine))
        return loaded

    async def _load_on(self, plan: EnginePlan, order: _Order) -> LoadedVersion:
        """
        Raises:
            _EngineFailed: the engine's own words.
            ServeError: what no engine can change.
        """
        started = time.monotonic()
        definition, version = order.definition, order.version
        limits = time_limits(definition.config.parameters, self.time_limits)
        assert definition.backend is not None, "an ensemble has no workers"
        metrics = OwnedMetrics(self.custom_metrics, order.name, self.log)
        wiring = VersionWiring(
            definition.name,
            order.on_change,
            order.on_progress,
            functools.partial(start_call, self.dispatcher),
            metrics,
            self.mail.plane,
        )
        verbose = self.log.isEnabledFor(logging.DEBUG)
        group = worker_group(
            load_message(
                definition, version, order.folder, plan.engine, self.engines, verbose, plan.workers[0].architecture
            ),
            definition,
            plan,
            launcher=self.launcher,
            mail=self.mail,
            events=wiring,
            start_call=wiring.start_call,
            log=self.log.getChild("workers"),
            limits=limits,
            content=order.content,
        )
        give_back = self._reserve(plan)
        try:
            try:
                signature = await group.load()
            except ServeError as error:
                raise _EngineFailed(error) from None
            complete = with_places(complete_definition(definition, signature, strict=self.strict), plan.places)
            complete = self._with_the_cache_there_is(complete)
            for warning in complete.warnings[len(definition.warnings) :]:
                self.log.getChild("config").warning("model '%s': %s", definition.name, warning)
            statistics = ModelStatistics(self.latencies.distributions(complete.config))
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
            )
            try:
                await group.warm_up(with_sequence_tensors(complete.config), config_text(complete))
            except ServeError as error:
                raise _EngineFailed(error) from None
        except BaseException:
            give_back()
            wiring.disconnect()
            await asyncio.shield(group.stop(0.0))
            raise
        scheduler = new_scheduler(parts)
        wiring.connect(scheduler, group.instances)
        seconds = time.monotonic() - started
        answers = self._cached_answers(complete, version, statistics)
        kind = ItemModelVersion if definition.is_amd else LoadedModelVersion
        return kind(
            complete,
            version,
            statistics,
            scheduler,
            group,
            wiring,
            plan,
            seconds,
            answers,
            give_back,
            limits.drain_seconds,
            self.mail.plane,
            self.log,
        )

    def _reserve(self, plan: EnginePlan) -> Callable[[], None]:
        """See that there can be resources for all instances; gives what to call when they run no more.

        Raises:
            ServeError: INVALID_ARGUMENT, there cannot.
        """
        if self.limiter is None:
            return _nothing
        needs = [needs_of(one.rate_limiter, one.device) for one in plan.workers for _ in range(one.instance_count)]
        return self.limiter.register(needs)

    def _with_the_cache_there_is(self, definition: ModelDefinition) -> ModelDefinition:
        """As it is run. What clients see of its configuration stays."""
        if self.cache is not None or not definition.config.response_cache:
            return definition
        self.log.warning(
            "model '%s' asks for the response cache, but the server has none; --cache-config=local,size=BYTES makes"
            " one",
            definition.name,
        )
        return replace(definition, config=replace(definition.config, response_cache=False))

    def _cached_answers(
        self, definition: ModelDefinition, version: int, statistics: ModelStatistics
    ) -> CachedAnswers | None:
        # What a sequence is answered depends on what came before.
        if (
            self.cache is None
            or not definition.config.response_cache
            or definition.config.sequence_batching is not None
        ):
            return None
        return CachedAnswers(self.cache, definition.config, version, statistics, self.log)


class LoadedModelVersion(ScheduledVersion):
    """A version with workers, for the repository's hands."""

    def __init__(
        self,
        definition: ModelDefinition,
        version: int,
        statistics: ModelStatistics,
        scheduler: Scheduler,
        group: WorkerGroup,
        wiring: VersionWiring,
        plan: EnginePlan,
        load_seconds: float,
        answers: CachedAnswers | None,
        give_back: Callable[[], None],
        drain_seconds: float,
        plane: PlaneLoop,
        log: logging.Logger,
    ) -> None:
        """`give_back` is called when its instances run no more. `drain_seconds`: see settings.TimeLimits."""
        config, message = definition.config, definition.serialized
        super().__init__(config, message, version, statistics, scheduler, answers, group.inputs)
        self.load_seconds = load_seconds
        self._group = group
        self._wiring = wiring
        self._plan = plan
        self._plan_properties = plan.properties
        """Made once: each step of an ensemble asks."""
        self._give_back = give_back
        self._drain_seconds = drain_seconds
        self._plane = plane
        self._log = log

    @property
    def properties(self) -> Mapping[str, str]:
        """See core.serving.ServedVersion. What the engine itself says goes before what the server says of it."""
        return {**self._plan_properties, **self._wiring.properties}

    @property
    def worker_pids(self) -> Mapping[int, int]:
        """See core.serving.ServedVersion."""
        return self._group.models_of_workers

    @property
    def worker_restarts(self) -> int:
        return self._group.restarts

    @property
    def available(self) -> bool:
        return self._wiring.available

    @property
    def status_reason(self) -> str:
        return "; ".join(filter(None, (self._plan.warning, self._wiring.reason)))

    def follow_members(self, is_decoupled: bool) -> None:
        """See lifecycle.LoadedVersion; it has none."""

    async def unload(self) -> None:
        """See lifecycle.LoadedVersion."""
        if await self._wiring.drain(self._drain_seconds):
            self._wiring.stop_waiting()
            await self._group.stop(STOP_SECONDS)
        else:
            await self._cut_short()
        self._wiring.disconnect()
        self._give_back()
        if self._answers is not None:
            self._plane.call_soon(self._answers.close)

    async def _cut_short(self) -> None:
        """Kill the workers with what is inside, and refuse what waits for them."""
        text = (
            f"model '{self.name}' version {self.version} was unloaded and had not answered within"
            f" {self._drain_seconds:g} s (--drain-timeout-secs)"
        )
        self._log.warning("%s; its workers are killed", text)
        self._wiring.refuse_waiting(unavailable(text))
        await self._group.stop(0.0, text)


class LoadedEnsemble(EnsembleVersion):
    """An ensemble, for the repository's hands; whether its members are there is the repository's to know."""

    available = True
    status_reason = ""
    properties: Mapping[str, str] = {}
    pending_requests = 0
    load_seconds = 0.0
    worker_pids: Mapping[int, int] = {}
    worker_restarts = 0

    def __init__(
        self,
        config: ModelConfig,
        config_message: bytes,
        version: int,
        statistics: ModelStatistics,
        dispatcher: Dispatcher,
        memory: RequestMemory,
        answers: CachedAnswers | None,
        plane: PlaneLoop,
    ) -> None:
        super().__init__(config, config_message, version, statistics, dispatcher, memory, answers)
        self._plane = plane

    def follow_members(self, is_decoupled: bool) -> None:
        """See lifecycle.LoadedVersion."""
        if is_decoupled == self.config.decoupled:
            return
        message = messages.ModelConfig.FromString(self.config_message)
        message.model_transaction_policy.decoupled = is_decoupled
        self.config_message = message.SerializeToString(deterministic=True)
        self.config = replace(self.config, decoupled=is_decoupled)

    async def unload(self) -> None:
        """See lifecycle.LoadedVersion."""
        # It has no workers; what its requests wait for has limits of its own.
        await drained(self._plane, self.close, 0.0)
        if self.answers is not None:
            self._plane.call_soon(self.answers.close)


class ItemModelVersion(LoadedModelVersion):
    """A version in AMD Inference Server's dialect, which also takes its clients' single items."""

    @functools.cached_property
    def _items(self) -> SingleItems:
        return SingleItems(self.config)

    def infer(self, request: InferRequest, responder: Responder) -> None:
        """See core.serving.ServedVersion."""
        super().infer(*self._items.take(request, responder))


class ItemEnsemble(LoadedEnsemble):
    """The same of a chain."""

    @functools.cached_property
    def _items(self) -> SingleItems:
        return SingleItems(self.config)

    def infer(self, request: InferRequest, responder: Responder) -> None:
        """See core.serving.ServedVersion."""
        super().infer(*self._items.take(request, responder))


def _nothing() -> None:
    """To give back, where nothing is limited."""


def new_scheduler(parts: SchedulerParts) -> Scheduler:
    """The scheduler that the configuration asks for, still without instances."""
    return ModelScheduler(parts) if parts.config.sequence_batching is None else SequenceScheduler(parts)
