"""Decides which of the waiting requests run next, together.

Of those with deadlines Triage chooses which are worth running, so that a model under too much load goes on answering as
many in time as it can.

A queue that is served in order of arrival until the deadlines come keeps every request waiting for as long as it may:
under sustained overload each one that runs ends too late, and next to none is answered in time. Dropping those that
cannot end in time is not enough, since the others still run at the very edge, where the way to the client and back, or
a batch that takes a little longer, makes them late. So:

- A request that cannot end by its deadline, by the time that the model's batches take (compute_times), is dropped when
  its turn has come (Clockwork, Gujarati et al., OSDI 2020, predicts execution times to refuse in the same way), except
  one now and then while nothing else runs, so that an estimate that is too high shows. A batch takes in no more than
  what lets its most urgent request end in time.
- While a priority level keeps requests waiting for too long, it serves the newest first: adaptive LIFO, of Facebook's
  "Fail at Scale" (Maurer, ACM Queue 13(8), 2015). What is too long is not a number of milliseconds, as there and in
  CoDel (Nichols and Jacobson, ACM Queue 10(5), 2012; RFC 8289), since models take from microseconds to minutes: it is
  half of the time that the oldest may wait for its instance, or a request lost for lack of time since the level was
  empty last. Where the order is to be kept those that have waited for so long are dropped instead, as CoDel drops at
  the head of the queue, as long as others wait behind them.
- Requests without deadlines keep their order and are never dropped; under overload they take turns with the others.

Simulated with deadlines of 60 and 200 ms and mixed ones, single arrivals and bursts of ten, compute times of 10 ms that
vary and ones that do not, batches and none, at ten times the load: arrival order answered 0 to 59 % of what the model
could, the same with the hopeless dropped 0 to 98 %, earliest deadline first with them dropped 0 to 56 %, newest first
95 % and more. Always newest first loses up to 5 % at 0.9 times the load, against half of that this way.
Limits of concurrency (Envoy's adaptive concurrency; DAGOR, Zhou et al., SoCC 2018) bound the queue by what latency is
like in all, and know of no deadlines: short ones would be lost behind long ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import ModelConfig
from rocserve.core.ragged import RaggedBatching
from rocserve.core.requests import InferRequest
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
    """The most rows that run at once, one request apart."""

    def __init__(self, times: ComputeTimes | None) -> None:
        """`times`: of the model; None: its requests cannot be laid one behind the other, or their answers cannot."""
        self._times = times

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        """The queue is not empty and an instance is free."""
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


BatchPolicy = NoBatching | DynamicBatcher


def batch_policy(config: ModelConfig, times: ComputeTimes, answers_requests: bool = False) -> BatchPolicy:
    """The policy that a model's configuration asks for. `times`: of the model. `answers_requests`: the model sees each
    request for itself, so that answers of any shape can be cut apart."""
    batching = config.dynamic_batching
    if batching is None or config.max_batch_size == 0:
        # Else all tensors have to have rows of one size.
        may_group = config.max_batch_size > 0 and (
            answers_requests
            or (
                not RaggedBatching(config)
                and all(entry.datatype is not DataType.BYTES for entry in config.inputs)
                and all(size >= 0 for entry in config.outputs for size in entry.dims)
            )
        )
        return NoBatching(times if may_group else None)
    return DynamicBatcher(
        config.max_batch_size,
        batching.preferred_batch_sizes or (config.max_batch_size,),
        batching.max_queue_delay_microseconds * 1000,
    )


NOTHING = BatchDecision(0)
"""All that waited was hopeless."""

_FEW = 64
"""Requests in a queue of which it is checked whether all have time again."""


class Triage:
    """Asked in the policy's place while requests with deadlines wait."""

    def __init__(self, queue: RequestQueue, policy: BatchPolicy, times: ComputeTimes, keeps_order: bool) -> None:
        """`times`: of the model. `keeps_order`: whether no request may run before one that came earlier."""
        self.times = times
        self.lost: list[InferRequest] = []
        """Taken out of the queue for lack of time; for the scheduler to answer."""
        self._queue = queue
        self._policy = policy
        self._keeps_order = keeps_order
        self._run_seconds = 0.0
        """Of a batch as large as what waits allows."""
        self._calm_until = math.inf
        """Before this, by time.monotonic(), no request that waits has used half of its time, and the policy's choice is
        the one to make."""

    def is_hopeless(self, entry: InferRequest, now: float) -> bool:
        """Whether it would end too late even if an instance took it at once, alone. `now` is time.monotonic()."""
        deadline = entry.deadline
        return deadline is not None and deadline <= now + self.times.of(entry.plan.batch_size)

    def note(self, entry: InferRequest) -> None:
        """A request with a deadline has come into the queue."""
        latest = half_time(entry, self.times.of(self._policy.largest))
        if latest < self._calm_until:
            self._calm_until = latest

    def decide(self, now_ns: int, batches_before: int) -> BatchDecision:
        """As the policy decides, but of what can end in time; the hopeless are taken out. Nothing may be left then.
        `batches_before`: those that the instance has in flight already."""
        now = now_ns / 1e9
        if now < self._calm_until:
            decision = self._policy.decide(self._queue, now_ns)
            if decision.request_count:
                return decision
        decision = self._choose(now_ns, now, batches_before)
        if len(self._queue) <= _FEW and not any(level.newest_first or level.has_lost for level in self._queue.levels()):
            run_seconds = self.times.of(self._policy.largest)
            self._calm_until = min(
                (half_time(entry, run_seconds) for entry in self._queue if entry.deadline is not None),
                default=math.inf,
            )
        return decision

    def _choose(self, now_ns: int, now: float, batches_before: int) -> BatchDecision:
        queue = self._queue
        self._run_seconds = self.times.of(min(len(queue), self._policy.largest))
        begins = now + batches_before * self._run_seconds
        for level in () if self._keeps_order else queue.levels():
            # The oldest would not come up any more once the newest are first. The last may be run as a probe.
            while len(level.dated) > 1 and self.is_hopeless(level.dated[0], begins):
                self._lose(level.dated[0])
            if level.dated:
                level.newest_first = level.has_lost or half_time(level.dated[0], self.times.of(1)) < now
        while queue:
            decision = self._policy.decide(queue, now_ns)
            members = list(islice(queue, decision.request_count or None))
            lost = [entry for entry in members if self.is_hopeless(entry, begins)] or self._overdue(members, begins)
            if not lost:
                return self._fitting(decision, members, begins)
            if len(lost) == len(queue) and not batches_before and self.times.may_probe(now_ns):
                return BatchDecision(1, is_full=True)
            for entry in lost:
                self._lose(entry)
        return NOTHING

    def _lose(self, entry: InferRequest) -> None:
        self._queue.lose(entry)
        self.lost.append(entry)

    def _overdue(self, members: Sequence[InferRequest], begins: float) -> list[InferRequest]:
        """Where the order is kept: those of the next batch that others, who wait behind them, are to replace."""
        surplus = len(self._queue) - len(members)
        if not self._keeps_order or not surplus:
            return []
        overdue = []
        for entry in members:
            deadline = entry.deadline
            if deadline is None:
                continue
            # The batch would have to be smaller to end in time; or it has waited too long while others are lost.
            if deadline <= begins + self._run_seconds or (
                self._queue.level_of(entry).has_lost and half_time(entry, self._run_seconds) < begins
            ):
                overdue.append(entry)
        return overdue[:surplus]

    def _fitting(self, decision: BatchDecision, members: Sequence[InferRequest], begins: float) -> BatchDecision:
        """The decision, for as many of the first members as end in time together; at least one."""
        rows = 0
        soonest = math.inf
        for count, entry in enumerate(members):
            rows += entry.plan.batch_size
            soonest = min(soonest, entry.deadline or math.inf)
            if count and begins + self.times.of(rows) > soonest:
                return BatchDecision(count, is_full=True, is_grouped=decision.is_grouped and count > 1)
        if decision.request_count or soonest == math.inf:
            return decision
        # It waits for company: for no longer than half of the time that it has.
        latest = min(half_time(entry, self._run_seconds) for entry in members if entry.deadline is not None)
        if latest <= begins:
            return BatchDecision(len(members))
        return BatchDecision(0, min(decision.decide_again_at_ns, int(latest * 1e9)))


def half_time(entry: InferRequest, run_seconds: float) -> float:
    """When a request that runs for so long has waited for half of the time that it may."""
    deadline = entry.deadline
    assert deadline is not None, "it may wait for ever"
    came = entry.queue_start_ns / 1e9
    return came + (deadline - run_seconds - came) / 2
