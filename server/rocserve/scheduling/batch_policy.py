"""Decides which waiting requests run next, and which of them together.

`Triage` chooses among requests with deadlines, so that an overloaded model still answers as many in time as it can.

A queue in order of arrival keeps every request waiting until close to its deadline. Under sustained overload each
request that runs ends too late, and almost none is answered in time. Dropping the requests that cannot end in time is
not enough: the others still end so close to their deadlines that the way to the client or a slightly slower batch makes
them late. Therefore:

- A request that cannot end by its deadline, even if its batch were as fast as the fastest of the model's last batches
  (compute_times), is dropped when its turn comes. Clockwork (Gujarati et al., OSDI 2020) predicts execution times to
  refuse requests in the same way. A request that may be in time is not dropped for a prediction: an idle instance runs
  it, and measures again. While all are dropped, one runs now and then, for the same reason.
- A batch grows only as long as its most urgent request still ends in time, by the time that most batches stay below.
- While a priority level keeps requests waiting for too long, it serves the newest first: adaptive LIFO, of Facebook's
  "Fail at Scale" (Maurer, ACM Queue 13(8), 2015). "Too long" is a number of milliseconds there and in CoDel (Nichols
  and Jacobson, ACM Queue 10(5), 2012; RFC 8289). Here it is half of the time that the oldest request may wait for its
  instance, because models take from microseconds to minutes. A request that was dropped for lack of time since the
  level was last empty has the same effect. If the order must be kept, the requests that waited too long are dropped
  instead, as CoDel drops at the head of the queue, as long as others wait after them.
- Requests without deadlines keep their order and are never dropped. Under overload they take turns with the others.

The simulation had deadlines of 60 ms, 200 ms and both, single arrivals and bursts of ten, constant and varying compute
times of 10 ms, with and without batches, at ten times the model's capacity. Of the requests that the model could serve,
order of arrival answered 0 to 59 %, and 0 to 98 % when hopeless requests were dropped; earliest deadline first with
hopeless requests dropped 0 to 56 %; newest first 95 % and more. At 0.9 times the capacity, always newest first loses up
to 5 %, the present rules half of that.

Concurrency limits (Envoy's adaptive concurrency; DAGOR, Zhou et al., SoCC 2018) bound the queue by the latency of all
requests and know no deadlines: requests with short deadlines would be lost behind those with long ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, islice, zip_longest
from operator import attrgetter
from typing import NamedTuple, Protocol

from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest, RequestPlan
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.queue import RequestQueue


class BatchDecision(NamedTuple):
    """How many requests run now, or else when to decide again."""

    request_count: int
    """They are the first of the queue, or of `chosen`."""
    decide_again_at_ns: int = 0
    """time.monotonic_ns() at which the oldest request has waited long enough; 0 = no need."""
    is_full: bool = False
    """No later request could join the batch."""
    is_grouped: bool = False
    """The requests go to the worker in one message, but the engine runs them one after another."""
    chosen: Sequence[InferRequest] = ()
    """The requests of the batch, if not the first of the queue; those that wait together if none runs now."""
    missing: int = 0
    """If the batch is not full: about how many more requests must wait before another decision may be."""

    def members(self, queue: Iterable[InferRequest]) -> Sequence[InferRequest]:
        """Return the requests of the batch; all that wait for it if none runs now."""
        count = self.request_count or None
        return self.chosen[:count] if self.chosen else list(islice(queue, count))


_ONE = BatchDecision(1, is_full=True)

LARGEST_GROUP = 16
LONGEST_GROUP_NS = 500_000
"""The longest engine time of a group, because the answer to its first request waits for the last."""


CALM_REQUESTS = 1000
"""Number of requests in a row that must have been quick, and have left the worker alive, before others are grouped: a
request that is slow or ends the worker takes those before it in its group with it."""


class NoBatching:
    """Runs one request at a time, in order of arrival. If the engine takes only a moment for each request, waiting
    requests are grouped: they go to the worker in one message and still run one by one there. The round trip to the
    worker costs more than such an engine's work, and then happens once for all of them."""

    largest = 1

    def __init__(self, times: ComputeTimes | None) -> None:
        self._times = times

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        if queue.count == 1 or self._times is None:
            return _ONE
        _, alike = next(groupby(islice(queue, _longest_group(self._times)), attrgetter("plan")))
        return _group(len([*alike]))


def _longest_group(times: ComputeTimes) -> int:
    if times.calm_requests < CALM_REQUESTS:
        return 1
    return max(1, min(LARGEST_GROUP, LONGEST_GROUP_NS // max(times.request_ns, 1)))


def _group(count: int) -> BatchDecision:
    return BatchDecision(count, is_full=True, is_grouped=True) if count > 1 else _ONE


class DynamicBatcher:
    """Joins compatible requests to batches of up to max_batch_size rows, by Triton's rules; a request is never split. A
    batch ends at the largest preferred size that the requests reach in their order. If they skip all preferred sizes,
    it ends before the request that exceeds the largest one. A batch that reaches no preferred size runs unchanged if
    there is no delay, if it cannot grow, or if its oldest request has waited for the delay. After the delay a batch is
    as large as possible. Without a delay, requests that share no batch, such as texts of different lengths, are grouped
    as by NoBatching."""

    def __init__(
        self,
        max_batch_size: int,
        preferred_batch_sizes: tuple[int, ...],
        max_queue_delay_ns: int,
        times: ComputeTimes | None = None,
    ) -> None:
        """`preferred_batch_sizes`: at least one. `times`: the model's; None = no groups."""
        self._max_batch_size = self.largest = max_batch_size
        self._preferred = frozenset(preferred_batch_sizes)
        self._largest_preferred = max(preferred_batch_sizes)
        self._delay_ns = max_queue_delay_ns
        self._times = None if max_queue_delay_ns else times

    def decide(self, queue: Iterable[InferRequest], now_ns: int) -> BatchDecision:
        rows = count = preferred_count = 0
        most, largest_preferred, preferred = self._max_batch_size, self._largest_preferred, self._preferred
        first: RequestPlan | None = None
        oldest_ns = now_ns
        can_grow = True
        for request in queue:
            plan = request.plan
            total = rows + plan.batch_size
            if first is None:
                first = plan
            else:
                if total > largest_preferred and not preferred_count:
                    preferred_count = count
                if total > most:
                    can_grow = False
                    break
                if plan is not first and plan.batch_key != first.batch_key:
                    if count == 1 and self._times is not None:
                        return self._group_alone(queue, self._times)
                    can_grow = False
                    break
            rows = total
            count += 1
            if request.queue_start_ns < oldest_ns:
                oldest_ns = request.queue_start_ns
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

    @staticmethod
    def _group_alone(queue: Iterable[InferRequest], times: ComputeTimes) -> BatchDecision:
        """Group the first requests, of which each would otherwise be a batch."""
        longest = _longest_group(times)
        waiting = [*islice(queue, longest + 1)]
        first, count = waiting[0], 0
        for one, after in zip_longest(waiting[:longest], waiting[1:]):
            is_like_first = one.level == first.level and one.plan.batch_size == first.plan.batch_size
            if not is_like_first or (after is not None and after.plan.batch_key == one.plan.batch_key):
                break
            count += 1
        return _group(count)


class BatchPolicy(Protocol):
    """Decides which requests of a model run together."""

    @property
    def largest(self) -> int:
        """The most work (RequestPlan.work) that is run together; a single request may have more."""

    def decide(self, queue: RequestQueue, now_ns: int) -> BatchDecision:
        """Decide for a free instance; the queue must not be empty."""


def batch_policy(config: ModelConfig, times: ComputeTimes) -> NoBatching | DynamicBatcher:
    """Return the policy that a model's configuration asks for."""
    batching = config.dynamic_batching
    if batching is None or config.max_batch_size == 0:
        return NoBatching(times if config.max_batch_size > 0 else None)
    return DynamicBatcher(
        config.max_batch_size,
        batching.preferred_batch_sizes or (config.max_batch_size,),
        batching.max_queue_delay_microseconds * 1000,
        times,
    )


NOTHING = BatchDecision(0)
"""The decision if all waiting requests were hopeless."""


class Triage:
    """Decides instead of the policy while requests with deadlines wait, and drops hopeless ones."""

    def __init__(self, queue: RequestQueue, policy: BatchPolicy, times: ComputeTimes, keeps_order: bool) -> None:
        """`times`: the model's. `keeps_order`: no request may run before an earlier request."""
        self.times = times
        self.dropped: list[InferRequest] = []
        """Requests that were dropped for lack of time; the scheduler must answer them."""
        self._queue = queue
        self._policy = policy
        self._keeps_order = keeps_order
        self._run_seconds = 0.0
        """The estimated time of the largest batch that the waiting requests allow."""
        self._policy_alone_until = math.inf
        """time.monotonic() before which no waiting request has used half of its time, so the policy decides alone."""

    def is_hopeless(self, request: InferRequest, now: float) -> bool:
        """Return whether a request would end too late even if it began to run alone at `now`, in time.monotonic(), and
        took no longer than the fastest of the last batches."""
        deadline = request.deadline
        return deadline is not None and deadline <= now + self.times.at_best(request.plan.work)

    def note(self, request: InferRequest) -> None:
        latest = half_time(request, self.times.of(self._policy.largest))
        if latest < self._policy_alone_until:
            self._policy_alone_until = latest

    def decide(self, now_ns: int, batches_before: int) -> BatchDecision:
        """Drop hopeless requests, then decide among the rest, perhaps none, as the policy does. `batches_before`:
        batches that the instance runs before it begins the next."""
        now = now_ns / 1e9
        self.times.review(now_ns)
        if now < self._policy_alone_until:
            decision = self._policy.decide(self._queue, now_ns)
            if decision.request_count:
                return decision
        decision = self._choose(now_ns, now, batches_before)
        if len(self._queue) <= 64 and not any(
            level.newest_first or level.has_dropped for level in self._queue.levels()
        ):
            run_seconds = self.times.of(self._policy.largest)
            self._policy_alone_until = min(
                (half_time(request, run_seconds) for request in self._queue if request.deadline is not None),
                default=math.inf,
            )
        return decision

    def _choose(self, now_ns: int, now: float, batches_before: int) -> BatchDecision:
        queue = self._queue
        self._run_seconds = self.times.of(min(len(queue), self._policy.largest))
        begins = now + batches_before * self._run_seconds
        for level in () if self._keeps_order else queue.levels():
            # With the newest first, the oldest would never come up again. The last one may run as a probe.
            while len(level.overtakable) > 1 and self.is_hopeless(level.overtakable[0], begins):
                self._drop(level.overtakable[0])
            if level.overtakable:
                level.newest_first = level.has_dropped or half_time(level.overtakable[0], self.times.of(1)) < now
        while queue:
            decision = self._policy.decide(queue, now_ns)
            members = decision.members(queue)
            late = [request for request in members if self.is_hopeless(request, begins)] or self._overdue(
                members, begins
            )
            if not late:
                return self._fitting(decision, members, begins)
            if len(late) == len(queue) and not batches_before and self.times.may_probe(now_ns):
                return BatchDecision(1, is_full=True)
            for request in late:
                self._drop(request)
        return NOTHING

    def _drop(self, request: InferRequest) -> None:
        self._queue.remove(request)
        self.dropped.append(request)

    def _overdue(self, members: Sequence[InferRequest], begins: float) -> list[InferRequest]:
        """Return the requests of the next batch to drop in favour of later requests, if order must be kept."""
        surplus = len(self._queue) - len(members)
        if not self._keeps_order or not surplus:
            return []
        overdue = []
        for request in members:
            deadline = request.deadline
            if deadline is None:
                continue
            # Either the batch would have to be smaller, or the request has waited too long while others are dropped.
            if deadline <= begins + self._run_seconds or (
                self._queue.level_of(request).has_dropped and half_time(request, self._run_seconds) < begins
            ):
                overdue.append(request)
        return overdue[:surplus]

    def _fitting(self, decision: BatchDecision, members: Sequence[InferRequest], begins: float) -> BatchDecision:
        """Return the decision for as many of the first requests as end in time together, at least one."""
        work = 0
        soonest = math.inf
        for count, request in enumerate(members):
            work += request.plan.work
            soonest = min(soonest, request.deadline or math.inf)
            if count and begins + self.times.of(work) > soonest:
                is_grouped = decision.is_grouped and count > 1
                return BatchDecision(count, is_full=True, is_grouped=is_grouped, chosen=decision.chosen)
        if decision.request_count or soonest == math.inf:
            return decision
        # The batch waits to grow, at most until one of its requests has used half of its time.
        latest = min(half_time(request, self._run_seconds) for request in members if request.deadline is not None)
        if latest <= begins:
            return BatchDecision(len(members), chosen=decision.chosen)
        return BatchDecision(0, min(decision.decide_again_at_ns, int(latest * 1e9)), chosen=decision.chosen)


def half_time(request: InferRequest, run_seconds: float) -> float:
    """Return when a request that runs for `run_seconds` has used half of the time that it may wait."""
    deadline = request.deadline
    assert deadline is not None, "only requests with deadlines have a half time"
    came = request.queue_start_ns / 1e9
    return came + (deadline - run_seconds - came) / 2
