"""Listens for HTTP and hands requests over: aiohttp's server on the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from operator import attrgetter

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
_TAKEN_AT_ONCE = 32
"""Of them, in each round of the loop. One too many is closed four rounds later, so that there may be 128 too many for a
moment: fewer than the descriptors that the server keeps for itself."""
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
        self._listening: asyncio.Server | None = None
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
        self._listening = await asyncio.get_running_loop().create_server(
            server,
            address,
            port,
            reuse_port=reuse_port or None,
            backlog=_TAKEN_AT_ONCE,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._limits.head_seconds,
        )
        for listening in self._listening.sockets:
            # asyncio has one number for both.
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(_PENDING_CONNECTIONS)
        self._server = server
        self._watch = asyncio.ensure_future(self._close_overdue(server))
        return int(self._listening.sockets[0].getsockname()[1])

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more connections, let open requests finish within the grace time, close all connections. What is
        asked on open connections meanwhile is answered, and the connection closed."""
        if self._server is None or self._listening is None or self._watch is None:
            return
        server, self._server = self._server, None
        self._is_ending = True
        self._listening.close()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        except TimeoutError:
            pass
        self._watch.cancel()
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
    limits: ConnectionLimits
    _fitting: int | None = None
    """How many connections there may be while one has a descriptor above the limit: those that closed ones leave are
    lower, and tell nothing."""
    log: logging.Logger
    remarks: LogRateLimit

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    def open_connections(self) -> list[Connection]:
        return [connection for connection in self.connections if isinstance(connection, Connection)]

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self._has_one_too_many(transport):
            self._make_room(handler, transport)

    def _has_one_too_many(self, transport: asyncio.Transport) -> bool:
        if self._are_more_than(self.limits.most):
            return True
        if self._is_above(transport):
            # The kernel gives the lowest that is free, so that all below are in use, whatever for.
            self._fitting = self._count_open() - 1
            return True
        if not self._are_more_than(self._fitting):
            return False
        if not any(map(self._is_above, self._connections.values())):
            self._fitting = None
        return self._fitting is not None

    def _are_more_than(self, most: int | None) -> bool:
        return most is not None and len(self._connections) > most and self._count_open() > most

    def _count_open(self) -> int:
        """Those that are closing are still among the connections."""
        return sum(not each.is_closing() for each in self._connections.values())

    def _is_above(self, transport: asyncio.BaseTransport) -> bool:
        connection = transport.get_extra_info("socket")
        return (
            self.limits.most_descriptors is not None
            and connection is not None
            and connection.fileno() > self.limits.most_descriptors
        )

    def _make_room(self, newest: RequestHandler, transport: asyncio.Transport) -> None:
        """Close the connection that has waited for its client for longest; where none does, the one whose request's
        body has been on its way for longest; else the new one."""
        others = [connection for connection in self.open_connections() if connection is not newest]
        for since in (attrgetter("waits_since"), attrgetter("body_since")):
            waiting = [connection for connection in others if since(connection) is not None]
            if waiting:
                min(waiting, key=since).abort()
                break
        else:
            transport.abort()
        if self.remarks.is_due():
            self.log.warning("%s", self._full())

    def _full(self) -> str:
        if self.limits.most is not None:
            return (
                f"there are {self.limits.most} connections, as many as there may be: for each one more, another"
                " whose client keeps it waiting is closed"
            )
        return (
            "connections are closed whose clients keep them waiting: of the files that may be open only those are left"
            " that the server needs for itself; raise the hard limit (ulimit -Hn, LimitNOFILE), or let fewer clients"
            " connect"
        )


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
