"""Bounds calls that wait for their clients: how many there are, how long a message may take to come whole, and how much
memory what has come of messages takes.

A call waits for its client until its message has come; a stream does so whenever it has nothing to answer. Of its next
message it may hold something at any time, so it is counted as long as it is open.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocserve.core.errors import ServeError, StatusCode
from rocserve.frontends.grpc.unfinished_bytes import UnfinishedBytes
from rocserve.observability.rate_limits import Allowance

if TYPE_CHECKING:
    from rocserve.frontends.grpc.server_calls import ServerCall

CHECK_SECONDS = 0.5
CALLS_BETWEEN_CHECKS = 512
"""That begin to wait: a check of all takes as long as some hundred calls' arrivals."""
_SECONDS_BETWEEN_WARNINGS = 10.0


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    connection: int = 4096
    """Calls of one connection. HTTP/2 has a setting for it, but gRPC's clients lose calls to that which come before
    they know it."""
    patience_seconds: float = 10.0
    """What a call may wait while its connection has more than that: a burst of large requests takes some time to be
    there, and shall lose none."""
    total: int = 8192
    """Of all connections, without patience; some 110 MB."""
    message_seconds: float = 60.0
    """From a unary call's beginning until its message is whole; 0 = any time. Streams may be opened ahead."""


class WaitingCalls:
    """For one thread, but for `begin` of calls that have been here before, and `len`."""

    def __init__(self, limits: WaitingLimits, now: float, log: logging.Logger) -> None:
        self.unfinished: UnfinishedBytes | None = None
        """None = what has come of messages is not counted."""
        self.counts_bytes = False
        """`came_whole` is to be called."""
        self._streams: dict[ServerCall, float] = {}
        """All that are open, with the time of the check before they were."""
        self._limits = limits
        self._log = log
        self._warnings = Allowance(1, 1 / _SECONDS_BETWEEN_WARNINGS)
        self.since: dict[ServerCall, float] = {}
        """In the order of their beginnings, with the time of the check before it. The hot path's unary calls are put in
        and taken out without a call of `begin` and `remove`, which is all that these do."""
        self.checked_at = now
        self.check_from = CALLS_BETWEEN_CHECKS
        """The number of calls at which the next check is due."""

    def __len__(self) -> int:
        return len(self.since)

    def begin(self, call: ServerCall) -> None:
        """The call waits for its client from now on."""
        self.since[call] = self.checked_at

    def remove(self, call: ServerCall) -> None:
        """Its message has come, or it has gone."""
        self.since.pop(call, None)

    def open_stream(self, call: ServerCall) -> None:
        self._streams[call] = self.checked_at
        self.begin(call)

    def close_stream(self, call: ServerCall) -> None:
        self._streams.pop(call, None)
        self.remove(call)

    def came_whole(self, call: ServerCall, since: float | None, nbytes: int) -> None:
        """A message has. `since` when a unary call has waited."""
        since = self._streams.get(call) if call.is_stream else since
        if self.unfinished is not None and since is not None:
            self.unfinished.came_whole(call.peer, since, nbytes)

    def check(self, now: float) -> None:
        """End what is beyond the bounds. To be called every CHECK_SECONDS, and from `check_from` calls on.

        Args:
            now: time.monotonic() seconds.
        """
        self.checked_at = now
        self._end_late(now)
        connections: dict[str, list[ServerCall]] = {}
        # Copied in one step: other threads may add to it.
        for call in list(self.since):
            connections.setdefault(call.peer, []).append(call)
        for calls in connections.values():
            if len(calls) > self._limits.connection:
                self._make_room(calls, now)
        self._end_beyond_total(connections.values())
        if self.unfinished is not None and self.unfinished.is_due(now):
            self._count_unfinished(self.unfinished, now)
        self.check_from = min(len(self.since) + CALLS_BETWEEN_CHECKS, self._limits.total + 1)

    def end_unary(self, error: ServeError) -> None:
        for call in list(self.since):
            if not call.is_stream:
                self._end(call, error)

    def _end_late(self, now: float) -> None:
        seconds = self._limits.message_seconds
        if not seconds:
            return
        error = ServeError(
            StatusCode.DEADLINE_EXCEEDED,
            f"the request's message has not come whole within {seconds:g} s (--grpc-message-timeout-secs); send smaller"
            " requests, or have the time raised",
        )
        for call, since in list(self.since.items()):
            if now - since < seconds + CHECK_SECONDS:
                break
            if not call.is_stream:
                self._end(call, error)

    def _count_unfinished(self, unfinished: UnfinishedBytes, now: float) -> None:
        connections: dict[str, list[ServerCall]] = {}
        oldest: dict[str, float] = {}
        for call, since in list({**self.since, **self._streams}.items()):
            connections.setdefault(call.peer, []).append(call)
            oldest[call.peer] = min(oldest.get(call.peer, since), since)
        for peer, error in unfinished.check(now, CHECK_SECONDS, oldest).items():
            for call in connections[peer]:
                self._end(call, error)
        self.counts_bytes = bool(unfinished.connections)

    def _make_room(self, calls: list[ServerCall], now: float) -> None:
        limit = self._limits.connection
        latest = now - self._limits.patience_seconds
        old = [call for call in calls[:-limit] if self.since.get(call, now) <= latest]
        self._refuse(old, f"this connection has more than {limit} calls")
        del calls[: len(old)]

    def _end_beyond_total(self, connections: Iterable[list[ServerCall]]) -> None:
        """The oldest of the connection that has the most, so that one client's many cost no other its few."""
        excess = len(self.since) - self._limits.total
        if excess <= 0:
            return
        # A little more than that, or the next call would need the next check.
        excess += self._limits.total // 16
        most = [(-len(calls), index, iter(calls)) for index, calls in enumerate(connections)]
        heapq.heapify(most)
        for _ in range(excess):
            count, index, calls = most[0]
            call = next(calls, None)
            if call is None:
                break
            self._refuse([call], f"the server has more than {self._limits.total} calls, and this connection the most,")
            heapq.heapreplace(most, (count + 1, index, calls))

    def _refuse(self, calls: Iterable[ServerCall], why: str) -> None:
        error = ServeError(
            StatusCode.RESOURCE_EXHAUSTED,
            f"{why} that wait for their clients' messages: the oldest, of which this is one, are ended; begin fewer"
            " calls at once, and send their messages at once",
        )
        for call in calls:
            self._end(call, error)

    def _end(self, call: ServerCall, error: ServeError) -> None:
        self.remove(call)
        call.end_waiting(error)
        if self._warnings.take():
            self._log.warning("%s, of %s, is ended: %s", call.method, call.peer, error.text)
