"""Speaks HTTP/1.1 with a client: httptools parses what comes, answers go out in the order of their requests.

A request begins when its head is there, one at a time in a connection; its body may still be coming. Its handler
answers at once, later on the loop, or from a task that ends with the client's connection.

Clients send the same head again and again. A head that the parser has found to be all of a head, by the same bytes and
at the same place between two requests, is not parsed again: the parser would find the same.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import httptools

from rocserve.core.memo import Memo
from rocserve.core.tensors import Buffer

LARGEST_HEAD_LINE = 8190
"""Bytes of a URL, and of a header's name and value."""
MOST_HEADERS = 128
_LARGEST_HEAD = 128 << 10
"""Bytes that come of a head after its first ones."""
_READ_AHEAD = 1 << 20
"""Bytes of a body that are taken before anybody asks for them; then its sender has to wait."""
_BEGUN_AT_ONCE = 16
"""Requests of one connection that are begun before others have their turn."""
_WRITTEN_AT_ONCE = 256 << 10
"""Bytes of a large answer: what a client does not read is then copied to no more than this in the connection."""
_NO_HEADERS: Mapping[str, str] = {}
_REMEMBERED_HEADS = 256
_LONGEST_REMEMBERED_HEAD = 1024
"""Bytes: all of them take ten megabytes at most, when they are nothing but short headers."""
_HEAD_END = b"\r\n\r\n"
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


def path_of(target: bytes) -> str:
    """As it was sent, percent-encoded, without the query."""
    return target.partition(b"?")[0].decode("utf-8", "surrogateescape")


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


@dataclass(slots=True)
class Response:
    """An answer that is there as a whole."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Head:
    """The head of a request, or of many that came with the same bytes."""

    method: str = ""
    target: bytes = b""
    pairs: Sequence[tuple[bytes, bytes]] = ()
    """The headers as they came."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By their names in lower case; of those that came twice the first."""
    is_old: bool = False
    """HTTP/1.0, which has no chunks."""
    keeps_alive: bool = False
    body_bytes: int = 0
    """Where the connections remember it."""
    answer_headers: Mapping[str, str] | None = None
    """Of any answer to it."""
    handle: Callable[[Request], None] | None = None
    """Handles its requests, once what it says has been worked out."""

    @property
    def path(self) -> str:
        return path_of(self.target)


@dataclass(eq=False)
class Request:
    """One request of a client. All calls are made on the loop."""

    # Without slots the values of the class need not be set for each.
    _connection: Connection
    head: Head
    data: bytes | bytearray = b""
    """What has come of the body."""
    is_whole: bool = False
    is_last: bool = field(default=False, init=False)
    """Its answer, which has begun to be sent, is the last of the connection."""
    fault: str | None = field(default=None, init=False)
    """Why the rest of the body cannot be read."""
    has_answer: bool = field(default=False, init=False)
    """It has been sent, to its end."""
    on_gone: Callable[[], None] | None = field(default=None, init=False)
    """Called when the client goes before its answer has been sent."""
    _taken: int = field(default=0, init=False)
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _chunked: bool = field(default=False, init=False)
    _has_begun: bool = field(default=False, init=False)
    """A part of its answer has been sent."""

    @property
    def began_at(self) -> float:
        """time.monotonic() seconds."""
        return self._connection.begun_at

    @property
    def remote(self) -> str:
        """The client's address, empty where it has gone."""
        return self._connection.remote

    async def more(self) -> None:
        """Wait until more of the body has come than at the last call, or all of it, or there is a fault."""
        while self._taken == len(self.data) and not self.is_whole and self.fault is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._connection.read_on()
            await self._waiter
        self._taken = len(self.data)

    @property
    def unread_bytes(self) -> int:
        return len(self.data) - self._taken

    def wake(self) -> None:
        """More of it has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def invite(self) -> None:
        """A client that asks first may send its body."""
        if self.head.headers.get("expect", "").lower() == "100-continue":
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def run(self, answering: Coroutine[Any, Any, Response | None]) -> None:
        """Have a task answer, which is cancelled when the client goes; None = it has been sent. A ConnectionError of it
        ends the connection; another error is answered."""
        self._task = self._connection.loop.create_task(self._run(answering))
        self._connection.common.tasks.add(self._task)
        self._task.add_done_callback(self._connection.common.tasks.discard)

    async def _run(self, answering: Coroutine[Any, Any, Response | None]) -> None:
        try:
            response = await answering
        except ConnectionError:
            self._connection.abort()
        except Exception as error:
            self.fail(error)
        else:
            if response is not None:
                self.respond(response)

    def respond(self, response: Response) -> None:
        body = response.body
        head = self._head(response.status, response.content_type, response.headers, len(body))
        self._connection.write(head if self.head.method == "HEAD" else head + body)
        self._connection.end_request(self)

    def fail(self, error: Exception) -> None:
        response = self._connection.common.failure(self, error)
        if self._has_begun:
            self._connection.abort()
        else:
            self.respond(response)

    async def respond_in_parts(
        self, parts: Sequence[Buffer], content_type: str, headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        """A large answer, which is sent as it is read.

        Raises:
            ConnectionError: the client has gone.
        """
        self._connection.check_open()
        self._has_begun = True
        self._connection.write(self._head(200, content_type, headers, sum(map(len, parts))))
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _WRITTEN_AT_ONCE):
                self._connection.write(view[start : start + _WRITTEN_AT_ONCE])
                await self._connection.drain()
        self._connection.end_request(self)

    def begin_stream(self, status: int, content_type: str, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """Of an answer whose length is not known; raises as `respond_in_parts` does."""
        self._connection.check_open()
        self._has_begun = True
        if self.head.is_old:
            self.is_last = True
        else:
            self._chunked = True
            headers = {**headers, "Transfer-Encoding": "chunked"}
        self._connection.write(self._head(status, content_type, headers, None))

    async def send(self, part: bytes) -> None:
        self._connection.check_open()
        self._connection.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunked else part)
        await self._connection.drain()

    def end_stream(self) -> None:
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        self._connection.end_request(self)

    def _head(self, status: int, content_type: str, headers: Mapping[str, str], length: int | None) -> bytes:
        connection, common, head = self._connection, self._connection.common, self.head
        now = time.monotonic()
        if not head.keeps_alive or common.closes_after_answers or self.fault is not None or now > connection.ends_at:
            self.is_last = True
        if head.answer_headers:
            headers = {**headers, **head.answer_headers}
        lines = _first_lines(status, content_type, tuple(headers.items()), head.is_old, self.is_last)
        if length is not None:
            lines += b"Content-Length: %d\r\n" % length
        return lines + common.last_lines(now)

    def leave(self) -> None:
        """The client has gone."""
        if self._task is not None:
            self._task.cancel()
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()


@lru_cache(_REMEMBERED_HEADS)
def _first_lines(
    status: int, content_type: str, headers: tuple[tuple[str, str], ...], is_old: bool, is_last: bool
) -> bytes:
    """Of the head of an answer: all but its length and what the server says of itself."""
    lines = [f"HTTP/{'1.0' if is_old else '1.1'} {status} {_PHRASES[status]}", f"Content-Type: {content_type}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if is_last or is_old:
        lines.append(f"Connection: {'close' if is_last else 'keep-alive'}")
    return "".join([f"{line}\r\n" for line in lines]).encode("utf-8", "surrogateescape")


class Connections:
    """All of one listener, and what they have in common."""

    def __init__(
        self,
        handle: Callable[[Request], None],
        failure: Callable[[Request, Exception], Response],
        age_seconds: float,
    ) -> None:
        """
        Args:
            handle: answers a request, at once or later.
            failure: the answer to one that could not be handled.
            age_seconds: see ConnectionLimits.
        """
        self.handle = handle
        self.failure = failure
        self.age_seconds = age_seconds
        self.open: set[Connection] = set()
        """Those that are closing too, until they are closed."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.closes_after_answers = False
        """An answer is the last of its connection."""
        self.is_ending = False
        """No connection is taken any more."""
        self.on_made: Callable[[Connection], None] = lambda connection: None
        self.none_open = asyncio.Event()
        self.none_open.set()
        self.known_heads = Memo[bytes, Head](_REMEMBERED_HEADS)
        """By their bytes; of requests that keep their connection and have their body's length."""
        self._last_lines = b""
        self._last_lines_until = 0.0

    def last_lines(self, now: float) -> bytes:
        """Of the head of each answer; `now`: time.monotonic() seconds."""
        if now >= self._last_lines_until:
            second = time.time()
            self._last_lines_until = now + 1 - second % 1
            self._last_lines = f"Date: {formatdate(second, usegmt=True)}\r\nServer: rocserve\r\n\r\n".encode()
        return self._last_lines


class _Refused(Exception):
    """The client asks too much of a request's head."""


class Connection(asyncio.Protocol):
    """One connection of a client: since when it waits for its client, and for what. All calls are made on the loop."""

    def __init__(self, common: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self.common = common
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
        if self.common.age_seconds:
            # Those that began together do not end together; gRPC's core spreads them so.
            self.ends_at = self._idle_since + self.common.age_seconds * random.uniform(0.9, 1.1)
        self.common.open.add(self)
        self.common.none_open.clear()
        self.common.on_made(self)

    def eof_received(self) -> None:
        """asyncio closes it then."""
        self.is_closing = True

    def connection_lost(self, error: Exception | None) -> None:
        self.common.open.discard(self)
        if not self.common.open:
            self.common.none_open.set()
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
                data = self._take_known(data)
        if data:
            self._parse(data)
        if self._waiting or self._fault is not None:
            self._begin_requests()
        if self._waiting or (self._arriving is not None and self._arriving.unread_bytes > _READ_AHEAD):
            self._pause_reading()

    def _take_known(self, data: bytes) -> bytes:
        """Between two requests: take those that are whole and have a remembered head; returns what is behind them."""
        known, begin = self.common.known_heads, 0
        while begin < len(data):
            end = data.find(_HEAD_END, begin) + len(_HEAD_END)
            head = known.get(data[begin:end])
            if head is None or end + head.body_bytes > len(data):
                break
            begin = end + head.body_bytes
            self._waiting.append(Request(self, head, data[end:begin], True))
        return data[begin:]

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
                self.common.known_heads.keep(data[:end], head)
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
            self._wait_for_request()
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
                self.common.handle(request)
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
            self._close(request)
            return
        self._wait_for_request()
        if not request.is_whole:
            # The rest of its body comes first, and is dropped.
            request.data = b""
            self._head_since = self._idle_since
        if not self._reads:
            self.read_on()
        if self._waiting or self._fault is not None:
            self._begin_requests()

    def _wait_for_request(self) -> None:
        self._idle_since = time.monotonic()
        self._head_since = self._idle_since if self._is_in_head else None

    def _close(self, request: Request) -> None:
        """Once all is sent. Closed with something unread, the client would get a reset instead of its answer."""
        if (request.is_whole and request.head.method) or not self._transport.can_write_eof():
            self.close()
        else:
            self._arriving = None
            self._idle_since = self._head_since = time.monotonic()
            self._transport.write_eof()
            self.read_on()

    def read_on(self) -> None:
        if not (self._reads or self._waiting or self.is_closing):
            self._reads = True
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        if self._reads and not self.is_closing:
            self._reads = False
            self._transport.pause_reading()

    def write(self, data: Buffer) -> None:
        if not self.is_closing:
            self._transport.write(data)

    def check_open(self) -> None:
        if self.is_closing:
            raise ConnectionResetError("the client has gone")

    async def drain(self) -> None:
        """Wait until the client has read most of what has been written.

        Raises:
            ConnectionError: it has gone.
        """
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

    def is_overdue(self, limits: ConnectionLimits, now: float) -> bool:
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
