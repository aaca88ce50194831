"""How the batches of a model version are laid out and answered: as one, or each request for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.model_config import ModelConfig
from rocserve.core.statistics import ModelStatistics
from rocserve.scheduling.batch import BatchAnswerer, BatchLayouts
from rocserve.scheduling.entry import QueuedRequest
from rocserve.scheduling.open_requests import RequestBatches
from rocserve.scheduling.ragged_layouts import batch_layouts
from rocserve.scheduling.timers import RoughTimers


@dataclass(frozen=True, slots=True)
class BatchWays:
    """Both are one object where the model sees each request for itself."""

    layouts: BatchLayouts | RequestBatches
    answerer: BatchAnswerer | RequestBatches


def batch_ways(
    config: ModelConfig,
    version: int,
    statistics: ModelStatistics,
    timers: RoughTimers,
    answers_requests: bool,
    on_answered: Callable[[], None],
    on_left: Callable[[QueuedRequest], None],
) -> BatchWays:
    """
    Args:
        answers_requests: the model sees each request for itself, and requests may outlive their batch.
        on_answered, on_left: see RequestBatches; called only where requests may outlive their batch.
    """
    if answers_requests:
        batches = RequestBatches(config, version, statistics, timers, on_answered, on_left)
        return BatchWays(batches, batches)
    return BatchWays(batch_layouts(config), BatchAnswerer(config, version, statistics))
