"""Listens for HTTP and hands requests over: aiohttp's server on the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from rocserve.frontends.http.connection import Connection, ConnectionLimits
from rocserve.observability.rate_limits import LogRateLimit

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_READ_BYTES = 1 << 20
"""What is read ahead of a body before its sender has to wait."""
_PENDING_CONNECTIONS = 1024
"""That the kernel keeps until they are taken."""
_TAKEN_AT_ONCE = 8
"""Of them, in each round of the loop. One too many is closed within four rounds, so that there may be 32 too many for a
moment: fewer than the descriptors that the server keeps for itself."""
_TAKING_PAUSE_SECONDS = 1.0
"""Where none can be taken, as no file may be opened any more."""
_ARRIVING_SHARE = 4
"""One part in so many of the connections may be arriving, which is in their handshake of TLS: so many leave a client
time for its own while others begin theirs without end, and those that have had a request keep the rest."""
_CLOSE_SECONDS = 1.0
_WATCH_SECONDS = 1.0
"""How often connections are looked at whose clients keep them waiting."""
_SECONDS_BETWEEN_REMARKS = 10.0
SERVER_NAME = "rocserve"
"""Of the header `Server`, also of answers that are sent as they are made."""


class HttpListener:
    """All calls are made on the loop."""

    def __init__(
        self,
        handler: Handler,
        log: logging.Logger,
        limits: ConnectionLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`handler`: answers a request; it is cancelled when the client goes away, and raises nothing else but a
        ConnectionError, if it finds that out by itself."""
        self._handler = handler
        self._log = log.getChild("connections")
        self._log.addFilter(_is_no_fault_of_a_client)
        self._limits = limits or ConnectionLimits()
        self._tls = tls
        self._server: _Server | None = None
        self._listening: list[socket.socket] = []
        self._watch: asyncio.Task[None] | None = None
        self._is_ending = False
        self._open_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, address: str, port: int, reuse_port: bool = False) -> int:
        """Listen; returns the port.

        Raises:
            OSError: it cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        server = _Server(
            self._handle,
            handler_cancellation=True,
            logger=self._log,
            access_log=None,
            keepalive_timeout=self._limits.idle_seconds,
            # Compressed bodies are decompressed within bounds of our own.
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
        )
        server.log = self._log
        server.remarks = LogRateLimit(_SECONDS_BETWEEN_REMARKS)
        server.limits = self._limits
        server.tls = self._tls
        # asyncio binds, but takes none: of one with TLS it would tell only after the handshake.
        bound = await loop.create_server(server, address, port, reuse_port=reuse_port or None, start_serving=False)
        self._listening = [each.dup() for each in bound.sockets]
        bound.close()
        self._server = server
        self._watch = asyncio.ensure_future(self._close_overdue(server))
        try:
            for listening in self._listening:
                listening.listen(_PENDING_CONNECTIONS)
                loop.add_reader(listening, self._take, server, listening)
        except OSError:
            await self.stop()
            raise
        return int(self._listening[0].getsockname()[1])

    def _take(self, server: _Server, listening: socket.socket) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(_TAKING_PAUSE_SECONDS, self._resume_taking, server, listening)
                loop.call_exception_handler(
                    {"message": "connections cannot be taken", "exception": error, "socket": listening}
                )
                return
            server.admit(accepted)

    def _resume_taking(self, server: _Server, listening: socket.socket) -> None:
        if not self._is_ending:
            asyncio.get_running_loop().add_reader(listening, self._take, server, listening)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more connections, let open requests finish within the grace time, close all connections. What is
        asked on open connections meanwhile is answered, and the connection closed."""
        if self._server is None or self._watch is None:
            return
        server, self._server = self._server, None
        self._is_ending = True
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        except TimeoutError:
            pass
        self._watch.cancel()
        server.close_arriving()
        server.pre_shutdown()
        await server.shutdown(_CLOSE_SECONDS)

    async def _close_overdue(self, server: _Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = loop.time()
            for connection in server.open_connections():
                if connection.is_overdue(self._limits, now):
                    connection.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.begin_request(request)
        self._open_requests += 1
        self._idle.clear()
        try:
            if not connection.is_read:
                # Answers to a client that asks on and on without reading would pile up.
                await request.writer.drain()
            response = await self._handler(request)
            if not response.prepared:
                response.headers["Server"] = SERVER_NAME
                if self._is_ending:
                    response.force_close()
            return response
        finally:
            connection.end_request()
            self._open_requests -= 1
            if not self._open_requests:
                self._idle.set()


class _Server(web.Server):
    """Counts a connection from the moment on that it is taken."""

    limits: ConnectionLimits
    tls: ssl.SSLContext | None
    _fitting: int | None = None
    """How many connections there may be while one has a descriptor above the limit: those that closed ones leave are
    lower, and tell nothing."""
    log: logging.Logger
    remarks: LogRateLimit

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arriving: dict[RequestHandler, _Arrival] = {}
        """In the order in which they were taken."""

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    def open_connections(self) -> list[Connection]:
        return [connection for connection in self.connections if isinstance(connection, Connection)]

    def admit(self, accepted: socket.socket) -> None:
        connection = self()
        seconds = None if self.tls is None else self.limits.head_seconds
        coming = self._loop.connect_accepted_socket(
            lambda: connection, accepted, ssl=self.tls, ssl_handshake_timeout=seconds
        )
        task = self._loop.create_task(coming)
        task.add_done_callback(partial(self._end_arrival, connection, accepted))
        self._arriving[connection] = _Arrival(accepted, task)
        if self._has_one_too_many(accepted):
            self._make_room()

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._arriving.pop(handler, None)

    def close_arriving(self) -> None:
        while self._arriving:
            self._close_oldest_arriving()

    def _close_oldest_arriving(self) -> None:
        self._arriving.pop(next(iter(self._arriving))).task.cancel()

    def _end_arrival(self, connection: RequestHandler, accepted: socket.socket, task: asyncio.Task[Any]) -> None:
        self._arriving.pop(connection, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            # asyncio has closed it, unless it had not begun.
            accepted.close()
        if error is not None and not isinstance(error, OSError):
            self.log.error("a connection could not be taken", exc_info=error)

    def _has_one_too_many(self, accepted: socket.socket) -> bool:
        if self._are_more_than(self.limits.most):
            return True
        if self._is_above(accepted):
            # The kernel gives the lowest that is free, so that all below are in use, whatever for.
            self._fitting = self._count_open() - 1
            return True
        if not self._are_more_than(self._fitting):
            return False
        sockets = [transport.get_extra_info("socket") for transport in self._connections.values()]
        if not any(map(self._is_above, [*sockets, *(arrival.socket for arrival in self._arriving.values())])):
            self._fitting = None
        return self._fitting is not None

    def _are_more_than(self, most: int | None) -> bool:
        return most is not None and len(self._connections) + len(self._arriving) > most and self._count_open() > most

    def _count_open(self) -> int:
        """Those that are closing are still among the connections."""
        return len(self._arriving) + sum(not each.is_closing() for each in self._connections.values())

    def _is_above(self, connection: socket.socket | None) -> bool:
        return (
            self.limits.most_descriptors is not None
            and connection is not None
            and connection.fileno() > self.limits.most_descriptors
        )

    def _make_room(self) -> None:
        """Close the oldest of those that arrive, where they have more than their share: no request is lost with it.
        Else the connection that has waited for its client for longest; where none does, the one whose request's body
        has been on its way for longest; else the oldest that arrives."""
        if (len(self._arriving) - 1) * _ARRIVING_SHARE > self._count_open():
            self._close_oldest_arriving()
        elif (
            waiting := self._longest(attrgetter("waits_since")) or self._longest(attrgetter("body_since"))
        ) is not None:
            waiting.abort()
        else:
            self._close_oldest_arriving()
        if self.remarks.is_due():
            self.log.warning("%s", self._full())

    def _longest(self, since: Callable[[Connection], float | None]) -> Connection | None:
        waiting = [
            (began, connection) for connection in self.open_connections() if (began := since(connection)) is not None
        ]
        return min(waiting, key=itemgetter(0))[1] if waiting else None

    def _full(self) -> str:
        if self.limits.most is not None and self._count_open() >= self.limits.most:
            return (
                f"there are {self.limits.most} connections, as many as there may be: for each one more, another"
                " whose client keeps it waiting is closed"
            )
        return (
            "connections are closed whose clients keep them waiting: of the files that may be open only those are left"
            " that the server needs for itself; raise the hard limit (ulimit -Hn, LimitNOFILE), or let fewer clients"
            " connect"
        )


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A connection that has been taken and is not set up yet, its handshake of TLS included."""

    socket: socket.socket
    task: asyncio.Task[Any]


def _is_no_fault_of_a_client(record: logging.LogRecord) -> bool:
    """What is no HTTP is answered, and clients may go in the middle of an answer; both would fill the log: anybody can
    do it."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError | ConnectionError)


def binding_refusal(what: str, address: str, port: int, error: OSError, flags: str) -> OSError:
    """Why a port cannot be listened on, and what to do.

    Args:
        what: is served there, e.g. "metrics".
        flags: the part of the name that the flags for it have in common.
    """
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    remedy = f"name another with --{flags}-port, or switch {what} off with --allow-{flags}=false"
    if error.errno in (errno.EADDRNOTAVAIL, None) or (error.errno and error.errno < 0):
        remedy = f"name an address of this machine with --{flags}-address"
    return OSError(error.errno, f"cannot serve {what} at {address}:{port}: {why}; {remedy}")
