"""Counts what has come of messages that are not yet whole against the memory for requests.

gRPC's core keeps such bytes to itself, but the kernel tells how many have come on a connection. Let all calls of a
connection that now wait for their messages have begun after some moment. What its unfinished messages hold is then at
most what has come on it since, less the messages of calls begun since that have come whole. The moment moves on as the
calls end that waited at it, so that frames, headers and what ended calls had sent do not add up. Connections without
calls that have waited for a whole check are not counted. Which of a connection's calls holds how much is not known.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rocserve.core.errors import ServeError
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.received_bytes import Peer, ReceivedBytes, peer_of

_SHARE_OF_TIME = 100
"""One part in so many is spent on asking the kernel: with thousands of connections it is asked less often."""
_CALL_BYTES = 256
"""That a whole message may have taken beside itself: headers, frames, records of TLS."""
_OVERHEAD_SHIFT = 7
"""And so much for its size: 1/128."""
_QUIET_BYTES = 64
"""That may come from one check to the next without being of a message: pings, window updates."""


@dataclass(slots=True)
class _Count:
    """What has come from a moment on."""

    since: float
    before: Mapping[int, int]
    """Bytes that had come by then, by sockets."""
    whole_bytes: int = 0
    """Of messages of calls that began later, and what they took beside."""

    def unfinished(self, received: Mapping[int, int]) -> int:
        come = sum(count - self.before.get(number, 0) for number, count in received.items())
        # Never more than has come, or later bytes would not be seen.
        self.whole_bytes = min(self.whole_bytes, come)
        return come - self.whole_bytes


class _Connection:
    """A holder of memory. `newer` takes the place of `older` once no call waits that began before it."""

    __slots__ = ("held_bytes", "newer", "older")

    def __init__(self, older: _Count, newer: _Count) -> None:
        self.held_bytes = 0
        self.older = older
        self.newer = newer

    def unfinished(self, oldest: float, now: float, received: Mapping[int, int]) -> int:
        self.older.whole_bytes += _QUIET_BYTES
        self.newer.whole_bytes += _QUIET_BYTES
        newer = self.newer.unfinished(received)
        if oldest < self.newer.since:
            return self.older.unfinished(received)
        self.older, self.newer = self.newer, _Count(now, received)
        return newer


class UnfinishedBytes:
    """For one thread."""

    def __init__(
        self, memory: RequestMemory, received: Callable[[], ReceivedBytes], now: float, log: logging.Logger
    ) -> None:
        self.connections: dict[str, _Connection] = {}
        """Those that are counted. While there are none, messages that come whole need not be told of."""
        self._memory = memory
        self._received: Callable[[], ReceivedBytes] | None = received
        self._log = log
        self._earlier: deque[tuple[float, ReceivedBytes]] = deque([(now, {})], 2)
        """What had come at the last two checks. A call that is counted for the first time began after the first."""
        self._next = now

    def is_due(self, now: float) -> bool:
        return self._received is not None and now >= self._next

    def came_whole(self, peer: str, since: float, nbytes: int) -> None:
        """A message of so many bytes of a call that has waited since then: from now on its request counts."""
        connection = self.connections.get(peer)
        if connection is None:
            return
        taken = nbytes + (nbytes >> _OVERHEAD_SHIFT) + _CALL_BYTES
        for count in (connection.older, connection.newer):
            if since >= count.since:
                count.whole_bytes += taken
        if since < self._earlier[-1][0]:
            # It was counted at the last check.
            self._memory.release_part(connection, taken)

    def check(self, now: float, period: float, oldest: Mapping[str, float]) -> dict[str, ServeError]:
        """Count anew. The memory is left to the connections that hold least.

        Args:
            period: seconds between checks.
            oldest: by peers, since when the first of its calls has waited.

        Returns:
            By peers, why there is no room for what the connections hold that hold most. All their calls that wait are
            to be ended, so that nothing is left to count.
        """
        try:
            received = self._received() if self._received else {}
        except OSError as error:
            self._received = None
            self.drop()
            self._log.warning(
                "what has come of messages that are not whole does not count against --max-request-memory, as the"
                " system does not tell how much that is (%s): the calls that wait are bounded in number and time alone",
                error,
            )
            return {}
        self._next = now + max(period * 0.9, (time.monotonic() - now) * _SHARE_OF_TIME)
        checked_at = self._earlier[-1][0]
        held: dict[str, int] = {}
        connections = {}
        for peer, since in oldest.items():
            address = peer_of(peer)
            if since >= checked_at or address is None or address not in received:
                continue
            connection = self.connections.get(peer) or self._begin(address, now, received)
            connections[peer] = connection
            held[peer] = connection.unfinished(since, now, received[address])
        self.drop()
        self.connections = connections
        self._earlier.append((now, received))
        refused: dict[str, ServeError] = {}
        for peer in sorted(held, key=held.__getitem__):
            try:
                self._memory.admit_part(connections[peer], held[peer])
            except ServeError as error:
                del connections[peer]
                refused[peer] = error
        return refused

    def drop(self) -> None:
        """No connection is counted."""
        for connection in self.connections.values():
            self._memory.release_part(connection)
        self.connections = {}

    def _begin(self, peer: Peer, now: float, received: ReceivedBytes) -> _Connection:
        since, earlier = self._earlier[0]
        return _Connection(_Count(since, earlier.get(peer, {})), _Count(now, received[peer]))
