"""Bounds the calls that wait for their clients: their number, the time until a message has come in full, and the memory
of unfinished messages.

A unary call waits for its client until its message has come; a stream waits whenever it has nothing to answer. A stream
may hold a part of its next message at any time, so its bytes are counted as long as it is open.

gRPC's core hides how much of a message has come, but the kernel counts the bytes that have come on a connection. Take a
moment at which no call that still waits on the connection had begun. The unfinished messages then hold at most the
bytes that have come since that moment, less the complete messages of calls begun since. A later moment replaces it when
the calls that waited then have ended, so that the bytes of frames, headers and ended calls do not add up. A connection
counts only if one of its calls has waited for a whole check interval. How much each call of a connection holds is not
known.
"""

from __future__ import annotations

import heapq
import ipaddress
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import RequestMemory
from rocserve.observability.failures import Allowance

if TYPE_CHECKING:
    from rocserve.frontends.grpc.server_calls import ServerCall

CHECK_SECONDS = 0.5
CALLS_BETWEEN_CHECKS = 512
"""A check is due after this many new waiting calls: it takes as long as the arrival of some hundred calls."""
_SECONDS_BETWEEN_WARNINGS = 10.0


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    connection: int = 4096
    """Waiting calls of one connection. HTTP/2's own setting would not do, because gRPC's clients lose calls that they
    begin before they know the setting."""
    patience_seconds: float = 10.0
    """How long a call may wait while its connection has more than `connection` calls. A burst of large requests takes
    some time to come, and must lose none."""
    total: int = 8192
    """Waiting calls of all connections, however short they have waited; they take about 110 MB."""
    message_seconds: float = 60.0
    """From the beginning of a unary call until its message has come; 0 = no limit. Streams may be opened in advance."""


class WaitingCalls:
    """Keeps the waiting calls; times are time.monotonic() seconds. On the loop's thread."""

    def __init__(self, limits: WaitingLimits, now: float, log: logging.Logger) -> None:
        self.unfinished: UnfinishedBytes | None = None
        """None = unfinished bytes are not counted."""
        self.counts_bytes = False
        """Calls must call `count_complete`."""
        self.streams: dict[ServerCall, float] = {}
        """The open streams, each with the time of the check before it was opened."""
        self._limits = limits
        self._log = log
        self._warnings = Allowance(1, 1 / _SECONDS_BETWEEN_WARNINGS)
        self.since: dict[ServerCall, float] = {}
        """Waiting call -> time of the check before it began to wait, in the order of their beginnings. Calls add
        themselves when they begin to wait, and remove themselves."""
        self.checked_at = now
        self.check_from = CALLS_BETWEEN_CHECKS
        """The number of waiting calls at which the next check is due."""

    def close_stream(self, call: ServerCall) -> None:
        self.streams.pop(call, None)
        self.since.pop(call, None)

    def count_complete(self, call: ServerCall, since: float | None, nbytes: int) -> None:
        """Count a complete message. `since`: when a unary call began to wait; None = the call is a stream."""
        since = self.streams.get(call) if call.is_stream else since
        if self.unfinished is not None and since is not None:
            self.unfinished.count_complete(call.peer, since, nbytes)

    def check(self, now: float) -> None:
        """End calls beyond the bounds. Must run every CHECK_SECONDS, and when there are `check_from` calls."""
        self.checked_at = now
        seconds = self._limits.message_seconds
        late = ServeError(
            StatusCode.DEADLINE_EXCEEDED,
            f"the request's message has not come whole within {seconds:g} s (--grpc-message-timeout-secs); send smaller"
            " requests, or have the time raised",
        )
        for call, since in list(self.since.items()):
            if not seconds or now - since < seconds + CHECK_SECONDS:
                break
            if not call.is_stream:
                self._end(call, late)
        connections: dict[str, list[ServerCall]] = {}
        for call in list(self.since):
            connections.setdefault(call.peer, []).append(call)
        limit, latest = self._limits.connection, now - self._limits.patience_seconds
        for calls in connections.values():
            if len(calls) > limit:
                old = [call for call in calls[:-limit] if self.since.get(call, now) <= latest]
                self._refuse(old, f"this connection has more than {limit} calls")
                del calls[: len(old)]
        self._end_beyond_total(connections.values())
        if self.unfinished is not None and self.unfinished.is_due(now):
            # A stream may hold a part of its next message at any time.
            waiting: dict[str, list[ServerCall]] = {}
            oldest: dict[str, float] = {}
            for call, since in list({**self.since, **self.streams}.items()):
                waiting.setdefault(call.peer, []).append(call)
                oldest[call.peer] = min(oldest.get(call.peer, since), since)
            for peer, error in self.unfinished.check(now, oldest).items():
                for call in waiting[peer]:
                    self._end(call, error)
            self.counts_bytes = bool(self.unfinished.connections)
        self.check_from = min(len(self.since) + CALLS_BETWEEN_CHECKS, self._limits.total + 1)

    def end_unary(self, error: ServeError) -> None:
        for call in list(self.since):
            if not call.is_stream:
                self._end(call, error)

    def _end_beyond_total(self, connections: Iterable[list[ServerCall]]) -> None:
        """End the oldest calls of the largest connections, so that one client's calls do not end another client's."""
        excess = len(self.since) - self._limits.total
        if excess <= 0:
            return
        # Some more are ended, or the next call would need another check.
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
        self.since.pop(call, None)
        call.end_waiting(error)
        if self._warnings.take():
            self._log.warning("%s, of %s, is ended: %s", call.method, call.peer, error.text)


Peer = tuple[bytes, int]
ReceivedBytes = Mapping[Peer, Mapping[int, int]]
"""Peer -> (the kernel's number of the socket -> bytes): one peer may be connected to two addresses of the server."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_AND_DUMP = 0x301
_ERROR, _DONE = 2, 3
_INET_DIAG_INFO = 2
_ESTABLISHED, _CLOSE_WAIT = 1 << 1, 1 << 8
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_SOCKET_ID = struct.Struct("!HH16s16s")
_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_COOKIE_AT, _ATTRIBUTES_AT, _MESSAGE_AT = 44, 72, 16
_BYTES_RECEIVED_AT = 128
"""The offset in tcp_info."""
_ATTRIBUTE = struct.Struct("=HH")
_COUNT = struct.Struct("=Q")
_IPV4_IN_IPV6 = bytes(10) + b"\xff\xff"
_NETLINK_TIMEOUT_SECONDS = 1.0
"""A safeguard: the kernel answers immediately."""
_LARGEST_NETLINK_MESSAGE = 1 << 16
"""More than the kernel sends in one message."""


def peer_of(text: str) -> Peer | None:
    """Return the peer in gRPC's notation: "ipv4:127.0.0.1:40000", "ipv6:[::1]:40000" (also with URL escapes). Returns
    None if it is not connected by TCP."""
    kind, _, rest = text.partition(":")
    address, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return _plain(ipaddress.ip_address(address.strip("[]").partition("%")[0]).packed), int(port)


def received_bytes(port: int) -> ReceivedBytes:
    """Return the bytes received on all connections to this port. Raises OSError if the system does not count them."""
    found: dict[Peer, dict[int, int]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
        link.settimeout(_NETLINK_TIMEOUT_SECONDS)
        for family, nbytes in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
            states, extension = _ESTABLISHED | _CLOSE_WAIT, 1 << (_INET_DIAG_INFO - 1)
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, extension, 0, states)
            body += _SOCKET_ID.pack(port, 0, b"", b"") + _NO_COOKIE
            header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0)
            link.sendto(header + body, (0, 0))
            for message in _messages(link):
                own_port, peer_port, _, address = _SOCKET_ID.unpack_from(message, 4)
                count = _bytes_received(message)
                if own_port == port and count is not None:
                    cookie: int = _COUNT.unpack_from(message, _COOKIE_AT)[0]
                    found.setdefault((_plain(address[:nbytes]), peer_port), {})[cookie] = count
    return found


def _plain(address: bytes) -> bytes:
    return address[12:] if len(address) == 16 and address.startswith(_IPV4_IN_IPV6) else address


def _messages(link: socket.socket) -> Iterator[memoryview]:
    while True:
        data = memoryview(link.recv(_LARGEST_NETLINK_MESSAGE))
        while len(data) >= _HEADER.size:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            if kind == _ERROR:
                number = -struct.unpack_from("=i", data, _MESSAGE_AT)[0]
                raise OSError(number, "the kernel refuses sock_diag")
            if kind == _DONE:
                return
            yield data[_MESSAGE_AT:length]
            data = data[(length + 3) & ~3 :]


def _bytes_received(message: memoryview) -> int | None:
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INET_DIAG_INFO and length >= _ATTRIBUTE.size + _BYTES_RECEIVED_AT + _COUNT.size:
            count: int = _COUNT.unpack_from(message, at + _ATTRIBUTE.size + _BYTES_RECEIVED_AT)[0]
            return count
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    return None


_SHARE_OF_TIME = 100
"""Asking the kernel may take one part in this many of the time, so many connections are checked less often."""
_CALL_BYTES = 256
"""The most bytes that a complete message may have taken in addition to its own: headers, frames, records of TLS."""
_OVERHEAD_SHIFT = 7
"""In addition, a message may have taken 1/128 of its size."""
_IDLE_BYTES = 64
"""Bytes between two checks that may belong to no message: pings, window updates."""


@dataclass(slots=True)
class _Count:
    """The bytes that have come on a connection since a moment."""

    since: float
    before: Mapping[int, int]
    """The kernel's number of a socket -> the bytes that had come at that moment."""
    whole_bytes: int = 0
    """The bytes of complete messages of calls that began later, with their overhead."""

    def unfinished(self, received: Mapping[int, int]) -> int:
        come = sum(count - self.before.get(number, 0) for number, count in received.items())
        # If more were deducted than has come, later bytes would not be counted.
        self.whole_bytes = min(self.whole_bytes, come)
        return come - self.whole_bytes


@dataclass(slots=True, eq=False)
class _Connection:
    """Holds a connection's unfinished bytes. `newer` replaces `older` when no call waits that began before `newer`."""

    older: _Count
    newer: _Count
    held_bytes: int = 0

    def unfinished(self, oldest: float, now: float, received: Mapping[int, int]) -> int:
        self.older.whole_bytes += _IDLE_BYTES
        self.newer.whole_bytes += _IDLE_BYTES
        newer = self.newer.unfinished(received)
        if oldest < self.newer.since:
            return self.older.unfinished(received)
        self.older, self.newer = self.newer, _Count(now, received)
        return newer


@dataclass(eq=False)
class UnfinishedBytes:
    """Counts the unfinished bytes of connections against the memory. For one thread."""

    _memory: RequestMemory
    _received: Callable[[], ReceivedBytes] | None
    _next: float
    _log: logging.Logger
    connections: dict[str, _Connection] = field(default_factory=dict, init=False)
    """The counted connections. If there are none, `count_complete` need not be called."""

    def __post_init__(self) -> None:
        self._earlier: deque[tuple[float, ReceivedBytes]] = deque([(self._next, {})], 2)
        """(Time, received bytes) of the last two checks. Calls of a new connection began after the earlier check."""

    def is_due(self, now: float) -> bool:
        return self._received is not None and now >= self._next

    def count_complete(self, peer: str, since: float, nbytes: int) -> None:
        """Count a complete message of a call that has waited since `since`. The request now counts its bytes itself."""
        connection = self.connections.get(peer)
        if connection is None:
            return
        taken = nbytes + (nbytes >> _OVERHEAD_SHIFT) + _CALL_BYTES
        for count in (connection.older, connection.newer):
            if since >= count.since:
                count.whole_bytes += taken
        if since < self._earlier[-1][0]:
            # The last check has counted it.
            self._memory.unfinished.release(connection, taken)

    def check(self, now: float, oldest: Mapping[str, float]) -> dict[str, ServeError]:
        """Count again. The connections with the fewest bytes get memory first. Returns peer -> error for connections
        that get none; the caller must end all their waiting calls, so that nothing remains to be counted. `oldest`:
        peer -> time since when its oldest call has waited."""
        try:
            received = self._received() if self._received else {}
        except OSError as error:
            self._received = None
            self.drop()
            self._log.warning(
                "unfinished messages do not count against --max-request-memory, because the system does not tell how"
                " many bytes of them have come (%s): waiting calls are bounded only in number and time",
                error,
            )
            return {}
        self._next = now + max(CHECK_SECONDS * 0.9, (time.monotonic() - now) * _SHARE_OF_TIME)
        checked_at = self._earlier[-1][0]
        held: dict[str, int] = {}
        connections = {}
        for peer, since in oldest.items():
            address = peer_of(peer)
            if since >= checked_at or address is None or address not in received:
                continue
            connection = self.connections.get(peer)
            if connection is None:
                begun, earlier = self._earlier[0]
                older = _Count(begun, earlier.get(address, {}))
                connection = _Connection(older, _Count(now, received[address]))
            connections[peer] = connection
            held[peer] = connection.unfinished(since, now, received[address])
        self.drop()
        self.connections = connections
        self._earlier.append((now, received))
        refused: dict[str, ServeError] = {}
        for peer in sorted(held, key=held.__getitem__):
            try:
                self._memory.unfinished.admit(connections[peer], held[peer])
            except ServeError as error:
                del connections[peer]
                refused[peer] = error
        return refused

    def drop(self) -> None:
        """Release the memory of all connections."""
        for connection in self.connections.values():
            self._memory.unfinished.release(connection)
        self.connections = {}
