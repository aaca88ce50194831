"""Serves an ensemble: starts a run for each request, limits the requests of its steps, and drains."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError
from rocserve.core.exchange import RUNNING, Exchange
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.serving import ServedVersion
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.ensemble.graph import EnsembleGraph, find_member
from rocserve.scheduling.ensemble.parts import EnsembleParts, InflightLimit
from rocserve.scheduling.ensemble.run import EnsembleRun
from rocserve.scheduling.response_cache import CachedAnswers


@dataclass(eq=False)
class EnsembleVersion:
    """Implements core.serving.ServedVersion for an ensemble."""

    config: ModelConfig
    config_message: bytes
    version: int
    statistics: ModelStatistics
    dispatcher: Dispatcher
    """The ensemble uses a copy, because it may hold a table."""
    memory: RequestMemory
    """Counts members' answers, like all answers, until the ensemble has answered."""
    answers: CachedAnswers | None = None
    """The version's share of the response cache; None = no answer is cached."""

    def __post_init__(self) -> None:
        config = self.config
        self.name = config.name
        self.dispatcher = replace(self.dispatcher)
        limit = config.ensemble_max_inflight_requests
        self._parts = EnsembleParts(
            config,
            str(self.version),
            EnsembleGraph(config),
            self.dispatcher,
            self.memory,
            self.statistics,
            [InflightLimit(limit) for _ in config.ensemble_steps] if limit else [],
            {output.name: output for output in config.outputs},
        )
        self._validator = RequestValidator(config)
        self.on_request: Callable[[EnsembleVersion], None] | None = None
        """Called before each request is run, because members may have to be loaded."""
        self._running = 0
        self._on_drained: list[Callable[[], None]] = []
        """To be called when no request runs."""

    @property
    def sees_requests(self) -> bool:
        members = (reference() for reference in self._members())
        return any(member.sees_requests for member in members if member is not None and not member.config.is_ensemble)

    def infer(self, request: InferRequest, exchange: Exchange) -> None:
        started_ns = time.monotonic_ns()
        try:
            self._validator.validate(request)
            if self.config.decoupled:
                exchange.expect_many()
        except ServeError as error:
            self.statistics.note_failure(error.text)
            exchange.send(error)
            return
        self._running += 1
        if request.trace is not None:
            request.trace.note("QUEUE_START", started_ns)
        # The answer to a request of a sequence depends on earlier ones.
        if self.answers is not None and not self.config.decoupled and request.sequence is None:
            self.answers.set_members(self._members())
            cached = self.answers.look_up(request, exchange, self.sees_requests)
            if cached is not None:
                exchange.send(cached)
                self._run_ended()
                return
        if self.on_request is not None:
            self.on_request(self)
        exchange.enter(RUNNING)
        EnsembleRun(self._parts, request, exchange, started_ns, self._run_ended).start()

    def _members(self) -> tuple[weakref.ref[ServedVersion], ...]:
        """Return the versions that the steps would run now, and the members of ensembles among them."""
        table = self.dispatcher.table
        if (known := table.members.get(self)) is not None:
            return known
        found: dict[ServedVersion, None] = {}
        waiting = [self.config]
        while waiting:
            for step in waiting.pop().ensemble_steps:
                member = find_member(step, table.models)
                if member is not None and member not in found:
                    found[member] = None
                    waiting.append(member.config)
        return table.members.keep(self, tuple(map(weakref.ref, found)))

    def members(self) -> Iterable[ServedVersion]:
        """Return the versions that the steps, and the steps of ensembles among them, would run now."""
        return [member for reference in self._members() if (member := reference()) is not None]

    def reconfigure(self, config: ModelConfig, config_message: bytes) -> None:
        """Serve later requests with another configuration of the same steps and tensors. From any thread."""
        self.config, self.config_message = config, config_message
        self._parts = replace(self._parts, config=config)

    def close(self, drained: Callable[[], None]) -> None:
        """Call `drained` once when all requests are answered. The caller has already removed the version from the
        serving table."""
        self._on_drained.append(drained)
        self._report_drained()

    def _run_ended(self) -> None:
        self._running -= 1
        self._report_drained()

    def _report_drained(self) -> None:
        if not self._running:
            while self._on_drained:
                self._on_drained.pop()()
