"""The queue of a model version: priority levels, each with its policy, all within one bound."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest

_ARRIVAL = attrgetter("queue_start_ns")


class Level:
    """Requests in order of arrival, then those whose time passed but may run late (DELAY)."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.waiting: deque[InferRequest] = deque()
        self.dated: deque[InferRequest] = deque()
        """Those that may be overtaken by newer ones, in order of arrival as well."""
        self.delayed: deque[InferRequest] = deque()
        self.newest_first = False
        """Those newest ones run first, in turns with what waits otherwise."""
        self.has_lost = False
        """One of them was lost for lack of time, since there were none last."""
        self._dated_turn = True

    def __len__(self) -> int:
        return len(self.waiting) + len(self.dated) + len(self.delayed)

    def __iter__(self) -> Iterator[InferRequest]:
        """In the order in which they would run."""
        first: Iterable[InferRequest]
        if not self.dated:
            first = self.waiting
        elif not self.waiting:
            first = reversed(self.dated) if self.newest_first else self.dated
        elif self.newest_first:
            first = self._in_turns()
        else:
            first = heapq.merge(self.dated, self.waiting, key=_ARRIVAL)
        return chain(first, self.delayed)

    def _in_turns(self) -> Iterator[InferRequest]:
        first, second = reversed(self.dated), iter(self.waiting)
        if not self._dated_turn:
            first, second = second, first
        for one in first:
            yield one
            other = next(second, None)
            if other is None:
                break
            yield other
        yield from first
        yield from second

    def push_back(self, entry: InferRequest) -> None:
        """One that was taken but not run is the next again."""
        if entry.dated and self.newest_first:
            self.dated.append(entry)
        else:
            (self.dated if entry.dated else self.waiting).appendleft(entry)

    def take(self, count: int, taken: list[InferRequest]) -> None:
        """Add the next ones to those that were taken, up to `count` in all."""
        waiting, dated = self.waiting, self.dated
        while dated and len(taken) < count:
            if not waiting:
                entry = dated.pop() if self.newest_first else dated.popleft()
            elif self.newest_first:
                is_turn, self._dated_turn = self._dated_turn, not self._dated_turn
                entry = dated.pop() if is_turn else waiting.popleft()
            else:
                entry = (dated if dated[0].queue_start_ns <= waiting[0].queue_start_ns else waiting).popleft()
            taken.append(entry)
            self._forget_overload()
        for source in (waiting, self.delayed):
            room = count - len(taken)
            if len(source) <= room:
                taken += source
                source.clear()
            else:
                taken += [source.popleft() for _ in range(room)]

    def remove(self, entry: InferRequest) -> None:
        """Take out one that is here."""
        for entries in (self.dated if entry.dated else self.waiting, self.delayed):
            if entries and entries[-1] is entry:
                # Where the newest are first, so that a long queue is not searched.
                entries.pop()
                self._forget_overload()
                return
            try:
                entries.remove(entry)
            except ValueError:
                continue
            self._forget_overload()
            return
        raise ValueError("no request of this level")

    def delay(self, entry: InferRequest) -> None:
        """One that is here runs after all others from now on."""
        self.remove(entry)
        self.delayed.append(entry)

    def _forget_overload(self) -> None:
        if not self.dated:
            self.newest_first = self.has_lost = False


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The server's own bound on what waits for one model version."""

    max_requests: int = 10_000
    max_bytes: int = 4 << 30


class QueueFull(ServeError):
    """There is no room for one more request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(StatusCode.UNAVAILABLE, request_prefix([request_id]) + "Exceeds maximum queue size")


class RequestQueue:
    def __init__(self, batching: DynamicBatching | None, limits: QueueLimits) -> None:
        settings = batching or DynamicBatching()
        self._limits = limits
        self._level_count = settings.priority_levels
        self._default_level = settings.default_priority_level if settings.priority_levels else 0
        self._default_policy = settings.default_queue_policy
        self._policies = settings.priority_queue_policy if settings.priority_levels else {}
        self._levels: dict[int, Level] = {}
        """Those that requests wait in, and the default one, by number."""
        self._order: list[int] = []
        """Their numbers, ascending: the highest priority first."""
        # A model whose config says nothing of time-outs honours the request's own.
        self._has_policy = settings.default_queue_policy != QueuePolicy() or bool(settings.priority_queue_policy)
        self.may_be_overtaken = self._has_policy or bool(settings.priority_levels)
        """Requests are to be run, refused or overtaken by what the queue knows of them: none may leave it early. Where
        they are not, `admit` has nothing to say of those without a deadline and a time-out."""
        self._nbytes = 0
        self.count = 0
        """How many requests there are; as `len`, without a call."""
        self.deadline_count = 0
        """How many of the requests have a deadline."""

    def __len__(self) -> int:
        return self.count

    def admit(self, entry: InferRequest, now: float) -> None:
        """Set the request's level and expiry by the model's policies. `now` is time.monotonic(). The expiry is the
        earlier of the client's deadline and the queue's time-out."""
        plan = entry.plan
        deadline = entry.expires_at = entry.deadline
        if deadline is not None:
            entry.dated = not entry.in_turn
        if not self.may_be_overtaken and not plan.timeout_microseconds:
            return
        if self._level_count:
            entry.level = plan.priority if 1 <= plan.priority <= self._level_count else self._default_level
        timeout = asked = plan.timeout_microseconds
        if self._has_policy:
            policy = self._policy(entry.level)
            timeout = policy.default_timeout_microseconds
            if policy.allow_timeout_override and asked and (timeout == 0 or asked < timeout):
                timeout = asked
        if timeout:
            limit = now + timeout / 1e6
            entry.expires_at = limit if entry.expires_at is None else min(entry.expires_at, limit)

    def push(self, entry: InferRequest) -> None:
        """Take a request in. Raises: QueueFull: its level, or the whole queue, is full."""
        if self.count >= self._limits.max_requests or self._nbytes + entry.nbytes > self._limits.max_bytes:
            raise QueueFull(entry.id)
        level = self._levels.get(entry.level)
        if level is None:
            level = self._open(entry.level)
        limit = level.policy.max_queue_size
        if limit and len(level) >= limit:
            raise QueueFull(entry.id)
        (level.dated if entry.dated else level.waiting).append(entry)
        entry.waiting = True
        self.count += 1
        self._nbytes += entry.nbytes
        if entry.deadline is not None:
            self.deadline_count += 1

    def push_back(self, entries: list[InferRequest]) -> None:
        """Put requests that were taken but not run back to the front, in their order."""
        for entry in reversed(entries):
            (self._levels[entry.level] if entry.level in self._levels else self._open(entry.level)).push_back(entry)
            entry.waiting = True
            self.count += 1
            self._nbytes += entry.nbytes
            self.deadline_count += entry.deadline is not None

    def take(self, count: int) -> list[InferRequest]:
        """The next `count` requests in order of priority and arrival, at most as many as there are."""
        taken: list[InferRequest] = []
        # A copy: levels may be closed meanwhile.
        for number in self._order.copy():
            self._levels[number].take(count, taken)
            if number != self._default_level:
                self._close_if_empty(number)
            if len(taken) == count:
                break
        self.count -= len(taken)
        for entry in taken:
            entry.waiting = False
            self._nbytes -= entry.nbytes
            if entry.deadline is not None:
                self.deadline_count -= 1
        return taken

    def remove(self, entry: InferRequest) -> bool:
        """Take out one request, wherever it is; False when it has left the queue already."""
        if not entry.waiting:
            return False
        self._levels[entry.level].remove(entry)
        entry.waiting = False
        self.count -= 1
        self._nbytes -= entry.nbytes
        self.deadline_count -= entry.deadline is not None
        if entry.level != self._default_level:
            self._close_if_empty(entry.level)
        return True

    def expire(self, entry: InferRequest, now: float) -> bool:
        """The time of a request that waits here has passed: take it out; or, with the action DELAY, let it run after
        the others of its level, and give False. It may expire again then, when its client's deadline passes. A request
        whose client itself has given up is taken out whatever the action."""
        level = self._levels[entry.level]
        deadline = entry.deadline
        if level.policy.timeout_action is TimeoutAction.DELAY and (deadline is None or deadline > now):
            level.delay(entry)
            entry.expires_at = deadline
            return False
        self.lose(entry)
        return True

    def lose(self, entry: InferRequest) -> bool:
        """As `remove`, of one that has no time left."""
        if entry.waiting:
            self._levels[entry.level].has_lost = True
        return self.remove(entry)

    def __iter__(self) -> Iterator[InferRequest]:
        """In the order in which they would run."""
        return chain.from_iterable(map(self._levels.__getitem__, self._order))

    def levels(self) -> Iterator[Level]:
        """Those that there are, the highest first."""
        return map(self._levels.__getitem__, self._order)

    def level_of(self, entry: InferRequest) -> Level:
        """Of a request that waits here."""
        return self._levels[entry.level]

    def _policy(self, level: int) -> QueuePolicy:
        return self._policies.get(level, self._default_policy)

    def _open(self, number: int) -> Level:
        level = self._levels[number] = Level(self._policy(number))
        insort(self._order, number)
        return level

    def _close_if_empty(self, number: int) -> None:
        """A configuration may allow 2^64 levels."""
        if not self._levels[number]:
            del self._levels[number]
            del self._order[bisect_left(self._order, number)]
