"""Decides which of the waiting requests run next, together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rocserve.core.model_config import ModelConfig
from rocserve.scheduling.queue import RequestQueue


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """How many requests from the front of the queue run now, or when to look again."""

    request_count: int
    look_again_at_ns: int = 0
    """time.monotonic_ns() at which the oldest request has waited long enough; 0 = no need."""
    is_full: bool = False
    """No request that comes later could join them."""


class BatchPolicy(Protocol):
    starts_at_once: bool
    """A request that finds the queue empty and an instance idle never waits for company."""
    always_full: bool
    """Every batch is full with its first request."""

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        """The queue is not empty and an instance is free."""


_ONE = BatchDecision(1, is_full=True)


class NoBatching:
    """One request at a time, as it came."""

    starts_at_once = True
    always_full = True

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        return _ONE


class DynamicBatcher:
    """Batches of requests with the same shapes, up to max_batch_size rows; a request is never split.

    With a delay of 0 what is there runs at once. With a delay a batch runs when it reaches a preferred size, cannot
    grow, or its oldest request has waited for the delay.
    """

    def __init__(self, max_batch_size: int, preferred_batch_sizes: tuple[int, ...], max_queue_delay_ns: int) -> None:
        self._max_batch_size = max_batch_size
        self._preferred = frozenset(preferred_batch_sizes)
        self._delay_ns = max_queue_delay_ns
        self.starts_at_once = max_queue_delay_ns == 0
        self.always_full = max_batch_size == 1

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        rows = count = preferred_count = 0
        batch_key = None
        oldest_ns = now_ns
        can_grow = True
        for entry in queue:
            plan = entry.plan
            if batch_key is None:
                batch_key = plan.batch_key
            elif plan.batch_key is not batch_key and plan.batch_key != batch_key:
                can_grow = False
                break
            if count and rows + plan.batch_size > self._max_batch_size:
                can_grow = False
                break
            rows += plan.batch_size
            count += 1
            oldest_ns = min(oldest_ns, entry.queue_start_ns)
            if rows in self._preferred:
                preferred_count = count
            if rows >= self._max_batch_size:
                can_grow = False
                break
        if self._delay_ns == 0 or oldest_ns + self._delay_ns <= now_ns:
            return BatchDecision(count, is_full=not can_grow)
        if preferred_count:
            return BatchDecision(preferred_count)
        if not can_grow:
            return BatchDecision(count, is_full=True)
        return BatchDecision(0, oldest_ns + self._delay_ns)


def batch_policy(config: ModelConfig) -> BatchPolicy:
    """The policy that a model's configuration asks for."""
    batching = config.dynamic_batching
    if batching is None or config.max_batch_size == 0:
        return NoBatching()
    return DynamicBatcher(
        config.max_batch_size,
        batching.preferred_batch_sizes or (config.max_batch_size,),
        batching.max_queue_delay_microseconds * 1000,
    )
