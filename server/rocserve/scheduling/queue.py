"""The queue of a model version: priority levels, each with its policy, all within one bound.

Not thread-safe: the scheduler that owns it calls it under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import DynamicBatching, QueuePolicy, TimeoutAction
from rocserve.core.request_prefix import request_prefix
from rocserve.scheduling.entry import QueuedRequest


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The server's own bound on what waits for one model version."""

    max_requests: int = 10_000
    max_bytes: int = 4 << 30


class QueueFull(ServeError):
    """There is no room for one more request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(StatusCode.UNAVAILABLE, request_prefix([request_id]) + "Exceeds maximum queue size")


class _Level:
    """One priority level: requests in order of arrival, then those whose time passed but may run late (DELAY)."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.waiting: deque[QueuedRequest] = deque()
        self.delayed: deque[QueuedRequest] = deque()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)


class RequestQueue:
    def __init__(self, batching: DynamicBatching | None, limits: QueueLimits) -> None:
        settings = batching or DynamicBatching()
        self._limits = limits
        self._default_level = settings.default_priority_level if settings.priority_levels else 0
        numbers = range(1, settings.priority_levels + 1) if settings.priority_levels else range(1)
        self._levels = {
            number: _Level(settings.priority_queue_policy.get(number, settings.default_queue_policy))
            for number in numbers
        }
        # A model whose config says nothing of time-outs honours the request's own.
        self._has_policy = settings.default_queue_policy != QueuePolicy() or bool(settings.priority_queue_policy)
        self._is_plain = not self._has_policy and not settings.priority_levels
        self.may_be_overtaken = self._has_policy or bool(settings.priority_levels)
        """Requests are to be run, refused or overtaken by what the queue knows of them: none may leave it early."""
        self._count = 0
        self._nbytes = 0

    def __len__(self) -> int:
        return self._count

    def admit(self, entry: QueuedRequest, now: float) -> None:
        """Set the request's level and expiry by the model's policies.

        `now` is time.monotonic(). The expiry is the earlier of the client's deadline and the queue's time-out.
        """
        plan = entry.plan
        entry.expires_at = entry.request.deadline
        if self._is_plain and not plan.timeout_microseconds:
            return
        if len(self._levels) > 1 or self._default_level:
            entry.level = plan.priority if 1 <= plan.priority <= len(self._levels) else self._default_level
        timeout = self._timeout_microseconds(entry)
        if timeout:
            limit = now + timeout / 1e6
            entry.expires_at = limit if entry.expires_at is None else min(entry.expires_at, limit)

    def _timeout_microseconds(self, entry: QueuedRequest) -> int:
        asked = entry.plan.timeout_microseconds
        if not self._has_policy:
            return asked
        policy = self._levels[entry.level].policy
        default = policy.default_timeout_microseconds
        if policy.allow_timeout_override and asked and (default == 0 or asked < default):
            return asked
        return default

    def push(self, entry: QueuedRequest) -> None:
        """Take a request in.

        Raises:
            QueueFull: its level, or the whole queue, is full.
        """
        level = self._levels[entry.level]
        limit = level.policy.max_queue_size
        if (
            self._count >= self._limits.max_requests
            or self._nbytes + entry.nbytes > self._limits.max_bytes
            or (limit and len(level) >= limit)
        ):
            raise QueueFull(entry.request.id)
        level.waiting.append(entry)
        self._add(entry)

    def push_back(self, entries: list[QueuedRequest]) -> None:
        """Put requests that were taken but not run back to the front, in their order."""
        for entry in reversed(entries):
            self._levels[entry.level].waiting.appendleft(entry)
            self._add(entry)

    def pop(self) -> QueuedRequest:
        """The next request in order of priority and arrival; the queue must not be empty."""
        for level in self._levels.values():
            source = level.waiting or level.delayed
            if source:
                entry = source.popleft()
                self._drop(entry)
                return entry
        raise IndexError("pop from an empty request queue")

    def take(self, count: int) -> list[QueuedRequest]:
        """The next `count` requests."""
        return [self.pop() for _ in range(count)]

    def remove(self, entry: QueuedRequest) -> bool:
        """Take out one request, wherever it stands; False when it has left the queue already."""
        if not entry.waiting:
            return False
        level = self._levels[entry.level]
        try:
            level.waiting.remove(entry)
        except ValueError:
            level.delayed.remove(entry)
        self._drop(entry)
        return True

    def expire(self, entry: QueuedRequest, now: float) -> bool:
        """The time of a request that waits here has passed: take it out; or, with the action DELAY, let it run after
        the others of its level, and give False. It may expire again then, when its client's deadline passes.

        A request whose client itself has given up is taken out whatever the action.
        """
        level = self._levels[entry.level]
        deadline = entry.request.deadline
        if level.policy.timeout_action is TimeoutAction.DELAY and (deadline is None or deadline > now):
            level.waiting.remove(entry)
            level.delayed.append(entry)
            entry.expires_at = deadline
            return False
        self.remove(entry)
        return True

    def clear(self) -> list[QueuedRequest]:
        return self.take(self._count)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """In the order in which they would run."""
        for level in self._levels.values():
            yield from level.waiting
            yield from level.delayed

    def _add(self, entry: QueuedRequest) -> None:
        entry.waiting = True
        self._count += 1
        self._nbytes += entry.nbytes

    def _drop(self, entry: QueuedRequest) -> None:
        entry.waiting = False
        self._count -= 1
        self._nbytes -= entry.nbytes
