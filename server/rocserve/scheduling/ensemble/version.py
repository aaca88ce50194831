"""Serves an ensemble: starts a run for each request, limits the requests of its steps, and drains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError
from rocserve.core.exchange import RUNNING, Exchange
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.serving import ServedModel, ServedVersion
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.ensemble.graph import EnsembleGraph, find_member
from rocserve.scheduling.ensemble.members import EnsembleMembers
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
    memory: RequestMemory
    """Counts members' answers, like all answers, until the ensemble has answered."""
    answers: CachedAnswers | None = None
    """The version's share of the response cache; None = no answer is cached."""

    def __post_init__(self) -> None:
        config = self.config
        self.name = config.name
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
        self.members = EnsembleMembers({}, ())
        """The members of new requests; at first the steps find theirs by name."""
        self._running = 0
        self._on_drained: list[Callable[[], None]] = []
        """To be called when no request runs."""

    @property
    def sees_requests(self) -> bool:
        _, sees_requests = self.members.below(self)
        return sees_requests

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
        members = self.members
        if isinstance(request.members, EnsembleMembers) and self in request.members.steps:
            members = request.members
        members.begin()
        self._running += 1
        if request.trace is not None:
            request.trace.note("QUEUE_START", started_ns)
        # The answer to a request of a sequence depends on earlier ones.
        if self.answers is not None and not self.config.decoupled and request.sequence is None:
            below, sees_requests = members.below(self)
            self.answers.set_members(below)
            cached = self.answers.look_up(request, exchange, sees_requests)
            if cached is not None:
                exchange.send(cached)
                self._run_ended(members)
                return
        for member in members.cold:
            member.want()
        exchange.enter(RUNNING)
        steps = members.steps.get(self, ())
        EnsembleRun(self._parts, request, exchange, started_ns, members, steps, self._run_ended).start()

    def find_members(self, served: Mapping[str, ServedModel]) -> EnsembleMembers:
        """Return the members among the served models, which the ensemble fits."""
        own: list[ServedVersion] = []
        for step in self.config.ensemble_steps:
            found = find_member(step, served)
            assert found is not None, "the ensemble fits its members"
            own.append(found)
        steps: dict[object, Sequence[ServedVersion]] = {self: own}
        versions = dict.fromkeys(own)
        for member in own:
            if isinstance(member, EnsembleVersion):
                steps.update(member.members.steps)
                versions.update(dict.fromkeys(member.members.versions))
        return EnsembleMembers(steps, versions)

    def reconfigure(self, config: ModelConfig, config_message: bytes) -> None:
        """Serve later requests with another configuration of the same steps and tensors. From any thread."""
        self.config, self.config_message = config, config_message
        self._parts = replace(self._parts, config=config)

    def close(self, drained: Callable[[], None]) -> None:
        """Call `drained` once when all requests are answered. The caller has already removed the version from the
        serving table."""
        self._on_drained.append(drained)
        self._report_drained()

    def _run_ended(self, members: EnsembleMembers) -> None:
        members.end()
        self._running -= 1
        self._report_drained()

    def _report_drained(self) -> None:
        if not self._running:
            while self._on_drained:
                self._on_drained.pop()()
