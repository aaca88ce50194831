"""One connection of HTTP/1.1: httptools parses what comes, answers go out in the order of their requests.

A request begins when its head is there, one at a time in a connection; its body may still be coming. Its handler
answers at once, later on the loop, or from a task that ends with the client's connection.

Clients send the same head again and again. A head that the parser has found to be all of a head, by the same bytes and
at the same place between two requests, is not parsed again: the parser would find the same.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

import httptools

from rocserve.core.tensors import Buffer
from rocserve.frontends.http.request import LARGEST_HEAD_LINE, Head, Request, Response

if TYPE_CHECKING:
    from rocserve.frontends.http.listener import HttpListener

_MOST_HEADERS = 128
_LARGEST_HEAD = 128 << 10
"""Bytes that come of a head after its first ones, or between two parts of a body or behind the last: the parser keeps
what it has of a trailer."""
_READ_AHEAD = 1 << 20
"""Bytes of a body that are taken before anybody asks for them; then its sender has to wait."""
_BEGUN_AT_ONCE = 16
"""Requests of one connection that are begun before others have their turn."""
_LONGEST_REMEMBERED_HEAD = 1024
"""Bytes: all of them take ten megabytes at most, when they are nothing but short headers."""
_HEAD_END = b"\r\n\r\n"
_FRAMING = (b"content-length", b"transfer-encoding")
_RESET_SECONDS = 0.05
"""Between two looks whether a client that sends no more is gone."""


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
        self._upgrading: Request | None = None
        """It asks for another protocol: its head has been parsed, and its body is still to be."""
        self._waiting: deque[Request] = deque()
        """Requests behind the one in progress; their heads are there."""
        self.current: Request | None = None
        self._fault: str | None = None
        """Why nothing more is parsed, which is answered behind the requests before it."""
        self._is_last = False
        """Nothing more is parsed: the client or the server wants no further request in this connection."""
        self._has_ended = False
        """Its client sends no more, and awaits answers."""
        self._is_in_head = False
        self._bodiless_bytes = 0
        """That came since a head began, or a part of a body came."""
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
        self.listener.arriving.pop(self, None)

    def eof_received(self) -> bool:
        """The client sends no more. It may be gone, or await answers to what it has sent whole: then the connection
        stays open for them. In HTTP/1.0 nothing can be sent that would tell one from the other, and with TLS asyncio
        keeps none open."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving in self._waiting:
            self._waiting.remove(arriving)
        self._is_last = True
        awaited = self.current or next(iter(self._waiting), None)
        if awaited is None or not awaited.is_whole or awaited.head.is_old or not self._transport.can_write_eof():
            self.is_closing = True
            return False
        self._has_ended = True
        awaited.probe()
        self._look_for_reset()
        return True

    def _look_for_reset(self) -> None:
        """A client that is gone answers with a reset, and asyncio, which reads no more, does not see it."""
        if self.is_closing:
            return
        if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
        else:
            self.loop.call_later(_RESET_SECONDS, self._look_for_reset)

    def connection_lost(self, error: Exception | None) -> None:
        self.listener.open.discard(self)
        self._is_last = self.is_closing = True
        self._waiting.clear()
        if self.current is not None:
            self.current.leave()
            self.current = None
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
        if self._head_since is None and self._idle_since is not None:
            self._head_since = time.monotonic()
        self._bodiless_bytes += len(data)
        try:
            try:
                if self._arriving is None and not self._is_in_head:
                    data = self._parse_head(data)
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # A new one, for this one may have seen that its message is the last.
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(self._plain_head() + data[upgrade.args[0] :])
            if self._bodiless_bytes > _LARGEST_HEAD and (self._is_in_head or self._arriving is not None):
                what = "head" if self._is_in_head else "trailer, or what is said of a chunk,"
                raise httptools.HttpParserError(f"a request's {what} is more than {_LARGEST_HEAD} bytes")
        except httptools.HttpParserError as error:
            self._refuse(str(error.__context__ if isinstance(error.__context__, _Refused) else error))
        if self._arriving is not None:
            self._arriving.wake()

    def _plain_head(self) -> bytes:
        """A head by which the parser reads the body of a request that asks for another protocol too: it takes what
        comes behind its own head for that. Such a request is answered in HTTP/1.1, the last in the connection."""
        assert self._upgrading is not None
        lengths = [pair for pair in self._upgrading.head.pairs if pair[0].lower() in _FRAMING]
        return b"".join(
            [b"POST / HTTP/1.1\r\nConnection: close\r\n", *(b"%b: %b\r\n" % pair for pair in lengths), b"\r\n"]
        )

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
        self._bodiless_bytes = 0

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > LARGEST_HEAD_LINE:
            raise _Refused(f"a request's URL is more than {LARGEST_HEAD_LINE} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # A trailer says nothing.
        if len(self._pairs) >= _MOST_HEADERS or len(name) > LARGEST_HEAD_LINE or len(value) > LARGEST_HEAD_LINE:
            raise _Refused(f"a request has at most {_MOST_HEADERS} headers of {LARGEST_HEAD_LINE} bytes")
        # The parser has taken off the spaces in front.
        self._pairs.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        parser, pairs = self._parser, self._pairs
        self._is_in_head = False
        if self._upgrading is not None:
            self._arriving, self._upgrading = self._upgrading, None
            return
        headers: dict[str, str] = {}
        for name, value in pairs:
            headers.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise _Refused("a request's body may come in chunks, but in no other Transfer-Encoding")
        method, is_old = parser.get_method().decode(), parser.get_http_version() == "1.0"
        keeps_alive = parser.should_keep_alive() and not parser.should_upgrade()
        request = self._arriving = Request(self, Head(method, self._target, pairs, headers, is_old, keeps_alive))
        self._waiting.append(request)

    def on_body(self, part: bytes) -> None:
        self._bodiless_bytes = 0
        request = self._arriving
        if request is not None and not request.has_answer:
            request.take(part)

    def on_message_complete(self) -> None:
        request, self._arriving = self._arriving, None
        assert request is not None
        if self._parser.should_upgrade():
            self._upgrading = request
            return
        request.is_whole = True
        if not request.head.keeps_alive:
            self._is_last = True
        if request.has_answer:
            self._idle_since, self._head_since = time.monotonic(), None
        elif request is self.current:
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
            if self.current is not None or not self._waiting or self._unread_since is not None or self.is_closing:
                break
            request = self.current = self._waiting.popleft()
            self._idle_since = self._head_since = None
            self.begun_at = time.monotonic()
            try:
                self.listener.handle(request)
            except Exception as error:
                request.fail(error)
        else:
            self.loop.call_soon(self._begin_requests)
        self._is_beginning = False
        if self._fault is not None and self.current is None and not self._waiting:
            refused = Request(self, Head())
            refused.is_whole, self.current = True, refused
            text, self._fault = self._fault, None
            refused.respond(Response(400, f"400 Bad Request: {text}\n".encode(), "text/plain; charset=utf-8"))

    def end_request(self, request: Request) -> None:
        """Its answer has been sent."""
        request.has_answer = True
        # It knows the request: such a ring would keep the client's data until the next collection.
        request.on_gone = None
        if self.current is not request:
            return  # The connection has ended before.
        self.current = None
        if request.is_last or (self._has_ended and not self._waiting and self._fault is None):
            self._is_last = True
            self._waiting.clear()
            if self._has_ended or (request.is_whole and request.head.method) or not self._transport.can_write_eof():
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
        return None if self.is_closing or self.current is None or self.current.is_whole else self.begun_at

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
