"""Listens for HTTP: takes connections, as many as there may be, closes those that keep the server waiting, and speaks
HTTP/1.1 with their clients: httptools parses what comes, answers go out in the order of their requests.

A request begins when its head is there, one at a time in a connection; its body may still be coming. Its handler
answers at once, later on the loop, or from a task that ends with the client's connection.

Clients send the same head again and again. A head that the parser has found to be all of a head, by the same bytes and
at the same place between two requests, is not parsed again: the parser would find the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import httptools

from rocserve.core.memo import Memo
from rocserve.core.tensors import Buffer
from rocserve.frontends.grpc.transport import file_limit
from rocserve.frontends.http.request import LARGEST_HEAD_LINE, Head, Request, Response
from rocserve.frontends.listen_address import ListenAddress, begin_no_handshakes
from rocserve.observability.failures import Allowance

_PENDING_CONNECTIONS = 1024
"""That the kernel keeps until they are taken."""
_TAKEN_AT_ONCE = 8
"""Of them, in each round of the loop. One too many is closed within four rounds, so that there may be 32 too many for a
moment: fewer than the descriptors that the server keeps for itself."""
_TAKING_PAUSE_SECONDS = 1.0
"""Where none can be taken, as no file may be opened any more."""
_ARRIVING_SHARE = 4
"""One in four connections may be arriving, its handshake of TLS included: that leaves a client time for its own while
others begin theirs without end, and those that have had a request keep the rest."""
_FIRST_REQUEST_SECONDS = 1.0
"""What a client that has just connected, or begun a request, has for the rest of it when the server ends."""
_POLL_SECONDS = 0.02
"""Between two checks whether there is still such a client, or a request in progress."""
_CLOSE_SECONDS = 1.0
"""What connections and tasks have to end."""
_WATCH_SECONDS = 1.0
"""Between two checks for connections whose clients keep them waiting."""
_SECONDS_BETWEEN_WARNINGS = 10.0
_REMEMBERED_HEADS = 256
"""Of requests."""
_KEPT_DESCRIPTORS = 256
"""For the process itself, of the files that may be open: workers take some, and so do files that are read."""


class HttpListener:
    """All calls are made on the loop. A connection counts from the moment on that it is taken."""

    def __init__(
        self,
        handle: Callable[[Request], None],
        log: logging.Logger,
        limits: ConnectionLimits | None = None,
        tls: ssl.SSLContext | None = None,
        failure: Callable[[Request, Exception], Response] = lambda request, error: Response(500, b"", "text/plain"),
    ) -> None:
        """`handle`: answers a request, at once or later. `failure`: the answer to one that could not be handled."""
        self.handle = handle
        self.failure = failure
        self.limits = limits or ConnectionLimits()
        self.open: set[Connection] = set()
        """Those that are closing too, until they are closed."""
        self.arriving: dict[Connection, tuple[socket.socket, asyncio.Task[Any]]] = {}
        """Those that have been taken and are not set up yet, their handshake of TLS included, in the order in which
        they were taken."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.closes_after_answers = False
        """An answer is the last of its connection."""
        self.none_open = asyncio.Event()
        self.none_open.set()
        self.known_heads = Memo[bytes, Head](_REMEMBERED_HEADS)
        """By their bytes; of requests that keep their connection and have their body's length."""
        self._last_lines = b""
        self._last_lines_until = 0.0
        self._is_ending = False
        self._log = log.getChild("connections")
        self._tls = tls
        self._listening: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop
        self._watch: asyncio.Task[None] | None = None
        self._fitting: int | None = None
        """How many connections there may be while one has a descriptor above the limit: those that closed ones leave
        are lower, and do not show it."""
        self._warnings = Allowance(1, 1 / _SECONDS_BETWEEN_WARNINGS)

    def last_lines(self, now: float) -> bytes:
        """Of the head of each answer; `now`: time.monotonic() seconds."""
        if now >= self._last_lines_until:
            second = time.time()
            self._last_lines_until = now + 1 - second % 1
            self._last_lines = f"Date: {formatdate(second, usegmt=True)}\r\nServer: rocserve\r\n\r\n".encode()
        return self._last_lines

    async def start(self, where: ListenAddress) -> int:
        """Listen; returns the port. Raises: OSError: it cannot be listened on; its text says where and what to do."""
        loop = self._loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._close_overdue())
        try:
            # asyncio binds, but takes none: it would report one with TLS only after the handshake.
            bound = await loop.create_server(
                asyncio.Protocol, where.address, where.port, reuse_port=where.reuse_port or None, start_serving=False
            )
            self._listening = [each.dup() for each in bound.sockets]
            bound.close()
            for listening in self._listening:
                listening.listen(_PENDING_CONNECTIONS)
                loop.add_reader(listening.fileno(), self._take, listening)
        except OSError as error:
            await self.stop()
            raise where.refusal(error) from None
        return int(self._listening[0].getsockname()[1])

    def close_after_answers(self) -> None:
        """Have clients connect anew, here or elsewhere."""
        self.closes_after_answers = True

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more connections, let open requests finish within the grace time, close all connections. What is
        asked on open connections meanwhile is answered, and the connection closed."""
        self.close_after_answers()
        if self._is_ending or self._watch is None:
            return
        self._is_ending = True
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
            begin_no_handshakes(listening)
            # Who has connected already is served.
            while self._take(listening):
                pass
            listening.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(grace_seconds, _FIRST_REQUEST_SECONDS)):
                while self.arriving or any(each.awaits_head for each in self.open):  # noqa: ASYNC110 - rare
                    await asyncio.sleep(_POLL_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while any(each.has_request for each in self.open):  # noqa: ASYNC110 - rare
                    await asyncio.sleep(_POLL_SECONDS)
        self._watch.cancel()
        while self.arriving:
            self._close_oldest_arriving()
        for connection in self.open:
            if connection.has_request:
                connection.abort()
            else:
                connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.none_open.wait()
                await asyncio.gather(*self.tasks, return_exceptions=True)
        for connection in self.open:
            connection.abort()

    def _take(self, listening: socket.socket) -> bool:
        """Whether there may be more."""
        for _ in range(_TAKEN_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_TAKING_PAUSE_SECONDS, self._resume_taking, listening)
                self._loop.call_exception_handler(
                    {"message": "connections cannot be taken", "exception": error, "socket": listening}
                )
                return False
            self._admit(accepted)
        return True

    def _resume_taking(self, listening: socket.socket) -> None:
        if not self._is_ending:
            self._loop.add_reader(listening.fileno(), self._take, listening)

    def _admit(self, accepted: socket.socket) -> None:
        loop = self._loop
        connection = Connection(self, loop)
        seconds = None if self._tls is None else self.limits.head_seconds
        coming = loop.connect_accepted_socket(
            lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
        )
        task = loop.create_task(coming)
        task.add_done_callback(partial(self._end_arrival, connection, accepted))
        self.arriving[connection] = accepted, task
        if self._has_one_too_many(accepted):
            self._make_room()

    def _end_arrival(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[Any]) -> None:
        self.arriving.pop(connection, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            # asyncio has closed it, unless it had not begun.
            accepted.close()
        if error is not None and not isinstance(error, OSError):
            self._log.error("a connection could not be taken", exc_info=error)

    def _close_oldest_arriving(self) -> None:
        _, task = self.arriving.pop(next(iter(self.arriving)))
        task.cancel()

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = self._loop.time()
            for connection in self.open:
                if connection.is_overdue(now):
                    connection.abort()

    def _has_one_too_many(self, accepted: socket.socket) -> bool:
        if self._are_more_than(self.limits.most):
            return True
        if self._is_above(accepted.fileno()):
            # The kernel gives the lowest that is free, so that all below are in use, whatever for.
            self._fitting = self._count_open() - 1
            return True
        if not self._are_more_than(self._fitting):
            return False
        descriptors = [connection.descriptor for connection in self.open]
        descriptors += [accepted.fileno() for accepted, _ in self.arriving.values()]
        if not any(map(self._is_above, descriptors)):
            self._fitting = None
        return self._fitting is not None

    def _are_more_than(self, most: int | None) -> bool:
        if most is None or len(self.open) + len(self.arriving) <= most:
            return False
        return self._count_open() > most

    def _count_open(self) -> int:
        """Those that are closing are still among the connections."""
        return len(self.arriving) + sum(not each.is_closing for each in self.open)

    def _is_above(self, descriptor: int) -> bool:
        return self.limits.most_descriptors is not None and descriptor > self.limits.most_descriptors

    def _make_room(self) -> None:
        """Close the oldest of those that arrive, where they have more than their share: no request is lost with it.
        Else the connection that has waited for its client for longest; where none does, the one whose request's body
        has been on its way for longest; else the oldest that arrives."""
        if (len(self.arriving) - 1) * _ARRIVING_SHARE > self._count_open():
            self._close_oldest_arriving()
        elif (
            waiting := self._longest(attrgetter("waits_since")) or self._longest(attrgetter("body_since"))
        ) is not None:
            waiting.abort()
        else:
            self._close_oldest_arriving()
        if not self._warnings.take():
            return
        most = self.limits.most
        if most is not None and self._count_open() >= most:
            self._log.warning(
                "there are %d connections, as many as there may be: for each one more, another whose client keeps it"
                " waiting is closed",
                most,
            )
        else:
            self._log.warning(
                "connections are closed whose clients keep them waiting: of the files that may be open only those are"
                " left that the server needs for itself; raise the hard limit (ulimit -Hn, LimitNOFILE), or let fewer"
                " clients connect"
            )

    def _longest(self, since: Callable[[Connection], float | None]) -> Connection | None:
        waiting = [(began, connection) for connection in self.open if (began := since(connection)) is not None]
        return min(waiting, key=itemgetter(0))[1] if waiting else None


def most_descriptors() -> int | None:
    """That HTTP's connections and all else may take together; None = any number."""
    limit = file_limit()
    return None if limit is None else limit - min(_KEPT_DESCRIPTORS, limit // 4)


MOST_HEADERS = 128
_LARGEST_HEAD = 128 << 10
"""Bytes that come of a head after its first ones."""
_READ_AHEAD = 1 << 20
"""Bytes of a body that are taken before anybody asks for them; then its sender has to wait."""
_BEGUN_AT_ONCE = 16
"""Requests of one connection that are begun before others have their turn."""
_LONGEST_REMEMBERED_HEAD = 1024
"""Bytes: all of them take ten megabytes at most, when they are nothing but short headers."""
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    head_seconds: float = 10.0
    """What a client has for the head of a request from its first byte on; of its first one from the connection on. TLS
    has as long before it. The rest of a body whose request has been answered has as long too."""
    idle_seconds: float = 75.0
    """How long a connection may stay without a request: a little longer than proxies keep theirs, a minute mostly, so
    that it is they who close."""
    age_seconds: float = 0.0
    """After which an answer is the last of its connection; 0 = never."""
    write_seconds: float = 60.0
    """How long a client may not read what waits for it in the connection, which is little of a large answer."""
    most: int | None = None
    """Connections at a time; for one more, one that waits for its client is closed. None = any number."""
    most_descriptors: int | None = None
    """When a connection's descriptor is above, there is one too many: the server needs some for itself, for workers
    say."""


class _Refused(Exception):
    """The client asks too much of a request's head."""


class Connection(asyncio.Protocol):
    """One connection of a client: since when it waits for its client, and for what. All calls are made on the loop."""

    def __init__(self, listener: HttpListener, loop: asyncio.AbstractEventLoop) -> None:
        self.listener = listener
        self.remote = ""
        self.ends_at = math.inf
        """time.monotonic() seconds: an answer after that is the last."""
        self.loop = loop
        self._transport: asyncio.Transport
        self.is_closing = True
        """Nothing more is read or written; nor has anything been, until it is made."""
        self._reads = True
        self._parser = httptools.HttpRequestParser(self)
        self._arriving: Request | None = None
        """Whose head or body is being parsed."""
        self._waiting: deque[Request] = deque()
        """Requests behind the one in progress; their heads are there."""
        self._current: Request | None = None
        self._fault: str | None = None
        """Why nothing more is parsed, which is answered behind the requests before it."""
        self._is_last = False
        """Nothing more is parsed: the client or the server wants no further request in this connection."""
        self._is_in_head = False
        self._head_bytes = 0
        self._is_beginning = False
        self._idle_since: float | None = None
        self._head_since: float | None = None
        self._unread_since: float | None = None
        self._target = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self.begun_at = 0.0
        """When its request began: time.monotonic() seconds."""
        self._drained: asyncio.Future[None] | None = None

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_closing = False
        peer = transport.get_extra_info("peername")
        self.remote = str(peer[0]) if isinstance(peer, tuple) else ""
        self._idle_since = self._head_since = time.monotonic()
        age_seconds = self.listener.limits.age_seconds
        if age_seconds:
            # Those that began together do not end together; gRPC's core spreads them so.
            self.ends_at = self._idle_since + age_seconds * random.uniform(0.9, 1.1)
        self.listener.open.add(self)
        self.listener.none_open.clear()
        self.listener.arriving.pop(self, None)

    def eof_received(self) -> None:
        """asyncio closes it then."""
        self.is_closing = True

    def connection_lost(self, error: Exception | None) -> None:
        self.listener.open.discard(self)
        if not self.listener.open:
            self.listener.none_open.set()
        self._is_last = self.is_closing = True
        self._waiting.clear()
        if self._current is not None:
            self._current.leave()
            self._current = None
        del self._parser  # It knows this: the two would stay until the next collection.

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()

    def resume_writing(self) -> None:
        self._unread_since = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._begin_requests()

    def data_received(self, data: bytes) -> None:
        if self._arriving is None:
            if self._is_last:
                return  # Read so that the client gets its answer, rather than a reset.
            if not self._is_in_head:
                # Between two requests: those that are whole and have a remembered head.
                known, begin = self.listener.known_heads, 0
                while begin < len(data):
                    end = data.find(_HEAD_END, begin) + len(_HEAD_END)
                    head = known.get(data[begin:end])
                    if head is None or end + head.body_bytes > len(data):
                        break
                    begin = end + head.body_bytes
                    self._waiting.append(Request(self, head, data[end:begin], True))
                data = data[begin:]
        if data:
            self._parse(data)
        if self._waiting or self._fault is not None:
            self._begin_requests()
        arriving = self._arriving
        is_ahead = self._waiting or (arriving is not None and len(arriving.data) - arriving.taken > _READ_AHEAD)
        if is_ahead and self._reads and not self.is_closing:
            self._reads = False
            self._transport.pause_reading()

    def _parse(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        if self._head_since is None and self._idle_since is not None:
            self._head_since = time.monotonic()
        try:
            if self._arriving is None and not was_in_head:
                data = self._parse_head(data)
            self._parser.feed_data(data)
            if self._is_in_head and was_in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _LARGEST_HEAD:
                    raise httptools.HttpParserError(f"a request's head is more than {_LARGEST_HEAD} bytes")
        except httptools.HttpParserUpgrade:
            self._is_last = True  # It is answered in HTTP/1.1. What comes behind it would be in another protocol.
        except httptools.HttpParserError as error:
            self._refuse(str(error.__context__ if isinstance(error.__context__, _Refused) else error))
        if self._arriving is not None:
            self._arriving.wake()

    def _parse_head(self, data: bytes) -> bytes:
        """Between two requests: a head that is whole is parsed alone, and remembered where that was all of one head and
        nothing else; returns what is behind it."""
        end = data.find(_HEAD_END) + len(_HEAD_END)
        if not len(_HEAD_END) <= end <= _LONGEST_REMEMBERED_HEAD:
            return data
        begun = len(self._waiting)
        self._parser.feed_data(data[:end])
        if len(self._waiting) == begun + 1 and not self._is_in_head:
            request = self._waiting[-1]
            head = request.head
            length = int(head.headers.get("content-length", "0"))
            has_length = "transfer-encoding" not in head.headers and request.is_whole == (length == 0)
            if has_length and head.keeps_alive and not request.data:
                head.body_bytes = length
                self.listener.known_heads.keep(data[:end], head)
        return data[end:]

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._target, self._pairs = b"", []
        self._is_in_head = True
        self._head_bytes = 0

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > LARGEST_HEAD_LINE:
            raise _Refused(f"a request's URL is more than {LARGEST_HEAD_LINE} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # A trailer says nothing.
        if len(self._pairs) >= MOST_HEADERS or len(name) > LARGEST_HEAD_LINE or len(value) > LARGEST_HEAD_LINE:
            raise _Refused(f"a request has at most {MOST_HEADERS} headers of {LARGEST_HEAD_LINE} bytes")
        self._pairs.append((name, value))

    def on_headers_complete(self) -> None:
        parser, pairs = self._parser, self._pairs
        self._is_in_head = False
        headers: dict[str, str] = {}
        for name, value in pairs:
            headers.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))
        method, is_old = parser.get_method().decode(), parser.get_http_version() == "1.0"
        keeps_alive = parser.should_keep_alive() and not parser.should_upgrade()
        request = self._arriving = Request(self, Head(method, self._target, pairs, headers, is_old, keeps_alive))
        self._waiting.append(request)

    def on_body(self, part: bytes) -> None:
        request = self._arriving
        if request is None or request.has_answer:
            return
        if not request.data:
            request.data = part
            return
        if isinstance(request.data, bytes):
            request.data = bytearray(request.data)
        request.data += part

    def on_message_complete(self) -> None:
        request, self._arriving = self._arriving, None
        assert request is not None
        request.is_whole = True
        if not request.head.keeps_alive:
            self._is_last = True
        if request.has_answer:
            self._idle_since, self._head_since = time.monotonic(), None
        elif request is self._current:
            request.wake()

    def _refuse(self, fault: str) -> None:
        if self._is_last and self._arriving is None:
            return
        self._is_last = True
        request, self._arriving = self._arriving, None
        if request is None or self._is_in_head:
            self._fault = fault
        elif request.has_answer:
            self.close()
        else:
            request.fault = fault  # Its answer says so.
            request.wake()

    # What requests and the listener call.

    def _begin_requests(self) -> None:
        if self._is_beginning:
            return
        self._is_beginning = True
        for _ in range(_BEGUN_AT_ONCE):
            # Answers to a client that asks on and on without reading would pile up.
            if self._current is not None or not self._waiting or self._unread_since is not None or self.is_closing:
                break
            request = self._current = self._waiting.popleft()
            self._idle_since = self._head_since = None
            self.begun_at = time.monotonic()
            try:
                self.listener.handle(request)
            except Exception as error:
                request.fail(error)
        else:
            self.loop.call_soon(self._begin_requests)
        self._is_beginning = False
        if self._fault is not None and self._current is None and not self._waiting:
            refused = Request(self, Head())
            refused.is_whole, self._current = True, refused
            text, self._fault = self._fault, None
            refused.respond(Response(400, f"400 Bad Request: {text}\n".encode(), "text/plain; charset=utf-8"))

    def end_request(self, request: Request) -> None:
        """Its answer has been sent."""
        request.has_answer = True
        # It knows the request: such a ring would keep the client's data until the next collection.
        request.on_gone = None
        if self._current is not request:
            return  # The connection has ended before.
        self._current = None
        if request.is_last:
            self._is_last = True
            self._waiting.clear()
            if (request.is_whole and request.head.method) or not self._transport.can_write_eof():
                self.close()
            else:
                # Once all is sent. Closed with something unread, the client would get a reset instead of its answer.
                self._arriving = None
                self._idle_since = self._head_since = time.monotonic()
                self._transport.write_eof()
                self.read_on()
            return
        self._idle_since = time.monotonic()
        if self._is_in_head or not request.is_whole:
            self._head_since = self._idle_since
        if not request.is_whole:
            # The rest of its body comes first, and is dropped.
            request.data = b""
        if not self._reads:
            self.read_on()
        if self._waiting or self._fault is not None:
            self._begin_requests()

    def read_on(self) -> None:
        if not (self._reads or self._waiting or self.is_closing):
            self._reads = True
            self._transport.resume_reading()

    def write(self, data: Buffer) -> None:
        if not self.is_closing:
            self._transport.write(data)

    def check_open(self) -> None:
        if self.is_closing:
            raise ConnectionResetError("the client has gone")

    async def drain(self) -> None:
        """Wait until the client has read most of what has been written. Raises: ConnectionError: it has gone."""
        if self._unread_since is not None:
            self._drained = self.loop.create_future()
            await self._drained
        self.check_open()

    @property
    def descriptor(self) -> int:
        """-1 where it has been closed."""
        connection = self._transport.get_extra_info("socket")
        return -1 if connection is None else int(connection.fileno())

    @property
    def has_request(self) -> bool:
        return self._current is not None

    @property
    def awaits_head(self) -> bool:
        """Whether a request has begun to come, or the first one is still to."""
        return self._head_since is not None and not self.is_closing

    @property
    def waits_since(self) -> float | None:
        """Since when (the loop's time) it waits for its client to read or to ask; None = it has a request, or has been
        closed."""
        if self.is_closing:
            return None
        return self._idle_since if self._unread_since is None else self._unread_since

    @property
    def body_since(self) -> float | None:
        """Since when it waits for the whole body of its request; None = it does not, or it has been closed."""
        return None if self.is_closing or self._current is None or self._current.is_whole else self.begun_at

    def is_overdue(self, now: float) -> bool:
        limits = self.listener.limits
        return (
            (self._unread_since is not None and now - self._unread_since > limits.write_seconds)
            or (self._head_since is not None and now - self._head_since > limits.head_seconds)
            or (self._idle_since is not None and now - self._idle_since > limits.idle_seconds)
        )

    def close(self) -> None:
        self.is_closing = True
        self._transport.close()

    def abort(self) -> None:
        self.is_closing = True
        self._transport.abort()
