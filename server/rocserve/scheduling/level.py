"""One priority level of a queue: which of its requests runs next."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter

from rocserve.core.model_config import QueuePolicy
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

    def take(self, count: int) -> list[InferRequest]:
        """The next so many, or all that there are."""
        waiting, dated = self.waiting, self.dated
        taken: list[InferRequest] = []
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
            if source:
                taken += [source.popleft() for _ in range(min(count - len(taken), len(source)))]
        return taken

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
