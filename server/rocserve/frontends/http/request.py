"""One HTTP request: its head, its body as it arrives, and its answer as it goes out on the connection."""

from __future__ import annotations

import asyncio
import enum
import math
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.memo import Memo
from rocserve.core.request_memory import MemoryFull
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.wire import Wire

LARGEST_HEAD_LINE = 8190
"""Bytes of a URL, of a header's name, and of its value."""
_WRITTEN_AT_ONCE = 256 << 10
"""Large answers are written in pieces of this many bytes. Nothing else runs while a piece is copied."""
LARGEST_BODY = (1 << 31) - 1
"""Bytes; the same as gRPC's largest message."""
_LARGEST_GROWING = 32 << 20
"""Bytes of a body that grows in place. The C library keeps memory blocks up to this size for reuse. It moves larger
blocks while they grow, and unmaps them page by page; each takes 0.1 s per GiB."""
_BYTES_BEFORE_ROOM = 4 << 20
"""Bytes of a large body that must arrive before it gets its memory, because the memory begins with a page of 2 MiB, and
a client may promise a body and send none."""
_NO_HEADERS: Mapping[str, str] = {}


def path_of(target: bytes) -> str:
    """Return the path as it was sent, percent-encoded, without the query."""
    # A client that sends a request as to a proxy writes scheme and host before the path.
    path = (
        re.sub(rb"https?://[^/?#]*", b"", target, count=1, flags=re.IGNORECASE)
        if not target.startswith(b"/")
        else target
    )
    return path.partition(b"?")[0].decode("utf-8", "surrogateescape")


def query_of(target: bytes) -> Mapping[str, Sequence[str]]:
    """Return name -> values of the query. Bytes that are not UTF-8 are replaced."""
    return parse_qs(target.partition(b"?")[2].decode("utf-8", "replace"), keep_blank_values=True)


@dataclass(slots=True)
class Response:
    """An answer over HTTP."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


JSON = "application/json"
PLAIN = "text/plain"

_STATUSES: Mapping[StatusCode, int] = {
    StatusCode.INTERNAL: 500,
    StatusCode.NOT_FOUND: 404,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.DEADLINE_EXCEEDED: 504,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.UNAUTHENTICATED: 401,
}


def status_of(error: ServeError) -> int:
    """Return the HTTP status of an error; 400 if no other fits better, as in Triton."""
    if isinstance(error, MemoryFull):
        # 503 instead of 429: the server's memory is full, not only this client's share. Load balancers then try another
        # server.
        return 413 if error.fits_never else 503
    return _STATUSES.get(error.code, 400)


class HttpError(Exception):
    """An error that only HTTP has. With an empty text, its response has no body."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers


def error_response(error: ServeError | HttpError) -> Response:
    """Return the response for an error. It is JSON and says so, because clients, KServe's among them, show no text of
    another content type. Triton calls some of its errors text/plain."""
    if isinstance(error, HttpError):
        return Response(error.status, json_bytes({"error": error.text}) if error.text else b"", JSON, error.headers)
    headers = {"Retry-After": str(math.ceil(error.retry_seconds))} if error.retry_seconds else {}
    return Response(status_of(error), json_bytes({"error": error.text}), JSON, headers)


def not_allowed(verbs: Iterable[str]) -> HttpError:
    return HttpError(405, "Method Not Allowed", {"Allow": ", ".join(sorted(verbs))})


@dataclass(slots=True, eq=False)
class Head:
    """The head of a request; one object may serve many requests with the same bytes."""

    method: str = ""
    target: bytes = b""
    pairs: Sequence[tuple[bytes, bytes]] = ()
    """The headers as received."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Name in lower case -> value; of repeated headers, the first value."""
    is_http10: bool = False
    """HTTP/1.0, which has no chunks."""
    keeps_alive: bool = False
    body_bytes: int = 0
    """The length of the body, if the head is remembered."""
    answer_headers: Mapping[str, str] | None = None
    """Headers for every answer."""
    handle: Callable[[Request], None] | None = None
    """Handles requests with this head; None until the first request has found the handler."""

    @property
    def path(self) -> str:
        return path_of(self.target)


class AnswerState(enum.Enum):
    """How much of an answer has been sent."""

    NOTHING = enum.auto()
    BEGUN = enum.auto()
    CHUNKS = enum.auto()
    ALL = enum.auto()


# Python 3.11 takes five times as long to find a member in the class.
_NOTHING, _BEGUN, _CHUNKS, ANSWERED = AnswerState


class Serving:
    """How a listener's requests are answered."""

    def __init__(self, handle: Callable[[Request], None], failure: Callable[[Request, Exception], Response]) -> None:
        """`handle` answers a request, immediately or later. `failure` makes the answer if `handle` raises an error."""
        self.handle = handle
        self.failure = failure
        self.tasks: set[asyncio.Task[None]] = set()
        self.closes_after_answers = False
        self.known_heads = Memo[bytes, Head](256)
        """Bytes of a head -> head, with the length of the body. Only heads that keep the connection."""
        self._last_lines = b""
        self._last_lines_until = 0.0

    def last_lines(self, now: float) -> bytes:
        """Return the last lines of each answer's head. `now`: time.monotonic() seconds."""
        if now >= self._last_lines_until:
            second = time.time()
            self._last_lines_until = now + 1 - second % 1
            # The names are English: this process sets no locale for times.
            date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(second))
            self._last_lines = f"Date: {date}\r\nServer: rocserve\r\n\r\n".encode()
        return self._last_lines


@dataclass(eq=False)
class Request:
    """One request of a client. On the event loop."""

    # Without slots, the class's default values need not be set for each request.
    _wire: Wire
    _serving: Serving
    _on_end: Callable[[Request], None]
    head: Head
    data: bytes | bytearray | memoryview = b""
    """The received part of the body."""
    is_complete: bool = False
    answer: AnswerState = field(default=_NOTHING, init=False)
    is_last: bool = field(default=False, init=False)
    """The answer, part of which has been sent, is the last of the connection."""
    on_gone: Callable[[], None] | None = field(default=None, init=False)
    """Called if the client leaves before the answer has been sent."""
    seen_bytes: int = field(default=0, init=False)
    began_at: float = field(default=0.0, init=False)
    """time.monotonic() seconds."""
    fault: str | None = field(default=None, init=False)
    """The reason why the rest of the body cannot be read."""
    _room: memoryview | None = field(default=None, init=False)
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def remote(self) -> str:
        """The client's address; "" if the client had left before the connection was set up."""
        return self._wire.remote

    def append(self, part: bytes) -> None:
        data = self.data
        if not data:
            self.data = part
            return
        received = len(data)
        end = received + len(part)
        if self._room is None or end > len(self._room):
            self._room = self._make_room(received, end)
        if self._room is not None:
            self._room[received:end] = part
            self.data = self._room[:end]
            return
        if not isinstance(data, bytearray):
            data = self.data = bytearray(data)
        data += part

    def _make_room(self, received: int, end: int) -> memoryview | None:
        """Return memory for a large body: as much as the client has promised, or the most for any body. Unwritten pages
        take no memory, and numpy asks for huge pages. Returns None if the body is small, or memory is short."""
        if end <= _BYTES_BEFORE_ROOM:
            return None
        promised = int(self.head.headers.get("content-length", "0"))
        if max(promised, end) <= _LARGEST_GROWING:
            return None
        # 2 MiB may come beyond the limit before a body is refused.
        nbytes = min(promised or sys.maxsize, LARGEST_BODY + (2 << 20))
        try:
            room = np.empty(max(nbytes, end), np.uint8).data
        except MemoryError:
            return None
        room[:received] = self.data
        return room

    async def wait_for_more(self) -> None:
        """Wait until more of the body has come than at the last call, the body is complete, or there is a fault."""
        while self.seen_bytes == len(self.data) and not self.is_complete and self.fault is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._wire.resume_reading()
            await self._waiter
        self.seen_bytes = len(self.data)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send_continue(self) -> None:
        if self.head.headers.get("expect", "").lower() == "100-continue" and not self.head.is_http10:
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def run(self, answering: Coroutine[Any, Any, Response | None]) -> None:
        """Let a task answer. The coroutine returns None if it has sent the answer, and is cancelled if the client
        leaves. A ConnectionError ends the connection; other errors are answered."""
        self._task = self._wire.loop.create_task(self._run(answering))
        self._serving.tasks.add(self._task)
        self._task.add_done_callback(self._serving.tasks.discard)

    def continue_without_client(self) -> None:
        self._task = None

    async def _run(self, answering: Coroutine[Any, Any, Response | None]) -> None:
        try:
            response = await answering
        except ConnectionError:
            self._wire.abort()
        except Exception as error:
            self.fail(error)
        else:
            if response is not None:
                self.respond(response)

    def respond(self, response: Response) -> None:
        body = response.body
        head = self._head(response.status, response.content_type, response.headers, len(body))
        self._wire.write(head if self.head.method == "HEAD" else head + body)
        self._on_end(self)

    def fail(self, error: Exception) -> None:
        response = self._serving.failure(self, error)
        if self.answer is _NOTHING:
            self.respond(response)
        else:
            self._wire.abort()

    async def respond_in_parts(
        self, parts: Sequence[Buffer], content_type: str, headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        """Send a large answer as fast as the client reads. Raises ConnectionError if the client has gone."""
        self._wire.check_open()
        self.answer = _BEGUN
        self._wire.write(self._head(200, content_type, headers, sum(map(len, parts))))
        await self._write_pieces(parts)
        self._on_end(self)

    async def _write_pieces(self, parts: Sequence[Buffer]) -> None:
        """Write parts. Other requests get a turn after each _WRITTEN_AT_ONCE bytes, however fast the client reads."""
        wire = self._wire
        in_turn = 0
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _WRITTEN_AT_ONCE):
                piece = view[start : start + _WRITTEN_AT_ONCE]
                in_turn += len(piece)
                if in_turn > _WRITTEN_AT_ONCE:
                    in_turn = len(piece)
                    await asyncio.sleep(0)
                wire.write(piece)
                await wire.drain()

    def begin_stream(self, status: int, content_type: str, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """Begin an answer of unknown length. Raises ConnectionError if the client has gone."""
        self._wire.check_open()
        if self.head.is_http10:
            self.answer, self.is_last = _BEGUN, True
        else:
            self.answer = _CHUNKS
            headers = {**headers, "Transfer-Encoding": "chunked"}
        self._wire.write(self._head(status, content_type, headers, None))

    @property
    def must_reconnect(self) -> bool:
        """Return whether the client must connect again after this answer, here or elsewhere."""
        return self._serving.closes_after_answers

    async def send(self, *pieces: bytes) -> None:
        """Send a part of the answer as one chunk. Raises ConnectionError if the client has gone."""
        wire = self._wire
        wire.check_open()
        length = sum(map(len, pieces))
        written = (b"%x\r\n" % length, *pieces, b"\r\n") if self.answer is _CHUNKS else pieces
        if length > _WRITTEN_AT_ONCE:
            await self._write_pieces(written)
            return
        wire.write(b"".join(written))
        await wire.drain()

    def end_stream(self) -> None:
        if self.answer is _CHUNKS:
            self._wire.write(b"0\r\n\r\n")
        self._on_end(self)

    def _head(self, status: int, content_type: str, headers: Mapping[str, str], length: int | None) -> bytes:
        serving, head = self._serving, self.head
        now = time.monotonic()
        if not head.keeps_alive or serving.closes_after_answers or now > self._wire.ends_at or self.fault is not None:
            self.is_last = True
        if head.answer_headers:
            headers = {**headers, **head.answer_headers}
        lines = _first_lines(status, content_type, tuple(headers.items()), head.is_http10, self.is_last)
        if length is not None:
            lines += b"Content-Length: %d\r\n" % length
        return lines + serving.last_lines(now)

    def leave(self) -> None:
        # A cancelled task holds its frames, and they hold this request; the cycle would keep the client's data until
        # the next garbage collection.
        task, self._task, self._waiter = self._task, None, None
        if task is not None:
            task.cancel()
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()


@lru_cache(256)
def _first_lines(
    status: int, content_type: str, headers: tuple[tuple[str, str], ...], is_http10: bool, is_last: bool
) -> bytes:
    """Return the lines of an answer's head before its length and the server's own lines."""
    lines = [
        f"HTTP/{'1.0' if is_http10 else '1.1'} {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {content_type}",
    ]
    lines += [f"{name}: {value}" for name, value in headers]
    if is_last or is_http10:
        lines.append(f"Connection: {'close' if is_last else 'keep-alive'}")
    return "".join([f"{line}\r\n" for line in lines]).encode("utf-8", "surrogateescape")
