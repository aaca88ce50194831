"""One request of HTTP: what it says, its body as it comes, and its answer or error as it goes out in the connection."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import MemoryFull
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.json_text import json_bytes

if TYPE_CHECKING:
    from rocserve.frontends.http.connection import Connection

LARGEST_HEAD_LINE = 8190
"""Bytes of a URL, and of a header's name and value."""
_WRITTEN_AT_ONCE = 256 << 10
"""Bytes of a large answer: what a client does not read is then copied to no more than this in the connection. Nothing
else runs while so many are written."""
LARGEST_BODY = (1 << 31) - 1
"""Bytes; as gRPC's largest message."""
_LARGEST_GROWN = 32 << 20
"""Bytes of a body that grows where it is. The C library keeps the memory of such blocks for the next ones; that of a
larger one it moves while it grows, and unmaps page by page, which takes 0.1 s a GiB each."""
_COME_FIRST = 4 << 20
"""Bytes that have come of a large body before it has its room: of a promise alone a page of 2 MiB would be taken."""
_BEHIND_LARGEST = 2 << 20
"""Bytes that may come before a body is refused that is too large."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"
"""A chunk of a stream, which all are streams of events."""
_NO_HEADERS: Mapping[str, str] = {}
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_REMEMBERED_LINES = 256


_ORIGIN = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
"""Before the path, in requests that are made as to a proxy."""


def path_of(target: bytes) -> str:
    """As it was sent, percent-encoded, without the query."""
    path = _ORIGIN.sub(b"", target, 1) if not target.startswith(b"/") else target
    return path.partition(b"?")[0].decode("utf-8", "surrogateescape")


@dataclass(slots=True)
class Response:
    """An answer that is there as a whole."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


JSON = "application/json"
PLAIN = "text/plain"
"""Triton calls the JSON of some of its errors so."""

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
    """The HTTP status of an error; 400 where no other says it better, as in Triton."""
    if isinstance(error, MemoryFull):
        # The server is full, not this client's share of it: balancers then ask another server, as of a full queue.
        return 413 if error.fits_never else 503
    return _STATUSES.get(error.code, 400)


class HttpError(Exception):
    """An error that only HTTP knows; without a text it has no body."""

    def __init__(
        self, status: int, text: str, content_type: str = PLAIN, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.content_type = content_type
        self.headers = headers


def error_response(error: ServeError | HttpError, content_type: str = JSON) -> Response:
    """The response for an error. `content_type`: of a ServeError; an HttpError has its own."""
    if isinstance(error, HttpError):
        return Response(
            error.status, json_bytes({"error": error.text}) if error.text else b"", error.content_type, error.headers
        )
    headers = {"Retry-After": str(math.ceil(error.retry_seconds))} if error.retry_seconds else {}
    return Response(status_of(error), json_bytes({"error": error.text}), content_type, headers)


def not_allowed(verbs: Iterable[str], content_type: str = PLAIN) -> HttpError:
    return HttpError(405, "Method Not Allowed", content_type, {"Allow": ", ".join(sorted(verbs))})


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
    data: bytes | bytearray | memoryview = b""
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
    taken: int = field(default=0, init=False)
    _room: memoryview | None = field(default=None, init=False)
    """Where a large body is put."""
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _chunked: bool = field(default=False, init=False)
    _is_in_chunk: bool = field(default=False, init=False)
    """Of a large chunk a part has been sent."""
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

    def take(self, part: bytes) -> None:
        """So much more has come of the body."""
        data = self.data
        if not data:
            self.data = part
            return
        come = len(data)
        end = come + len(part)
        if self._room is None or end > len(self._room):
            self._room = self._make_room(come, end)
        if self._room is not None:
            self._room[come:end] = part
            self.data = self._room[:end]
            return
        if not isinstance(data, bytearray):
            data = self.data = bytearray(data)
        data += part

    def _make_room(self, come: int, end: int) -> memoryview | None:
        """For a large body, as long as its client has promised, or as long as any: pages take no memory until they are
        written, and numpy asks for huge ones. None: it is none, or there is no room."""
        if end <= _COME_FIRST:
            return None
        promised = int(self.head.headers.get("content-length", "0"))
        if max(promised, end) <= _LARGEST_GROWN:
            return None
        nbytes = min(promised or sys.maxsize, LARGEST_BODY + _BEHIND_LARGEST)
        try:
            room = np.empty(max(nbytes, end), np.uint8).data
        except MemoryError:
            return None
        room[:come] = self.data
        return room

    async def more(self) -> None:
        """Wait until more of the body has come than at the last call, or all of it, or there is a fault."""
        while self.taken == len(self.data) and not self.is_whole and self.fault is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._connection.read_on()
            await self._waiter
        self.taken = len(self.data)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def invite(self) -> None:
        if self.head.headers.get("expect", "").lower() == "100-continue" and not self.head.is_old:
            self._connection.write(_CONTINUE)

    def probe(self) -> None:
        """Send what says nothing to a client: one that is gone answers with a reset."""
        if not self._has_begun:
            self._connection.write(_CONTINUE)
        elif self._chunked and not self._is_in_chunk:
            self._connection.write(_COMMENT)

    def run(self, answering: Coroutine[Any, Any, Response | None]) -> None:
        """Have a task answer, which is cancelled when the client goes; None = it has been sent. A ConnectionError of it
        ends the connection; another error is answered."""
        self._task = self._connection.loop.create_task(self._run(answering))
        self._connection.listener.tasks.add(self._task)
        self._task.add_done_callback(self._connection.listener.tasks.discard)

    def go_on(self) -> None:
        """Have the task that answers go on when the client does not wait for it."""
        self._task = None

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
        response = self._connection.listener.failure(self, error)
        if self._has_begun:
            self._connection.abort()
        else:
            self.respond(response)

    async def respond_in_parts(
        self, parts: Sequence[Buffer], content_type: str, headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        """A large answer, which is sent as it is read. Raises: ConnectionError: the client has gone."""
        self._connection.check_open()
        self._has_begun = True
        self._connection.write(self._head(200, content_type, headers, sum(map(len, parts))))
        await self._write_in_turns(parts)
        self._connection.end_request(self)

    async def _write_in_turns(self, parts: Sequence[Buffer]) -> None:
        """However fast the client reads, others have their turn after so many bytes."""
        connection = self._connection
        in_turn = 0
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _WRITTEN_AT_ONCE):
                piece = view[start : start + _WRITTEN_AT_ONCE]
                in_turn += len(piece)
                if in_turn > _WRITTEN_AT_ONCE:
                    in_turn = len(piece)
                    await asyncio.sleep(0)
                connection.write(piece)
                await connection.drain()

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

    async def send(self, *pieces: bytes) -> None:
        """One part of the answer, as one chunk."""
        connection = self._connection
        connection.check_open()
        length = sum(map(len, pieces))
        written = (b"%x\r\n" % length, *pieces, b"\r\n") if self._chunked else pieces
        if length > _WRITTEN_AT_ONCE:
            self._is_in_chunk = True
            await self._write_in_turns(written)
            self._is_in_chunk = False
            return
        connection.write(b"".join(written))
        await connection.drain()

    def end_stream(self) -> None:
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        self._connection.end_request(self)

    def _head(self, status: int, content_type: str, headers: Mapping[str, str], length: int | None) -> bytes:
        connection, listener, head = self._connection, self._connection.listener, self.head
        now = time.monotonic()
        if not head.keeps_alive or listener.closes_after_answers or self.fault is not None or now > connection.ends_at:
            self.is_last = True
        if head.answer_headers:
            headers = {**headers, **head.answer_headers}
        lines = _first_lines(status, content_type, tuple(headers.items()), head.is_old, self.is_last)
        if length is not None:
            lines += b"Content-Length: %d\r\n" % length
        return lines + listener.last_lines(now)

    def leave(self) -> None:
        # What was cancelled holds its frames, and they this: such a ring would keep the client's data until the next
        # collection.
        task, self._task, self._waiter = self._task, None, None
        if task is not None:
            task.cancel()
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()


@lru_cache(_REMEMBERED_LINES)
def _first_lines(
    status: int, content_type: str, headers: tuple[tuple[str, str], ...], is_old: bool, is_last: bool
) -> bytes:
    """Of the head of an answer: all but its length and what the server says of itself."""
    lines = [f"HTTP/{'1.0' if is_old else '1.1'} {status} {_PHRASES[status]}", f"Content-Type: {content_type}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if is_last or is_old:
        lines.append(f"Connection: {'close' if is_last else 'keep-alive'}")
    return "".join([f"{line}\r\n" for line in lines]).encode("utf-8", "surrogateescape")
