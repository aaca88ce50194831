"""A model version with instances, as the serving table offers it: validation, then its scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder, VersionEnding
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestPlan, RequestValidator
from rocserve.scheduling.cached_answers import CachedAnswers
from rocserve.scheduling.ordering import AnswerOrder, OrderedResponder
from rocserve.scheduling.queue import QueueFull
from rocserve.scheduling.scheduler import Scheduler

_Submit = Callable[[InferRequest, RequestPlan, Responder], None]


class ScheduledVersion:
    """Implements core.serving.ServedVersion on a scheduler."""

    def __init__(
        self,
        config: ModelConfig,
        config_message: bytes,
        version: int,
        statistics: ModelStatistics,
        scheduler: Scheduler,
        answers: CachedAnswers | None = None,
    ) -> None:
        """`answers`: those that may be given again; None = each request is run."""
        self.name = config.name
        self.version = version
        self.config = config
        self.config_message = config_message
        self.statistics = statistics
        self._validator = RequestValidator(config)
        self._scheduler = scheduler
        self._answers = answers
        self._submit = _way_of_submitting(config, scheduler, answers)

    @property
    def pending_requests(self) -> int:
        """See core.serving.ServedVersion."""
        return self._scheduler.waiting

    def infer(self, request: InferRequest, responder: Responder) -> None:
        """See core.serving.ServedVersion."""
        try:
            plan = self._validator.validate(request)
        except ServeError as error:
            # As in Triton, what does not fit the model has never been one of its requests.
            responder.fail(error)
            return
        try:
            self._submit(request, plan, responder)
        except ServeError as error:
            now = time.monotonic_ns()
            if isinstance(error, QueueFull):
                self.statistics.record_rejection(now, now)
            else:
                self.statistics.record_failure(now, now)
            responder.fail(error)


def _way_of_submitting(config: ModelConfig, scheduler: Scheduler, answers: CachedAnswers | None) -> _Submit:
    if config.decoupled:
        return _DecoupledWay(scheduler).submit
    if answers is None:
        return scheduler.submit
    batching = config.dynamic_batching
    if batching is not None and batching.preserve_ordering:
        return _CachedWayInOrder(scheduler, answers).submit
    return _CachedWay(scheduler, answers).submit


class _DecoupledWay:
    """Only for clients that can take any number of responses."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def submit(self, request: InferRequest, plan: RequestPlan, responder: Responder) -> None:
        responder.expect_many()
        self._scheduler.submit(request, plan, responder)


class _CachedWay:
    """What has been answered before is answered again."""

    def __init__(self, scheduler: Scheduler, answers: CachedAnswers) -> None:
        self._scheduler = scheduler
        self._answers = answers

    def submit(self, request: InferRequest, plan: RequestPlan, responder: Responder) -> None:
        keeper = self._answers.look_up(request, plan, responder)
        if keeper is not None:
            self._scheduler.submit(request, plan, keeper)


class _CachedWayInOrder:
    """What comes from the cache may not overtake what is still being run."""

    def __init__(self, scheduler: Scheduler, answers: CachedAnswers) -> None:
        self._scheduler = scheduler
        self._answers = answers
        self._order = AnswerOrder()

    def submit(self, request: InferRequest, plan: RequestPlan, responder: Responder) -> None:
        turn = self._order.take_turn()
        keeper = self._answers.look_up(request, plan, responder, OrderedResponder(responder, turn))
        if keeper is None:
            return
        try:
            # Outermost, so that a request that is refused later on need not wait for its turn.
            self._scheduler.submit(request, plan, OrderedResponder(keeper, turn))
        except (ServeError, VersionEnding):
            turn.leave()
            raise
