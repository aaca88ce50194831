"""A model version with instances, as the serving table offers it: validation, then its scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable

from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestPlan, RequestValidator
from rocserve.scheduling.scheduler import Scheduler


class ScheduledVersion:
    """Implements core.serving.ServedVersion on a scheduler."""

    def __init__(
        self,
        config: ModelConfig,
        config_message: bytes,
        version: int,
        statistics: ModelStatistics,
        scheduler: Scheduler,
    ) -> None:
        self.name = config.name
        self.version = version
        self.config = config
        self.config_message = config_message
        self.statistics = statistics
        self._validator = RequestValidator(config)
        self._scheduler = scheduler
        self._submit: Callable[[InferRequest, RequestPlan, Responder], None] = (
            self._submit_decoupled if config.decoupled else scheduler.submit
        )

    @property
    def pending_requests(self) -> int:
        """See core.serving.ServedVersion."""
        return self._scheduler.waiting

    def infer(self, request: InferRequest, responder: Responder) -> None:
        """See core.serving.ServedVersion."""
        try:
            self._submit(request, self._validator.validate(request), responder)
        except ServeError as error:
            now = time.monotonic_ns()
            self.statistics.record_failure(now, now)
            responder.fail(error)

    def _submit_decoupled(self, request: InferRequest, plan: RequestPlan, responder: Responder) -> None:
        """Only for those that can take any number of responses."""
        responder.expect_many()
        self._scheduler.submit(request, plan, responder)
