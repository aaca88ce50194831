"""One connection of an HTTP client: since when it waits for its client, and for how long it may."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    head_seconds: float = 10.0
    """What a client has for the head of a request from its first byte on; of its first one from the connection on. TLS
    has as long before it."""
    idle_seconds: float = 75.0
    """How long a connection may stay without a request: a little longer than proxies keep theirs, a minute mostly, so
    that it is they who close."""
    write_seconds: float = 60.0
    """How long a client may not read what waits for it in the connection, which is little of a large answer."""
    most: int | None = None
    """Connections at a time; for one more, one that waits for its client is closed. None = any number."""
    most_descriptors: int | None = None
    """When a connection's descriptor is above, there is one too many: the server needs some for itself, for workers
    say."""


class Connection(RequestHandler):
    """aiohttp's, with the times that it does not look at. All calls are made on the loop."""

    __slots__ = ("_head_since", "_idle_since", "_request", "_request_since", "_unread_since")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._idle_since: float | None = self._loop.time()
        self._head_since: float | None = self._idle_since
        self._unread_since: float | None = None
        self._request: web.BaseRequest | None = None
        self._request_since = 0.0
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._idle_since is not None and self._head_since is None and not self._messages:
            self._head_since = self._loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since = self._loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    def begin_request(self, request: web.BaseRequest) -> None:
        self._idle_since = self._head_since = None
        self._request, self._request_since = request, self._loop.time()

    def end_request(self) -> None:
        self._idle_since, self._request = self._loop.time(), None

    @property
    def is_read(self) -> bool:
        """Its client takes what is written."""
        return self._unread_since is None

    @property
    def waits_since(self) -> float | None:
        """Since when (the loop's time) it waits for its client to read or to ask; None = a request is in hand, or it
        has been closed."""
        if self._is_closing:
            return None
        return self._idle_since if self._unread_since is None else self._unread_since

    @property
    def body_since(self) -> float | None:
        """Since when it waits for the whole body of the request in hand; None = it does not, or it has been closed."""
        if self._is_closing or self._request is None or self._request.content.is_eof():
            return None
        return self._request_since

    @property
    def _is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def is_overdue(self, limits: ConnectionLimits, now: float) -> bool:
        """aiohttp itself closes those that are idle."""
        return (self._unread_since is not None and now - self._unread_since > limits.write_seconds) or (
            self._head_since is not None and now - self._head_since > limits.head_seconds
        )

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
