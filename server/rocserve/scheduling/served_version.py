"""Serves a model version that has instances: validates requests, asks the cache, hands the others to the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.errors import ServeError
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.statistics import ModelStatistics
from rocserve.plane.heap import SharedHeap
from rocserve.scheduling.queue import QueueFull
from rocserve.scheduling.response_cache import CachedAnswers
from rocserve.scheduling.response_sequencer import OrderHook, ResponseSequencer
from rocserve.scheduling.scheduler import Scheduler


@dataclass(eq=False)
class ScheduledVersion:
    """Implements core.serving.ServedVersion on a scheduler."""

    config: ModelConfig
    config_message: bytes
    version: int
    statistics: ModelStatistics
    _scheduler: Scheduler
    _answers: CachedAnswers | None = None
    """The version's share of the response cache; None = no answer is cached."""
    inputs: SharedHeap | None = None
    """The heap from which the version's workers read inputs."""

    def __post_init__(self) -> None:
        self.name = self.config.name
        self.on_request: Callable[[], None] | None = None
        """Called with each request, if the version may be unloaded."""
        self._validate = self._scheduler.validator.validate
        batching = self.config.dynamic_batching
        in_order = self._answers is not None and batching is not None and batching.preserve_ordering
        self._sequencer = ResponseSequencer() if in_order else None
        """Keeps cached answers from overtaking requests that still run."""

    @property
    def pending_requests(self) -> int:
        return self._scheduler.waiting

    @property
    def sees_requests(self) -> bool:
        return self._scheduler.validator.sees_requests

    def infer(self, request: InferRequest, exchange: Exchange) -> None:
        if self.on_request is not None:
            self.on_request()
        try:
            self._validate(request)
        except ServeError as error:
            # As in Triton, a request that does not fit the model is not counted as one of its requests.
            self.statistics.note_failure(error.text)
            exchange.send(error)
            return
        if request.caller is not None:
            self._scheduler.follow(request, exchange)
        try:
            if self.config.decoupled:
                # Refuses clients that can take only one response.
                exchange.expect_many()
            elif self._answers is not None and request.plan.is_cacheable:
                cached = self._answers.look_up(request, exchange, self.sees_requests)
                if self._sequencer is not None:
                    exchange.add(OrderHook(self._sequencer.ticket(), self._scheduler.work_off))
                if cached is not None:
                    exchange.send(cached)
                    return
            self._scheduler.submit(request, exchange)
        except ServeError as error:
            now = time.monotonic_ns()
            if isinstance(error, QueueFull):
                self.statistics.record_refusal(error, now, now)
            else:
                self.statistics.record_failure(now, now)
                self.statistics.note_failure(error.text)
            exchange.refuse(error)
