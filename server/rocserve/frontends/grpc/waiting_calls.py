"""Bounds the calls that wait for their clients: their number, and the time until a message has come in full.

A unary call waits for its client until its message has come; a stream waits whenever it has nothing to answer. How much
of a message has come is not known, only that it is no more than the largest message. So the number of waiting calls
bounds the memory that clients can hold by messages that they never finish.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocserve.core.errors import ServeError, StatusCode
from rocserve.observability.failures import Allowance

if TYPE_CHECKING:
    from rocserve.frontends.grpc.server_calls import ServerCall

CHECK_SECONDS = 0.5
_SECONDS_BETWEEN_WARNINGS = 10.0


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    most: int = 8192
    """Calls that may wait for longer than `patience_seconds`."""
    patience_seconds: float = 1.0
    """A burst of requests takes some time to come, and must lose none."""
    burst: int = 8192
    """Calls that may wait, however short; they take about 110 MB."""
    message_seconds: float = 60.0
    """From the beginning of a unary call until its message has come; 0 = no limit. Streams may be opened in advance."""


class WaitingCalls:
    """Keeps the waiting calls; times are time.monotonic() seconds. On the loop's thread."""

    def __init__(self, limits: WaitingLimits, now: float, log: logging.Logger) -> None:
        self.limits = limits
        self._log = log
        self._warnings = Allowance(1, 1 / _SECONDS_BETWEEN_WARNINGS)
        self.since: dict[ServerCall, float] = {}
        """Waiting call -> time of the check before it began to wait, in the order of their beginnings. Calls add
        themselves when they begin to wait, and remove themselves."""
        self.checked_at = now

    def check(self, now: float) -> None:
        """End calls beyond the bounds. Must run every CHECK_SECONDS, and when there are more calls than a burst has."""
        limits = self.limits
        self.checked_at = now
        if limits.message_seconds:
            self._end_late(limits.message_seconds, self._waiting_since(now - limits.message_seconds - CHECK_SECONDS))
        self._end_beyond(limits.most, self._waiting_since(now - limits.patience_seconds - CHECK_SECONDS))
        # Some more are ended, or the next call would need another check.
        self._end_beyond(limits.burst, list(self.since), limits.burst // 16)

    def end_slow(self, error: ServeError) -> None:
        """End the calls that have waited for longer than a burst does."""
        for call in self._waiting_since(self.checked_at - self.limits.patience_seconds - CHECK_SECONDS):
            self._end(call, error)

    def end_unary(self, error: ServeError) -> None:
        for call in list(self.since):
            if not call.is_stream:
                self._end(call, error)

    def _waiting_since(self, latest: float) -> list[ServerCall]:
        """Return the calls that have waited since `latest` or longer, the oldest first."""
        found = []
        for call, since in self.since.items():
            if since > latest:
                break
            found.append(call)
        return found

    def _end_late(self, seconds: float, calls: Sequence[ServerCall]) -> None:
        late = ServeError(
            StatusCode.DEADLINE_EXCEEDED,
            f"the request's message has not come whole within {seconds:g} s (--grpc-message-timeout-secs); send smaller"
            " requests, or have the time raised",
        )
        for call in calls:
            if not call.is_stream:
                self._end(call, late)

    def _end_beyond(self, most: int, calls: Sequence[ServerCall], more: int = 0) -> None:
        """If there are more than `most` calls, end the excess and `more`: the oldest calls of the largest connections,
        so that one client's calls do not end another client's."""
        excess = len(calls) - most
        if excess <= 0:
            return
        error = ServeError(
            StatusCode.RESOURCE_EXHAUSTED,
            f"the server has more than {most} calls that wait for their clients' messages"
            " (--grpc-max-waiting-calls), and this connection the most: the oldest, of which this is one, are ended;"
            " begin fewer calls at once, and send their messages at once",
        )
        connections: dict[str, list[ServerCall]] = {}
        for call in calls:
            connections.setdefault(call.peer, []).append(call)
        largest = [(-len(of_one), index, iter(of_one)) for index, of_one in enumerate(connections.values())]
        heapq.heapify(largest)
        for _ in range(min(excess + more, len(calls))):
            count, index, of_one = largest[0]
            self._end(next(of_one), error)
            heapq.heapreplace(largest, (count + 1, index, of_one))

    def _end(self, call: ServerCall, error: ServeError) -> None:
        self.since.pop(call, None)
        call.end_waiting(error)
        if self._warnings.take():
            self._log.warning("%s, of %s, is ended: %s", call.method, call.peer, error.text)
