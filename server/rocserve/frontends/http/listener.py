"""Listens for HTTP: accepts connections within bounds, and closes those that keep the server waiting."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from rocserve.frontends.http.connection import Connection, ConnectionLimits
from rocserve.frontends.http.request import Request, Response, Serving
from rocserve.frontends.limits import file_limit
from rocserve.frontends.listen_address import ListenAddress, begin_no_handshakes
from rocserve.frontends.unix_sockets import PublishedSocket
from rocserve.frontends.unix_sockets import listen as listen_unix
from rocserve.observability.failures import Allowance

_PENDING_CONNECTIONS = 1024
"""Connections that the kernel keeps until they are accepted."""
_ACCEPT_PAUSE_SECONDS = 1.0
"""Pause after a failure to accept, for example because no more files may be opened."""
_SECONDS_BETWEEN_WARNINGS = 10.0


async def _bind(loop: asyncio.AbstractEventLoop, where: ListenAddress) -> list[socket.socket]:
    """Return sockets bound to the address. Raises OSError."""
    if where.address == "::" and socket.has_dualstack_ipv6():
        # All addresses including those of IPv4, as in gRPC; asyncio would leave out IPv4.
        every = socket.create_server(
            (where.address, where.port), family=socket.AF_INET6, reuse_port=where.reuse_port, dualstack_ipv6=True
        )
        every.setblocking(False)
        return [every]
    # asyncio only binds. If it accepted, it would report connections with TLS only after the handshake.
    bound = await loop.create_server(
        asyncio.Protocol, where.address, where.port, reuse_port=where.reuse_port or None, start_serving=False
    )
    listening = [one.dup() for one in bound.sockets]
    bound.close()
    return listening


class HttpListener:
    """Listens for connections. A connection is included in all limits as soon as it is accepted. On the event loop."""

    def __init__(
        self,
        handle: Callable[[Request], None],
        log: logging.Logger,
        limits: ConnectionLimits | None = None,
        tls: ssl.SSLContext | None = None,
        failure: Callable[[Request, Exception], Response] = lambda request, error: Response(500, b"", "text/plain"),
    ) -> None:
        """`handle` answers a request, immediately or later. `failure` makes the answer if `handle` raises an error."""
        self.serving = Serving(handle, failure)
        self.limits = limits or ConnectionLimits()
        self.connections: set[Connection] = set()
        """Includes closing connections until they have closed."""
        self.arriving: dict[Connection, tuple[socket.socket, asyncio.Task[Any]]] = {}
        """Accepted connections that are not set up yet (their TLS handshake may be under way), oldest first."""
        self._is_ending = False
        self._log = log.getChild("connections")
        self._tls = tls
        self._listening: list[socket.socket] = []
        self._published: PublishedSocket | None = None
        self._loop: asyncio.AbstractEventLoop
        self._watch: asyncio.Task[None] | None = None
        self._fitting_connections: int | None = None
        """The number of connections that fit, while a connection has a descriptor above the limit. Closed connections
        leave lower descriptors free, so descriptors alone do not show the excess."""
        self._warnings, self._accept_failures = (Allowance(1, 1 / _SECONDS_BETWEEN_WARNINGS) for _ in range(2))

    async def start(self, where: ListenAddress) -> int:
        """Listen, and return the port; 0 for a Unix socket. Raises OSError if that is impossible; its text has the
        address and the remedy."""
        loop = self._loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._close_overdue())
        try:
            if where.unix is not None:
                listening, self._published = listen_unix(where.unix, _PENDING_CONNECTIONS)
                self._listening = [listening]
                self._listen(listening)
                return 0
            self._listening = await _bind(loop, where)
            for listening in self._listening:
                listening.listen(_PENDING_CONNECTIONS)
                self._listen(listening)
        except OSError as error:
            await self.stop()
            raise where.refusal(error) from None
        return int(self._listening[0].getsockname()[1])

    def close_after_answers(self, closes: bool = True) -> None:
        """Make clients connect again, here or elsewhere; or no longer."""
        self.serving.closes_after_answers = closes or self._is_ending

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Accept no more connections, let requests finish within the grace time, and close all connections. Requests
        that still arrive on open connections are answered, and the connection then closes."""
        self.close_after_answers()
        if self._is_ending or self._watch is None:
            return
        self._is_ending = True
        if self._published is not None:
            self._published.withdraw()
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
            begin_no_handshakes(listening)
            # Clients that have connected already are served.
            while self._accept(listening):
                pass
            listening.close()
        await _wait_while(
            lambda: bool(self.arriving) or any(one.awaits_request for one in self.connections),
            min(grace_seconds, 1.0),
        )
        await _wait_while(lambda: any(one.current is not None for one in self.connections), grace_seconds)
        self._watch.cancel()
        while self.arriving:
            self._close_oldest_arriving()
        for connection in self.connections:
            if connection.current is not None:
                connection.wire.abort()
            else:
                connection.wire.close()
        for task in self.serving.tasks:
            task.cancel()
        await _wait_while(lambda: bool(self.connections or self.serving.tasks), 1.0)
        for connection in self.connections:
            connection.wire.abort()

    def _accept(self, listening: socket.socket) -> bool:
        """Accept some connections. Returns whether more may be waiting."""
        # An excess connection is closed within four rounds, so there may be 32 too many for a moment: fewer than the
        # descriptors that the server reserves.
        for _ in range(8):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_SECONDS, self._listen, listening)
                if self._accept_failures.take():
                    advice = ""
                    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        advice = (
                            "; raise the hard limit of open files (ulimit -Hn, LimitNOFILE), or connect fewer clients"
                        )
                    self._log.error("cannot accept connections: %s%s", error.strerror, advice)
                return False
            self._admit(accepted)
        return True

    def _listen(self, listening: socket.socket) -> None:
        if not self._is_ending:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _admit(self, accepted: socket.socket) -> None:
        loop = self._loop
        connection = Connection(loop, self.serving, self.limits, self._open, self.connections.discard)
        seconds = None if self._tls is None else self.limits.head_seconds
        coming = loop.connect_accepted_socket(
            lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
        )
        task = loop.create_task(coming)
        task.add_done_callback(partial(self._end_arrival, connection, accepted))
        self.arriving[connection] = accepted, task
        if self._is_excess(accepted):
            self._make_room()

    def _open(self, connection: Connection) -> None:
        self.connections.add(connection)
        self.arriving.pop(connection, None)

    def _end_arrival(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[Any]) -> None:
        self.arriving.pop(connection, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            # asyncio has closed the socket, unless the task was cancelled before it began.
            accepted.close()
        if error is not None and not isinstance(error, OSError):
            self._log.error("cannot set up a connection", exc_info=error)

    def _close_oldest_arriving(self) -> None:
        _, task = self.arriving.pop(next(iter(self.arriving)))
        task.cancel()

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = self._loop.time()
            for connection in self.connections:
                if connection.is_overdue(now):
                    connection.wire.abort()

    def _is_excess(self, accepted: socket.socket) -> bool:
        if self._exceed(self.limits.most):
            return True
        highest = self.limits.most_descriptors
        if highest is not None and accepted.fileno() > highest:
            # The kernel gives the lowest free descriptor, so all lower ones are in use.
            self._fitting_connections = self._count_open() - 1
            return True
        if highest is None or not self._exceed(self._fitting_connections):
            return False
        descriptors = [connection.wire.descriptor for connection in self.connections]
        descriptors += [accepted.fileno() for accepted, _ in self.arriving.values()]
        if max(descriptors) > highest:
            return True
        self._fitting_connections = None
        return False

    def _exceed(self, most: int | None) -> bool:
        if most is None or len(self.connections) + len(self.arriving) <= most:
            return False
        return self._count_open() > most

    def _count_open(self) -> int:
        """Return the number of arriving and of open connections; closing ones do not count."""
        return len(self.arriving) + sum(one.wire.is_open for one in self.connections)

    def _make_room(self) -> None:
        """Close one connection: the oldest arriving one if these have more than their share, because that loses no
        request; else the one that has waited longest for its client; else the one whose request's body has been coming
        longest; else the oldest arriving one."""
        # One in four connections may be arriving, including its TLS handshake. A client thus has time for its handshake
        # even if others begin theirs without end, and connections that have had a request keep the rest.
        if (len(self.arriving) - 1) * 4 > self._count_open():
            self._close_oldest_arriving()
        elif (
            waiting := self._longest(attrgetter("waits_since")) or self._longest(attrgetter("body_since"))
        ) is not None:
            waiting.wire.abort()
        else:
            self._close_oldest_arriving()
        if not self._warnings.take():
            return
        most = self.limits.most
        if most is not None and self._count_open() >= most:
            self._log.warning(
                "%d connections are open, the maximum: each further one closes another that waits for its client",
                most,
            )
        else:
            self._log.warning(
                "closing connections that wait for their clients: the limit of open files is reached, but for those"
                " that the server needs itself; raise the hard limit (ulimit -Hn, LimitNOFILE), or connect fewer"
                " clients connect"
            )

    def _longest(self, since: Callable[[Connection], float | None]) -> Connection | None:
        waiting = [(began, connection) for connection in self.connections if (began := since(connection)) is not None]
        return min(waiting, key=itemgetter(0))[1] if waiting else None


async def _wait_while(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until `holds` returns False, for at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while holds():  # noqa: ASYNC110 - rare
                await asyncio.sleep(0.02)


def most_descriptors() -> int | None:
    """Return the highest number of descriptors for HTTP's connections and all other uses; None = any number."""
    limit = file_limit()
    # The rest is for workers and for files that are read.
    return None if limit is None else limit - min(256, limit // 4)
