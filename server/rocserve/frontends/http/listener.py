"""Listens for HTTP and hands requests over: aiohttp's server on the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from rocserve.frontends.descriptors import most_descriptors
from rocserve.observability.pace import Pace

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_READ_BYTES = 1 << 20
"""What is read ahead of a body before its sender has to wait."""
_PENDING_CONNECTIONS = 1024
_CLOSE_SECONDS = 1.0
_SECONDS_BETWEEN_REMARKS = 10.0
SERVER_NAME = "rocserve"
"""Of the header `Server`, also of answers that are sent as they are made."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    idle_seconds: float = 3600.0
    """How long a connection may stay without a request: longer than proxies and clients keep theirs."""
    most: int | None = None
    """Connections at a time; one more is closed at once. None = any number."""


class HttpListener:
    """All calls are made on the loop."""

    def __init__(self, handler: Handler, log: logging.Logger, limits: ConnectionLimits | None = None) -> None:
        """`handler`: answers a request; it is cancelled when the client goes away, and raises nothing else but a
        ConnectionError, if it finds that out by itself."""
        self._handler = handler
        self._log = log.getChild("connections")
        self._log.addFilter(_is_no_fault_of_a_client)
        self._limits = limits or ConnectionLimits()
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
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
        server.remarks = Pace(_SECONDS_BETWEEN_REMARKS)
        server.most_connections = self._limits.most
        server.most_descriptors = most_descriptors()
        self._runner = web.ServerRunner(server, shutdown_timeout=_CLOSE_SECONDS)
        await self._runner.setup()
        self._site = web.TCPSite(
            self._runner, address, port, reuse_port=reuse_port or None, backlog=_PENDING_CONNECTIONS
        )
        try:
            await self._site.start()
        except OSError:
            await self._runner.cleanup()
            self._runner = self._site = None
            raise
        return int(self._runner.addresses[0][1])

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more connections, let open requests finish within the grace time, close all connections. What is
        asked on open connections meanwhile is answered, and the connection closed."""
        if self._runner is None or self._site is None:
            return
        self._is_ending = True
        await self._site.stop()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        except TimeoutError:
            pass
        await self._runner.cleanup()
        self._runner = self._site = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._open_requests += 1
        self._idle.clear()
        try:
            response = await self._handler(request)
            if not response.prepared:
                response.headers["Server"] = SERVER_NAME
                if self._is_ending:
                    response.force_close()
            return response
        finally:
            self._open_requests -= 1
            if not self._open_requests:
                self._idle.set()


class _Server(web.Server):
    most_connections: int | None = None
    most_descriptors: int | None = None
    """Connections whose descriptor is above are closed at once: the server needs some for itself, for workers say."""
    log: logging.Logger
    remarks: Pace

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self.most_connections is not None and len(self.connections) > self.most_connections:
            transport.abort()
        elif self.most_descriptors is not None:
            # The kernel gives the lowest that is free, so its number tells how many are in use, whatever for.
            connection = transport.get_extra_info("socket")
            if connection is not None and connection.fileno() > self.most_descriptors:
                transport.abort()
                self._say_full()

    def _say_full(self) -> None:
        if self.remarks.is_due():
            self.log.warning(
                "connections are closed at once: of the files that may be open only those are left that the server"
                " needs for itself; raise the hard limit (ulimit -Hn, LimitNOFILE), or let fewer clients connect"
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
