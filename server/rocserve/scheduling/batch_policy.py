"""Decides which of the waiting requests run next, together."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import ModelConfig
from rocserve.core.ragged import ragged_batching
from rocserve.core.validation import RequestPlan
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.queue import RequestQueue


class BatchDecision(NamedTuple):
    """How many requests from the front of the queue run now, or when to decide again."""

    request_count: int
    decide_again_at_ns: int = 0
    """time.monotonic_ns() at which the oldest request has waited long enough; 0 = no need."""
    is_full: bool = False
    """No request that comes later could join them."""
    is_grouped: bool = False
    """They travel together, but the engine runs them one after the other."""


class BatchPolicy(Protocol):
    largest: int
    """The most rows that run at once, one request apart."""

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        """The queue is not empty and an instance is free."""


_ONE = BatchDecision(1, is_full=True)

LARGEST_GROUP = 16
LONGEST_GROUP_NS = 500_000
"""What the first of a group may wait for the last in the engine."""


class NoBatching:
    """One request at a time, as it came.

    Requests that wait for an engine that is done with each in a moment go to the worker in one message, grouped, and
    still run one by one there: the way to the worker and back, which costs more than such an engine's work, is then
    paid once for all of them.
    """

    largest = 1

    def __init__(self, times: ComputeTimes | None) -> None:
        """`times`: of the model; None: its requests cannot be laid one behind the other, or their answers cannot."""
        self._times = times

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        if queue.count == 1 or self._times is None:
            return _ONE
        longest = min(queue.count, LARGEST_GROUP, LONGEST_GROUP_NS // max(self._times.request_ns, 1))
        if longest < 2:
            return _ONE
        count = 0
        plan = None
        for entry in queue:
            if plan is None:
                plan = entry.plan
            if count == longest or entry.plan is not plan:
                break
            count += 1
        return BatchDecision(count, is_full=True, is_grouped=count > 1)


class DynamicBatcher:
    """Batches of requests that may share one, up to max_batch_size rows; a request is never split. Triton's rules.

    A batch is cut at the largest preferred size that the requests in their order reach; where they pass over all of
    them, before the request that passes over the largest. What reaches none runs as it is when there is no delay, when
    it cannot grow, or when its oldest request has waited for the delay; the delay over, a batch is as large as can be.
    """

    def __init__(self, max_batch_size: int, preferred_batch_sizes: tuple[int, ...], max_queue_delay_ns: int) -> None:
        """`preferred_batch_sizes`: at least one."""
        self._max_batch_size = self.largest = max_batch_size
        self._preferred = frozenset(preferred_batch_sizes)
        self._largest_preferred = max(preferred_batch_sizes)
        self._delay_ns = max_queue_delay_ns

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        rows = count = preferred_count = 0
        most, largest_preferred, preferred = self._max_batch_size, self._largest_preferred, self._preferred
        first: RequestPlan | None = None
        oldest_ns = now_ns
        can_grow = True
        for entry in queue:
            plan = entry.plan
            total = rows + plan.batch_size
            if first is None:
                first = plan
            else:
                if total > largest_preferred and not preferred_count:
                    preferred_count = count
                if total > most or (plan is not first and plan.batch_key != first.batch_key):
                    can_grow = False
                    break
            rows = total
            count += 1
            if entry.queue_start_ns < oldest_ns:
                oldest_ns = entry.queue_start_ns
            if rows in preferred:
                preferred_count = count
            if rows >= most:
                can_grow = False
                break
        is_full = not can_grow or (preferred_count > 0 and rows >= self._largest_preferred)
        is_late = self._delay_ns > 0 and oldest_ns + self._delay_ns <= now_ns
        if preferred_count and not is_late:
            return BatchDecision(preferred_count, is_full=is_full)
        if is_full or is_late or self._delay_ns == 0 or rows >= self._largest_preferred:
            return BatchDecision(count, is_full=not can_grow)
        return BatchDecision(0, oldest_ns + self._delay_ns)


def batch_policy(config: ModelConfig, times: ComputeTimes, answers_requests: bool = False) -> BatchPolicy:
    """The policy that a model's configuration asks for. `times`: of the model. `answers_requests`: the model sees each
    request for itself, so that answers of any shape can be cut apart."""
    batching = config.dynamic_batching
    if batching is None or config.max_batch_size == 0:
        may_group = config.max_batch_size > 0 if answers_requests else _may_group(config)
        return NoBatching(times if may_group else None)
    return DynamicBatcher(
        config.max_batch_size,
        batching.preferred_batch_sizes or (config.max_batch_size,),
        batching.max_queue_delay_microseconds * 1000,
    )


def _may_group(config: ModelConfig) -> bool:
    """Whether all of a model's tensors have rows of one size."""
    return (
        config.max_batch_size > 0
        and not ragged_batching(config)
        and all(entry.datatype is not DataType.BYTES for entry in config.inputs)
        and all(size >= 0 for entry in config.outputs for size in entry.dims)
    )
