"""Speaks HTTP/1.1 on one connection: httptools parses requests, and answers go out in the order of their requests.

A request begins when its head has come, one at a time per connection; its body may still be coming. Its handler answers
immediately, later on the loop, or from a task that ends with the client's connection.

Clients often send the same head. If the parser has found certain bytes between two requests to be exactly one head, the
same bytes at such a place are not parsed again, because the result would be the same.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import httptools

from rocserve.frontends.http.request import (
    ANSWERED,
    LARGEST_HEAD_LINE,
    Head,
    HttpError,
    Request,
    Serving,
    error_response,
)
from rocserve.frontends.http.wire import Wire

_MOST_HEADERS = 128
_LARGEST_HEAD = 128 << 10
"""Bytes of a head without its first piece, of a chunk's line, or of a trailer. The parser keeps them in memory."""
_HEAD_END = b"\r\n\r\n"


class _Refused(Exception):
    """The head of a request exceeds a limit."""


class Expects(enum.Enum):
    """The kind of a client's next bytes."""

    FIRST_REQUEST = enum.auto()
    NEXT_REQUEST = enum.auto()
    HEAD = enum.auto()
    """The rest of a head."""
    BODY = enum.auto()
    """The rest of a body, or of its trailers."""
    NOTHING = enum.auto()
    """Parsing has stopped, because the client or the server wants no further request on this connection."""


# Python 3.11 takes five times as long to find a member in the class.
_FIRST_REQUEST, _NEXT_REQUEST, _HEAD, _BODY, _NOTHING = Expects
_BETWEEN_REQUESTS = (_NEXT_REQUEST, _FIRST_REQUEST)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of HTTP connections."""

    head_seconds: float = 10.0
    """From the first byte of a request's head to its end; for the first request, from the beginning of the connection.
    The TLS handshake before it has the same time, and so has the rest of a body whose request has been answered."""
    idle_seconds: float = 75.0
    """A connection without a request is closed after this. A little longer than proxies keep their connections, usually
    a minute, so that proxies close first."""
    age_seconds: float = 0.0
    """The next answer after 0.9 to 1.1 times this is the connection's last; 0 = never."""
    write_seconds: float = 60.0
    """Time for a client to read what waits in the connection, which is only a small part of a large answer."""
    most: int | None = None
    """Connections at a time. One more closes a connection that waits for its client. None = any number."""
    most_descriptors: int | None = None
    """A connection with a higher descriptor is one too many: the server needs the others, for example for workers."""


class Connection(asyncio.Protocol):
    """One connection of a client. It knows since when it waits for the client, and for what. On the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        serving: Serving,
        limits: ConnectionLimits,
        on_open: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.wire = Wire(loop)
        self._serving = serving
        self._limits = limits
        self._on_open = on_open
        self._on_lost = on_lost
        self._expects = _FIRST_REQUEST
        self.since = 0.0
        """time.monotonic() seconds: when the current request began; without one, since when the client must send."""
        self._parser = httptools.HttpRequestParser(self)
        self._incoming: Request | None = None
        """The request whose body is being parsed."""
        self._waiting: deque[Request] = deque()
        """Requests after the current one whose heads have come."""
        self.current: Request | None = None
        self.fault: str | None = None
        """The reason why parsing has stopped. The client gets it in the answer to the incomplete request, or after all
        answers."""
        self._bodiless_bytes = 0
        """Bytes that have come since the beginning of a head, or since the last part of a body."""
        self._unparsed_bytes = 0
        """Outstanding bytes of a body that the parser leaves out, because its head offers another protocol."""
        self._is_beginning = False
        self._target = b""
        self._pairs: list[tuple[bytes, bytes]] = []

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.wire.open(transport, self._limits.age_seconds)
        self.since = time.monotonic()
        self._on_open(self)

    def eof_received(self) -> None:
        """A client that sends no more counts as gone: the transport closes the connection."""
        self.wire.is_open = False

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(self)
        self.wire.is_open = False
        self._incoming = None
        self._waiting.clear()
        if self.current is not None:
            self.current.leave()
            self.current = None
        # The parser refers to this connection; the cycle would keep both until the next garbage collection.
        del self._parser

    def pause_writing(self) -> None:
        self.wire.pause_writing()

    def resume_writing(self) -> None:
        self.wire.resume_writing()
        self._begin_requests()

    def data_received(self, data: bytes) -> None:
        expects = self._expects if self.wire.is_open else _NOTHING
        if expects in _BETWEEN_REQUESTS:
            # Take complete requests whose heads are remembered.
            known, begin = self._serving.known_heads, 0
            while begin < len(data):
                end = data.find(_HEAD_END, begin) + len(_HEAD_END)
                head = known.get(data[begin:end])
                if head is None or end + head.body_bytes > len(data):
                    break
                begin = end + head.body_bytes
                self._waiting.append(self._request(head, data[end:begin], True))
                self._expects = _NEXT_REQUEST
            data = data[begin:]
        elif expects is not _HEAD and expects is not _BODY:
            return  # Unread bytes would cause a reset, and the client would not get its answer.
        if data:
            self._parse(data)
        if self._waiting or self.fault is not None:
            self._begin_requests()
        incoming = self._incoming
        # At most 1 MiB of a body is read in advance; then the sender must wait.
        is_ahead = self._waiting or (incoming is not None and len(incoming.data) - incoming.seen_bytes > 1 << 20)
        if is_ahead:
            self.wire.pause_reading()

    def _parse(self, data: bytes) -> None:
        self._bodiless_bytes += len(data)
        try:
            try:
                if self._unparsed_bytes:
                    self._take_unparsed(data)
                else:
                    if self._expects in _BETWEEN_REQUESTS:
                        data = self._parse_head(data)
                    self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._take_unparsed(data[upgrade.args[0] :])
            if self._bodiless_bytes > _LARGEST_HEAD and self._expects in (_HEAD, _BODY):
                what = "head" if self._expects is _HEAD else "trailer or chunk extension"
                raise httptools.HttpParserError(f"a request's {what} is more than {_LARGEST_HEAD} bytes")
        except httptools.HttpParserError as error:
            self._refuse(str(error.__context__ if isinstance(error.__context__, _Refused) else error))
        if self._incoming is not None:
            self._incoming.wake()

    def _take_unparsed(self, data: bytes) -> None:
        """Take a part of a body that the parser regards as the other protocol's. Its request is answered in HTTP/1.1,
        as the last of the connection."""
        if not self._unparsed_bytes:
            return
        part = data[: self._unparsed_bytes]
        self._unparsed_bytes -= len(part)
        self.on_body(part)
        if not self._unparsed_bytes:
            self.on_message_complete()

    def _parse_head(self, data: bytes) -> bytes:
        """Parse a head that is complete, and remember it if it was exactly one head. Returns the bytes after it."""
        end = data.find(_HEAD_END) + len(_HEAD_END)
        # If the remembered heads consist of short headers only, they take ten megabytes in all.
        if not len(_HEAD_END) <= end <= 1024:
            return data
        begun = len(self._waiting)
        self._parser.feed_data(data[:end])
        if len(self._waiting) == begun + 1 and self._expects is not _HEAD:
            request = self._waiting[-1]
            head = request.head
            length = int(head.headers.get("content-length", "0"))
            has_length = "transfer-encoding" not in head.headers and request.is_complete == (length == 0)
            if has_length and head.keeps_alive and not request.data:
                head.body_bytes = length
                self._serving.known_heads.keep(data[:end], head)
        return data[end:]

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._target, self._pairs = b"", []
        if self._expects is _NEXT_REQUEST and self.current is None:
            self.since = time.monotonic()
        self._expects = _HEAD
        self._bodiless_bytes = 0

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > LARGEST_HEAD_LINE:
            raise _Refused(f"a request's URL is more than {LARGEST_HEAD_LINE} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._expects is not _HEAD:
            return  # Trailers are ignored.
        if len(self._pairs) >= _MOST_HEADERS or len(name) > LARGEST_HEAD_LINE or len(value) > LARGEST_HEAD_LINE:
            raise _Refused(f"a request has at most {_MOST_HEADERS} headers of {LARGEST_HEAD_LINE} bytes")
        # The parser has removed the spaces before the value.
        self._pairs.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        parser, pairs = self._parser, self._pairs
        headers: dict[str, str] = {}
        for name, value in pairs:
            key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
            if key in ("accept", "accept-encoding") and key in headers:
                headers[key] += f", {text}"  # A list may be divided into lines. Of other headers the first line counts.
            headers.setdefault(key, text)
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise _Refused("expected Transfer-Encoding chunked, got another; send chunks or a Content-Length")
        if parser.should_upgrade():
            if "transfer-encoding" in headers:
                raise _Refused("a request that offers another protocol (Upgrade) must state its Content-Length")
            self._unparsed_bytes = int(headers.get("content-length", "0"))
        method, is_http10 = parser.get_method().decode(), parser.get_http_version() == "1.0"
        keeps_alive = parser.should_keep_alive() and not parser.should_upgrade()
        request = self._incoming = self._request(Head(method, self._target, pairs, headers, is_http10, keeps_alive))
        self._waiting.append(request)
        self._expects = _BODY

    def on_body(self, part: bytes) -> None:
        self._bodiless_bytes = 0
        request = self._incoming
        if request is not None and request.answer is not ANSWERED:
            request.append(part)

    def on_message_complete(self) -> None:
        request = self._incoming
        assert request is not None
        if self._unparsed_bytes:
            return
        self._incoming = None
        request.is_complete = True
        self._expects = _NEXT_REQUEST if request.head.keeps_alive else _NOTHING
        if request.answer is ANSWERED:
            self.since = time.monotonic()
        elif request is self.current:
            request.wake()

    def _refuse(self, fault: str) -> None:
        if self._expects is _NOTHING:
            return
        self._expects = _NOTHING
        request, self._incoming = self._incoming, None
        if request is not None and request.answer is ANSWERED:
            self.wire.close()
            return
        self.fault = fault
        if request is not None:
            request.fault = fault
            request.wake()

    # Called by requests and the listener.

    def _request(self, head: Head, data: bytes = b"", is_complete: bool = False) -> Request:
        return Request(self.wire, self._serving, self._end_request, head, data, is_complete)

    def _begin_requests(self) -> None:
        if self._is_beginning:
            return
        self._is_beginning = True
        # At most 16 requests, then other connections have their turn.
        for _ in range(16):
            # If the client does not read, no further request begins, because the answers would pile up.
            wire = self.wire
            if self.current is not None or not self._waiting or wire.unread_since is not None or not wire.is_open:
                break
            request = self.current = self._waiting.popleft()
            self.since = request.began_at = time.monotonic()
            try:
                self._serving.handle(request)
            except Exception as error:
                request.fail(error)
        else:
            self.wire.loop.call_soon(self._begin_requests)
        self._is_beginning = False
        if self.fault is not None and self.current is None and not self._waiting:
            refused = self.current = self._request(Head(), is_complete=True)
            text, self.fault = self.fault, None
            refused.respond(error_response(HttpError(400, f"400 Bad Request: {text}")))

    def _end_request(self, request: Request) -> None:
        request.answer = ANSWERED
        # The callback refers to the request; the cycle would keep the client's data until the next garbage collection.
        request.on_gone = None
        if self.current is not request:
            return  # The connection has ended before.
        self.current = None
        self.since = time.monotonic()
        if request.is_last:
            self._waiting.clear()
            self._incoming = self.fault = None
            # A connection closed with unread bytes would be reset, and the client would not get its answer.
            if (request.is_complete and request.head.method) or not self.wire.end_writing():
                self.wire.close()
            else:
                self._expects = _NOTHING
                self.wire.resume_reading()
            return
        if not request.is_complete:
            # The rest of the body comes first, and is dropped.
            request.data = b""
        if not self._waiting:
            self.wire.resume_reading()
        if self._waiting or self.fault is not None:
            self._begin_requests()

    @property
    def awaits_request(self) -> bool:
        """Return whether the connection waits for its first request, or for the rest of a request."""
        return self.wire.is_open and self.current is None and self._expects is not _NEXT_REQUEST

    @property
    def waits_since(self) -> float | None:
        """Return since when (the loop's time) the connection waits for the client to read or to send a request; None if
        it waits for neither, or is closing."""
        if self.wire.unread_since is not None and self.wire.is_open:
            return self.wire.unread_since
        return self.since if self.current is None and self.wire.is_open else None

    @property
    def body_since(self) -> float | None:
        """Return since when the connection waits for its request's body; None if it does not wait, or is closing."""
        return self.since if self.wire.is_open and self.current is not None and not self.current.is_complete else None

    def is_overdue(self, now: float) -> bool:
        limits = self._limits
        if self.wire.unread_since is not None:
            return now - self.wire.unread_since > limits.write_seconds
        if self.current is not None or not self.wire.is_open:
            return False
        return now - self.since > (limits.idle_seconds if self._expects is _NEXT_REQUEST else limits.head_seconds)
