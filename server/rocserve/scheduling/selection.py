"""Which scheduler a model's configuration asks for."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rocserve.core.model_config import ModelConfig
from rocserve.core.statistics import ModelStatistics
from rocserve.scheduling.model_scheduler import ModelScheduler, Timers
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """What a scheduler is made of."""

    config: ModelConfig
    version: int
    statistics: ModelStatistics
    timers: Timers
    limits: QueueLimits
    log: logging.Logger
    answers_requests: bool = False
    """The model sees each request for itself, and requests may outlive their batch."""
    limiter: RateLimiter | None = None
    """Says which instances may run; None = each as it is free."""


def create_scheduler(parts: SchedulerParts) -> Scheduler:
    """The scheduler, still without instances."""
    return ModelScheduler(
        parts.config,
        parts.version,
        parts.statistics,
        parts.timers,
        parts.limits,
        parts.log,
        parts.answers_requests,
        parts.limiter,
    )
