"""Speaks HTTP/1.1 on one connection: httptools parses requests, and answers go out in the order of their requests.

A request begins when its head has come, one at a time per connection; its body may still be coming. Its handler answers
immediately, later on the loop, or from a task that ends with the client's connection.

Clients often send the same head. If the parser has found certain bytes between two requests to be exactly one head, the
same bytes at such a place are not parsed again, because the result would be the same.
"""

from __future__ import annotations

import asyncio
import enum
import math
import random
import time
from collections import deque
from typing import TYPE_CHECKING

import httptools

from rocserve.core.tensors import Buffer
from rocserve.frontends.http.request import ANSWERED, LARGEST_HEAD_LINE, Head, HttpError, Request, error_response

if TYPE_CHECKING:
    from rocserve.frontends.http.listener import HttpListener

_MOST_HEADERS = 128
_LARGEST_HEAD = 128 << 10
"""Bytes of a head without its first piece, of a chunk's line, or of a trailer. The parser keeps them in memory."""
_READ_AHEAD = 1 << 20
"""Bytes of a body that are read before anybody asks for them; after that the sender must wait."""
_BEGUN_PER_ROUND = 16
"""Requests of one connection that may begin before other connections have their turn."""
_LONGEST_REMEMBERED_HEAD = 1024
"""Bytes. If the remembered heads consist of short headers only, they take ten megabytes in all."""
_HEAD_END = b"\r\n\r\n"


class _Refused(Exception):
    """The head of a request exceeds a limit."""


class Expects(enum.Enum):
    """What a client's next bytes are."""

    FIRST_REQUEST = enum.auto()
    NEXT_REQUEST = enum.auto()
    HEAD = enum.auto()
    """The rest of a head."""
    BODY = enum.auto()
    """The rest of a body, or of its trailers."""
    NOTHING = enum.auto()
    """Parsing has stopped, because the client or the server wants no further request on this connection."""
    END = enum.auto()
    """Nothing is read or written any more, or the connection has not been made yet."""


# Python 3.11 takes five times as long to find a member in the class.
_FIRST_REQUEST, _NEXT_REQUEST, _HEAD, _BODY, _NOTHING, _END = Expects
_BETWEEN_REQUESTS = (_NEXT_REQUEST, _FIRST_REQUEST)


class Connection(asyncio.Protocol):
    """One connection of a client. It knows since when it waits for the client, and for what. On the event loop."""

    def __init__(self, listener: HttpListener, loop: asyncio.AbstractEventLoop) -> None:
        self.listener = listener
        self.remote = ""
        self.ends_at = math.inf
        """time.monotonic() seconds after which the next answer is the last."""
        self.loop = loop
        self._transport: asyncio.Transport
        self._expects = _END
        self.since = 0.0
        """time.monotonic() seconds: when the current request began; without one, since when the client must send."""
        self._unread_since: float | None = None
        """time.monotonic() seconds since when the client must read."""
        self._reads = True
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
        """Bytes to come of a body that the parser leaves out, because its head offers another protocol."""
        self._is_beginning = False
        self._target = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._drained: asyncio.Future[None] | None = None

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._expects = _FIRST_REQUEST
        peer = transport.get_extra_info("peername")
        self.remote = str(peer[0]) if isinstance(peer, tuple) else ""
        self.since = time.monotonic()
        age_seconds = self.listener.limits.age_seconds
        if age_seconds:
            # Connections that began together must not end together; gRPC's core spreads them in the same way.
            self.ends_at = self.since + age_seconds * random.uniform(0.9, 1.1)
        self.listener.connections.add(self)
        self.listener.arriving.pop(self, None)

    def eof_received(self) -> None:
        """A client that sends no more counts as gone: the transport closes the connection."""
        self._expects = _END

    def connection_lost(self, error: Exception | None) -> None:
        self.listener.connections.discard(self)
        self._expects = _END
        self._incoming = None
        self._waiting.clear()
        if self.current is not None:
            self.current.leave()
            self.current = None
        # The parser refers to this connection; the cycle would keep both until the next garbage collection.
        del self._parser

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()

    def resume_writing(self) -> None:
        self._unread_since = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._begin_requests()

    def data_received(self, data: bytes) -> None:
        expects = self._expects
        if expects in _BETWEEN_REQUESTS:
            # Take complete requests whose heads are remembered.
            known, begin = self.listener.known_heads, 0
            while begin < len(data):
                end = data.find(_HEAD_END, begin) + len(_HEAD_END)
                head = known.get(data[begin:end])
                if head is None or end + head.body_bytes > len(data):
                    break
                begin = end + head.body_bytes
                self._waiting.append(Request(self, head, data[end:begin], True))
                self._expects = _NEXT_REQUEST
            data = data[begin:]
        elif expects is not _HEAD and expects is not _BODY:
            return  # Unread bytes would cause a reset, and the client would not get its answer.
        if data:
            self._parse(data)
        if self._waiting or self.fault is not None:
            self._begin_requests()
        incoming = self._incoming
        is_ahead = self._waiting or (incoming is not None and len(incoming.data) - incoming.seen_bytes > _READ_AHEAD)
        if is_ahead and self._reads and self._expects is not _END:
            self._reads = False
            self._transport.pause_reading()

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
        if not len(_HEAD_END) <= end <= _LONGEST_REMEMBERED_HEAD:
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
                self.listener.known_heads.keep(data[:end], head)
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
            headers.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise _Refused("a request's body may come in chunks, but in no other Transfer-Encoding")
        if parser.should_upgrade():
            if "transfer-encoding" in headers:
                raise _Refused("a request that offers another protocol (Upgrade) must state its Content-Length")
            self._unparsed_bytes = int(headers.get("content-length", "0"))
        method, is_http10 = parser.get_method().decode(), parser.get_http_version() == "1.0"
        keeps_alive = parser.should_keep_alive() and not parser.should_upgrade()
        request = self._incoming = Request(self, Head(method, self._target, pairs, headers, is_http10, keeps_alive))
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
            self.close()
            return
        self.fault = fault
        if request is not None:
            request.wake()

    # Called by requests and the listener.

    def _begin_requests(self) -> None:
        if self._is_beginning:
            return
        self._is_beginning = True
        for _ in range(_BEGUN_PER_ROUND):
            # If the client does not read, no further request begins, because the answers would pile up.
            if self.current is not None or not self._waiting or self._unread_since is not None or self._expects is _END:
                break
            request = self.current = self._waiting.popleft()
            self.since = time.monotonic()
            try:
                self.listener.handle(request)
            except Exception as error:
                request.fail(error)
        else:
            self.loop.call_soon(self._begin_requests)
        self._is_beginning = False
        if self.fault is not None and self.current is None and not self._waiting:
            refused = self.current = Request(self, Head(), is_complete=True)
            text, self.fault = self.fault, None
            refused.respond(error_response(HttpError(400, f"400 Bad Request: {text}")))

    def end_request(self, request: Request) -> None:
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
            if (
                self._expects is _END
                or (request.is_complete and request.head.method)
                or not self._transport.can_write_eof()
            ):
                self.close()
            else:
                # Ends only the writing side. A connection closed with unread bytes would be reset, and the client would
                # not get its answer.
                self._expects = _NOTHING
                self._transport.write_eof()
                self.resume_reading()
            return
        if not request.is_complete:
            # The rest of the body comes first, and is dropped.
            request.data = b""
        if not self._reads:
            self.resume_reading()
        if self._waiting or self.fault is not None:
            self._begin_requests()

    def resume_reading(self) -> None:
        if not (self._reads or self._waiting or self._expects is _END):
            self._reads = True
            self._transport.resume_reading()

    def write(self, data: Buffer) -> None:
        if self._expects is not _END:
            self._transport.write(data)

    def check_open(self) -> None:
        if self._expects is _END:
            raise ConnectionResetError("the client has gone")

    async def drain(self) -> None:
        """Wait until the client has read most of what was written. Raises ConnectionError if the client has gone."""
        if self._unread_since is not None:
            self._drained = self.loop.create_future()
            await self._drained
        self.check_open()

    @property
    def descriptor(self) -> int:
        """-1 if the connection has been closed."""
        connection = self._transport.get_extra_info("socket")
        return -1 if connection is None else int(connection.fileno())

    @property
    def is_open(self) -> bool:
        return self._expects is not _END

    @property
    def awaits_request(self) -> bool:
        """Return whether the connection waits for its first request, or for the rest of a request."""
        return self.current is None and self._expects not in (_NEXT_REQUEST, _END)

    @property
    def waits_since(self) -> float | None:
        """Return since when (the loop's time) the connection waits for the client to read or to send a request; None if
        it waits for neither, or is closing."""
        if self._unread_since is not None and self.is_open:
            return self._unread_since
        return self.since if self.current is None and self.is_open else None

    @property
    def body_since(self) -> float | None:
        """Return since when the connection waits for its request's body; None if it does not wait, or is closing."""
        return self.since if self.is_open and self.current is not None and not self.current.is_complete else None

    def is_overdue(self, now: float) -> bool:
        limits = self.listener.limits
        if self._unread_since is not None:
            return now - self._unread_since > limits.write_seconds
        if self.current is not None or not self.is_open:
            return False
        return now - self.since > (limits.idle_seconds if self._expects is _NEXT_REQUEST else limits.head_seconds)

    def close(self) -> None:
        self._expects = _END
        self._transport.close()

    def abort(self) -> None:
        self._expects = _END
        self._transport.abort()
