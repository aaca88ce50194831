"""Which scheduler a model's configuration asks for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from rocserve.core.model_config import ModelConfig
from rocserve.core.statistics import ModelStatistics
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.scheduler import Scheduler
from rocserve.scheduling.sequence.homes import SequenceHomes
from rocserve.scheduling.sequence.scheduler import SequenceScheduler
from rocserve.scheduling.timers import Timers


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
    homes: SequenceHomes = field(default_factory=SequenceHomes)
    """The versions of the model: sequences may go on in those that this one replaces."""
    initial_states: Mapping[str, bytes] = field(default_factory=dict)
    """By input name, the files that states of sequences begin with."""


def create_scheduler(parts: SchedulerParts) -> Scheduler:
    """The scheduler, still without instances."""
    if parts.config.sequence_batching is not None:
        return SequenceScheduler(
            parts.config,
            parts.version,
            parts.statistics,
            parts.timers,
            parts.limits,
            parts.log,
            parts.homes,
            parts.initial_states,
            parts.answers_requests,
            parts.limiter,
        )
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
