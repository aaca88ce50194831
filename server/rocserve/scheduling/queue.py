"""Queues the requests of one model version by priority level, within one bound on their number and bytes."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from operator import attrgetter

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.exchange import QUEUED, RECEIVED, RUNNING
from rocserve.core.model_config import DynamicBatching, QueuePolicy
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest

ARRIVAL = attrgetter("queue_start_ns")

Refused = tuple[InferRequest, ServeError]
"""A request that must not run, and the error for its client."""


class Level:
    """Keeps the waiting requests of one priority level in order of arrival."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.waiting: deque[InferRequest] = deque()
        self.overtakable: deque[InferRequest] = deque()
        """Requests with a deadline, which newer ones may overtake, in order of arrival."""
        self.delayed: deque[InferRequest] = deque()
        """Requests that timed out under the action DELAY; they run after all others of the level."""
        self.newest_first = False
        """`overtakable` is served from its newest request, in turns with `waiting`."""
        self.has_dropped = False
        """A request was dropped for lack of time since `overtakable` was last empty."""
        self._overtakable_turn = True

    def __len__(self) -> int:
        return len(self.waiting) + len(self.overtakable) + len(self.delayed)

    def __iter__(self) -> Iterator[InferRequest]:
        """Yield the requests in the order in which they would run."""
        first: Iterable[InferRequest]
        if not self.overtakable:
            first = self.waiting
        elif not self.waiting:
            first = reversed(self.overtakable) if self.newest_first else self.overtakable
        elif self.newest_first:
            first = self._in_turns()
        else:
            first = heapq.merge(self.overtakable, self.waiting, key=ARRIVAL)
        return chain(first, self.delayed)

    def _in_turns(self) -> Iterator[InferRequest]:
        first, second = reversed(self.overtakable), iter(self.waiting)
        if not self._overtakable_turn:
            first, second = second, first
        for pair in zip_longest(first, second):
            for request in pair:
                if request is not None:
                    yield request

    def push_back(self, request: InferRequest) -> None:
        if request.may_be_overtaken and self.newest_first:
            self.overtakable.append(request)
        else:
            (self.overtakable if request.may_be_overtaken else self.waiting).appendleft(request)

    def take(self, count: int, next_requests: list[InferRequest]) -> None:
        """Move requests to `next_requests` in the order in which they run, until it has `count`."""
        if self.newest_first or (self.overtakable and self.waiting):
            for request in list(islice(self, count - len(next_requests))):
                self._pop(request)
                next_requests.append(request)
            return
        for source in (self.waiting, self.overtakable, self.delayed):
            room = count - len(next_requests)
            if len(source) <= room:
                next_requests += source
                source.clear()
            else:
                next_requests += [source.popleft() for _ in range(room)]
        self._forget_overload()

    def _pop(self, request: InferRequest) -> None:
        """Remove the request that runs next, which is the first or last of its kind."""
        if self.newest_first and self.overtakable and self.waiting:
            self._overtakable_turn = not self._overtakable_turn
        for requests in (self.waiting, self.overtakable, self.delayed):
            if requests and requests[0] is request:
                requests.popleft()
                break
            if requests and requests[-1] is request:
                requests.pop()
                break
        self._forget_overload()

    def take_chosen(self, chosen: set[InferRequest]) -> None:
        """Remove those of the requests that are here."""
        if self.newest_first and self.overtakable and self.waiting:
            # The oldest of the others begins the next batch.
            self._overtakable_turn = not self._overtakable_turn
        for requests in (self.waiting, self.overtakable, self.delayed):
            passed: list[InferRequest] = []
            while requests and chosen:
                request = requests.popleft()
                if request in chosen:
                    chosen.discard(request)
                else:
                    passed.append(request)
            requests.extendleft(reversed(passed))
        self._forget_overload()

    def remove(self, request: InferRequest) -> None:
        """Remove a request. Raises ValueError if it is not here."""
        requests = self.overtakable if request.may_be_overtaken else self.waiting
        if requests and requests[-1] is request:
            # When the newest requests run first, this spares the search of a long queue.
            requests.pop()
        else:
            try:
                requests.remove(request)
            except ValueError:
                self.delayed.remove(request)
        self._forget_overload()

    def _forget_overload(self) -> None:
        if not self.overtakable:
            self.newest_first = self.has_dropped = False


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds the requests that wait for one model version, regardless of its configuration."""

    max_requests: int = 10_000
    max_bytes: int = 4 << 30


class QueueFull(ServeError):
    """The error for a request that finds its queue full."""

    def __init__(self, request_id: str) -> None:
        super().__init__(StatusCode.UNAVAILABLE, request_prefix([request_id]) + "Exceeds maximum queue size")
        self.is_overload = True


class RequestQueue:
    def __init__(self, batching: DynamicBatching | None, limits: QueueLimits) -> None:
        settings = batching or DynamicBatching()
        self._limits = limits
        self._level_count = settings.priority_levels
        self._default_level = settings.default_priority_level if settings.priority_levels else 0
        self._default_policy = settings.default_queue_policy
        self._policies = settings.priority_queue_policy if settings.priority_levels else {}
        self._levels: dict[int, Level] = {}
        """Level number -> level in which requests wait. The default level stays once it was used."""
        self._order: list[int] = []
        """The numbers of `_levels`, ascending: the highest priority first."""
        # A model whose configuration sets no timeout honours the request's timeout.
        self._has_queue_policy = settings.default_queue_policy != QueuePolicy() or bool(settings.priority_queue_policy)
        self.has_policies = self._has_queue_policy or bool(settings.priority_levels)
        """Policies or priority levels may refuse or reorder waiting requests, so none may be sent ahead. If False,
        `admit` changes only requests with a deadline or a timeout."""
        self._nbytes = 0
        self.count = 0
        """The same as `len(self)`, but without a call."""
        self.deadline_count = 0

    def __len__(self) -> int:
        return self.count

    def admit(self, request: InferRequest, now: float) -> None:
        """Set a request's level and expiry: the client's deadline or, if earlier, the timeout. `now`:
        time.monotonic()."""
        plan = request.plan
        deadline = request.expires_at = request.deadline
        if deadline is not None:
            request.may_be_overtaken = not request.in_turn
        if not self.has_policies and not plan.timeout_microseconds:
            return
        if self._level_count:
            request.level = plan.priority if 1 <= plan.priority <= self._level_count else self._default_level
        timeout = asked = plan.timeout_microseconds
        if self._has_queue_policy:
            policy = self._policy(request.level)
            timeout = policy.default_timeout_microseconds
            if policy.allow_timeout_override and asked and (timeout == 0 or asked < timeout):
                timeout = asked
        if timeout:
            limit = now + timeout / 1e6
            request.expires_at = limit if request.expires_at is None else min(request.expires_at, limit)

    def push(self, request: InferRequest) -> None:
        """Add a request. Raises QueueFull if its level or the whole queue is full."""
        if self.count >= self._limits.max_requests or self._nbytes + request.nbytes > self._limits.max_bytes:
            raise QueueFull(request.id)
        level = self._levels.get(request.level)
        if level is None:
            level = self._open(request.level)
        limit = level.policy.max_queue_size
        if limit and len(level) >= limit:
            raise QueueFull(request.id)
        (level.overtakable if request.may_be_overtaken else level.waiting).append(request)
        exchange = request.exchange
        if exchange.state is RECEIVED:  # the usual way takes no call
            exchange.state = QUEUED
        else:
            exchange.enter(QUEUED)
        self.count += 1
        self._nbytes += request.nbytes
        if request.deadline is not None:
            self.deadline_count += 1

    def push_back(self, requests: list[InferRequest]) -> None:
        """Put requests that were taken but not run back at the front, in their order."""
        for request in reversed(requests):
            (self._levels[request.level] if request.level in self._levels else self._open(request.level)).push_back(
                request
            )
            request.exchange.enter(QUEUED)
            self.count += 1
            self._nbytes += request.nbytes
            self.deadline_count += request.deadline is not None

    def take(self, count: int) -> list[InferRequest]:
        """Remove and return the next `count` requests in the order in which they run, fewer if fewer wait."""
        next_requests: list[InferRequest] = []
        # A copy, because the loop may close levels.
        for number in self._order.copy():
            self._levels[number].take(count, next_requests)
            if number != self._default_level:
                self._close_if_empty(number)
            if len(next_requests) == count:
                break
        self._note_taken(next_requests)
        return next_requests

    def take_chosen(self, requests: Sequence[InferRequest]) -> list[InferRequest]:
        """Remove these requests, wherever they wait, and return them."""
        chosen = set(requests)
        for number in {request.level for request in requests}:
            self._levels[number].take_chosen(chosen)
            if number != self._default_level:
                self._close_if_empty(number)
        self._note_taken(requests)
        return [*requests]

    def _note_taken(self, requests: Sequence[InferRequest]) -> None:
        self.count -= len(requests)
        for request in requests:
            exchange = request.exchange
            if exchange.state is QUEUED:  # the usual way takes no call
                exchange.state = RUNNING
            else:
                exchange.enter(RUNNING)
            self._nbytes -= request.nbytes
            if request.deadline is not None:
                self.deadline_count -= 1

    def remove(self, request: InferRequest) -> None:
        """Remove a waiting request, which the caller refuses: its time has passed, or its client has left."""
        level = self._levels[request.level]
        # A client may leave at its deadline before the server notices: the request counts as dropped for lack of time.
        level.has_dropped |= request.expires_at is not None
        level.remove(request)
        self.count -= 1
        self._nbytes -= request.nbytes
        self.deadline_count -= request.deadline is not None
        if request.level != self._default_level:
            self._close_if_empty(request.level)

    def delay(self, request: InferRequest) -> bool:
        """With the action DELAY, let a request whose timeout has passed run after the rest of its level, unless a
        worker has it; it expires again at its client's deadline. Returns whether the action is DELAY."""
        if not self._policy(request.level).delays_timed_out:
            return False
        if request.exchange.state is QUEUED:
            level = self._levels[request.level]
            level.remove(request)
            level.delayed.append(request)
        request.expires_at = request.deadline
        return True

    def __iter__(self) -> Iterator[InferRequest]:
        return chain.from_iterable(map(self._levels.__getitem__, self._order))

    def levels(self) -> Iterator[Level]:
        return map(self._levels.__getitem__, self._order)

    def level_of(self, request: InferRequest) -> Level:
        return self._levels[request.level]

    def _policy(self, level: int) -> QueuePolicy:
        return self._policies.get(level, self._default_policy)

    def _open(self, number: int) -> Level:
        level = self._levels[number] = Level(self._policy(number))
        insort(self._order, number)
        return level

    def _close_if_empty(self, number: int) -> None:
        """Delete a level without requests, because a configuration may allow 2^64 levels."""
        if not self._levels[number]:
            del self._levels[number]
            del self._order[bisect_left(self._order, number)]
