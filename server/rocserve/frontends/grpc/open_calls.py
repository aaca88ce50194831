"""Tracks open calls, and bounds those that wait for their clients: their number, and the time until a message has been
received in full.

A unary call waits for its client until its message is complete; a stream waits whenever it has nothing to answer. gRPC
does not report how much of a message has been received, only that it is at most the largest message. So the number of
waiting calls bounds the memory that clients can hold with unfinished messages.
"""

from __future__ import annotations

import heapq
import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.transport import Metadata, TransportLimits, WaitingLimits
from rocserve.observability.failures import Allowance, RequestFailures

CHECK_SECONDS = 0.5

Event = Any


class OpenCall:
    """The common part of unary calls and streams, and the holder of an answer's memory until it has been sent.

    This object has a reference that the core counts, so the call may be cancelled at any time, even after the server
    has been destroyed.
    """

    __slots__ = ("_call", "_event", "held_bytes")

    is_stream = False

    def __init__(self, event: Event) -> None:
        self._event = event
        self._call = event.call
        self.held_bytes = 0

    @property
    def method(self) -> str:
        name: bytes = self._event.call_details.method
        return name.decode(errors="replace")

    @property
    def metadata(self) -> Metadata:
        metadata: Metadata = self._event.invocation_metadata
        return metadata

    @property
    def deadline(self) -> float | None:
        # The core keeps the deadline on a monotonic clock, and converts it to the present wall clock.
        date: float = self._event.call_details.deadline
        # The core's "never" is a date far in the future; this one is in the year 2286.
        return None if date > 1e10 else time.monotonic() + date - time.time()

    def cancel_unread(self) -> None:
        """Cancel the call, because the client does not read the answer."""
        self._call.cancel(int(StatusCode.RESOURCE_EXHAUSTED), "the client has not read the answer in time")

    @abstractmethod
    def end_waiting(self, error: ServeError) -> None:
        """End the call with an error while it waits for its client."""

    @property
    @abstractmethod
    def is_watched(self) -> bool:
        """Return whether a watcher must be notified when the client leaves."""

    @property
    def peer(self) -> str:
        peer: bytes = self._call.peer()
        return peer.decode(errors="replace")


class WaitingCalls:
    """Keeps the waiting calls; times are time.monotonic() seconds. On the loop's thread."""

    def __init__(self, limits: WaitingLimits, now: float, log: logging.Logger) -> None:
        self.limits = limits
        self._log = log
        self._warnings = Allowance(1, per_second=0.1)
        self.since: dict[OpenCall, float] = {}
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
        # A few more are ended; otherwise the next call would need another check.
        self._end_beyond(limits.burst, list(self.since), limits.burst // 16)

    def end_slow(self, error: ServeError) -> None:
        """End the calls that have waited for longer than a burst does."""
        for call in self._waiting_since(self.checked_at - self.limits.patience_seconds - CHECK_SECONDS):
            self._end(call, error)

    def end_unary(self, error: ServeError) -> None:
        for call in list(self.since):
            if not call.is_stream:
                self._end(call, error)

    def _waiting_since(self, latest: float) -> list[OpenCall]:
        """Return the calls that have waited since `latest` or longer, the oldest first."""
        found = []
        for call, since in self.since.items():
            if since > latest:
                break
            found.append(call)
        return found

    def _end_late(self, seconds: float, calls: Sequence[OpenCall]) -> None:
        late = ServeError(
            StatusCode.DEADLINE_EXCEEDED,
            f"request message not fully received within {seconds:g} s; send smaller requests, or raise"
            " --grpc-message-timeout-secs on the server",
        )
        for call in calls:
            if not call.is_stream:
                self._end(call, late)

    def _end_beyond(self, most: int, calls: Sequence[OpenCall], more: int = 0) -> None:
        """If there are more than `most` calls, end the excess and `more`: the oldest calls of the largest connections,
        so that one client's calls do not end another client's."""
        excess = len(calls) - most
        if excess <= 0:
            return
        error = ServeError(
            StatusCode.RESOURCE_EXHAUSTED,
            f"more than {most} calls wait for their clients' messages (--grpc-max-waiting-calls); the server ended this"
            " one, because its connection has the most; begin fewer calls at once, and send each message immediately",
        )
        connections: dict[str, list[OpenCall]] = {}
        for call in calls:
            connections.setdefault(call.peer, []).append(call)
        largest = [(-len(of_one), index, iter(of_one)) for index, of_one in enumerate(connections.values())]
        heapq.heapify(largest)
        for _ in range(min(excess + more, len(calls))):
            count, index, of_one = largest[0]
            self._end(next(of_one), error)
            heapq.heapreplace(largest, (count + 1, index, of_one))

    def _end(self, call: OpenCall, error: ServeError) -> None:
        self.since.pop(call, None)
        call.end_waiting(error)
        if self._warnings.take():
            self._log.warning("%s, of %s, is ended: %s", call.method, call.peer, error.text)


class OpenCalls:
    """The calls of a server. On the loop's thread."""

    def __init__(self, limits: TransportLimits, memory: RequestMemory, log: logging.Logger) -> None:
        """`memory` counts requests and unread answers."""
        self.limits = limits
        self.memory = memory
        self.log = log
        self.failures = RequestFailures(log)
        self.live: set[OpenCall] = set()
        """Calls in flight. An answer removes its call from this set, so that no call gets a second answer."""
        self.sending: dict[OpenCall, float] = {}
        """Calls with an answer that the client has not read yet, with the time when it was sent (time.monotonic())."""
        self.waiting = WaitingCalls(limits.waiting, time.monotonic(), log)
        self.closed = False
        """The queue accepts no more operations."""

    def cancel_unread(self) -> None:
        now = time.monotonic()
        for call, since in list(self.sending.items()):
            if since + self.limits.write_seconds(call.held_bytes) < now:
                call.cancel_unread()
