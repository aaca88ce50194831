"""Listens for HTTP: takes connections, as many as there may be, and closes those that keep the server waiting."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from rocserve.frontends.grpc.transport import file_limit
from rocserve.frontends.http.protocol import Connection, ConnectionLimits, Connections
from rocserve.frontends.http.request import Request, Response
from rocserve.frontends.listen_address import ListenAddress, begin_no_handshakes
from rocserve.observability.rate_limits import Allowance

_PENDING_CONNECTIONS = 1024
"""That the kernel keeps until they are taken."""
_TAKEN_AT_ONCE = 8
"""Of them, in each round of the loop. One too many is closed within four rounds, so that there may be 32 too many for a
moment: fewer than the descriptors that the server keeps for itself."""
_TAKING_PAUSE_SECONDS = 1.0
"""Where none can be taken, as no file may be opened any more."""
_ARRIVING_SHARE = 4
"""One in four connections may be arriving, its handshake of TLS included: that leaves a client time for its own while
others begin theirs without end, and those that have had a request keep the rest."""
_FIRST_REQUEST_SECONDS = 1.0
"""What a client that has just connected, or begun a request, has for the rest of it when the server ends."""
_POLL_SECONDS = 0.02
"""Between two checks whether there is still such a client, or a request in progress."""
_CLOSE_SECONDS = 1.0
"""What connections and tasks have to end."""
_WATCH_SECONDS = 1.0
"""Between two checks for connections whose clients keep them waiting."""
_SECONDS_BETWEEN_WARNINGS = 10.0
_KEPT_DESCRIPTORS = 256
"""For the process itself, of the files that may be open: workers take some, and so do files that are read."""


class HttpListener:
    """All calls are made on the loop. A connection counts from the moment on that it is taken."""

    def __init__(
        self,
        handle: Callable[[Request], None],
        log: logging.Logger,
        limits: ConnectionLimits | None = None,
        tls: ssl.SSLContext | None = None,
        failure: Callable[[Request, Exception], Response] = lambda request, error: Response(500, b"", "text/plain"),
    ) -> None:
        """`handle`, `failure`: see Connections."""
        self._log = log.getChild("connections")
        self._limits = limits or ConnectionLimits()
        self._tls = tls
        self._connections = Connections(handle, failure, self._limits.age_seconds)
        self._connections.on_made = lambda connection: self._arriving.pop(connection, None)
        self._listening: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop
        self._watch: asyncio.Task[None] | None = None
        self._arriving: dict[Connection, _Arrival] = {}
        """In the order in which they were taken."""
        self._fitting: int | None = None
        """How many connections there may be while one has a descriptor above the limit: those that closed ones leave
        are lower, and do not show it."""
        self._warnings = Allowance(1, 1 / _SECONDS_BETWEEN_WARNINGS)

    async def start(self, where: ListenAddress) -> int:
        """Listen; returns the port. Raises: OSError: it cannot be listened on; its text says where and what to do."""
        loop = self._loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._close_overdue())
        try:
            # asyncio binds, but takes none: it would report one with TLS only after the handshake.
            bound = await loop.create_server(
                asyncio.Protocol, where.address, where.port, reuse_port=where.reuse_port or None, start_serving=False
            )
            self._listening = [each.dup() for each in bound.sockets]
            bound.close()
            for listening in self._listening:
                listening.listen(_PENDING_CONNECTIONS)
                loop.add_reader(listening.fileno(), self._take, listening)
        except OSError as error:
            await self.stop()
            raise where.refusal(error) from None
        return int(self._listening[0].getsockname()[1])

    def close_after_answers(self) -> None:
        """Have clients connect anew, here or elsewhere."""
        self._connections.closes_after_answers = True

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more connections, let open requests finish within the grace time, close all connections. What is
        asked on open connections meanwhile is answered, and the connection closed."""
        self.close_after_answers()
        connections = self._connections
        if connections.is_ending or self._watch is None:
            return
        connections.is_ending = True
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
            begin_no_handshakes(listening)
            # Who has connected already is served.
            while self._take(listening):
                pass
            listening.close()
        try:
            async with asyncio.timeout(min(grace_seconds, _FIRST_REQUEST_SECONDS)):
                while self._arriving or any(each.awaits_head for each in connections.open):  # noqa: ASYNC110 - rare
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            pass
        try:
            async with asyncio.timeout(grace_seconds):
                while any(each.has_request for each in connections.open):  # noqa: ASYNC110 - rare
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            pass
        self._watch.cancel()
        while self._arriving:
            self._close_oldest_arriving()
        for connection in connections.open:
            if connection.has_request:
                connection.abort()
            else:
                connection.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await connections.none_open.wait()
                await asyncio.gather(*connections.tasks, return_exceptions=True)
        except TimeoutError:
            pass
        for connection in connections.open:
            connection.abort()

    def _take(self, listening: socket.socket) -> bool:
        """Whether there may be more."""
        for _ in range(_TAKEN_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_TAKING_PAUSE_SECONDS, self._resume_taking, listening)
                self._loop.call_exception_handler(
                    {"message": "connections cannot be taken", "exception": error, "socket": listening}
                )
                return False
            self._admit(accepted)
        return True

    def _resume_taking(self, listening: socket.socket) -> None:
        if not self._connections.is_ending:
            self._loop.add_reader(listening.fileno(), self._take, listening)

    def _admit(self, accepted: socket.socket) -> None:
        loop = self._loop
        connection = Connection(self._connections, loop)
        seconds = None if self._tls is None else self._limits.head_seconds
        coming = loop.connect_accepted_socket(
            lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
        )
        task = loop.create_task(coming)
        task.add_done_callback(partial(self._end_arrival, connection, accepted))
        self._arriving[connection] = _Arrival(accepted, task)
        if self._has_one_too_many(accepted):
            self._make_room()

    def _end_arrival(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[Any]) -> None:
        self._arriving.pop(connection, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            # asyncio has closed it, unless it had not begun.
            accepted.close()
        if error is not None and not isinstance(error, OSError):
            self._log.error("a connection could not be taken", exc_info=error)

    def _close_oldest_arriving(self) -> None:
        self._arriving.pop(next(iter(self._arriving))).task.cancel()

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = self._loop.time()
            for connection in self._connections.open:
                if connection.is_overdue(self._limits, now):
                    connection.abort()

    def _has_one_too_many(self, accepted: socket.socket) -> bool:
        if self._are_more_than(self._limits.most):
            return True
        if self._is_above(accepted.fileno()):
            # The kernel gives the lowest that is free, so that all below are in use, whatever for.
            self._fitting = self._count_open() - 1
            return True
        if not self._are_more_than(self._fitting):
            return False
        descriptors = [connection.descriptor for connection in self._connections.open]
        descriptors += [arrival.socket.fileno() for arrival in self._arriving.values()]
        if not any(map(self._is_above, descriptors)):
            self._fitting = None
        return self._fitting is not None

    def _are_more_than(self, most: int | None) -> bool:
        if most is None or len(self._connections.open) + len(self._arriving) <= most:
            return False
        return self._count_open() > most

    def _count_open(self) -> int:
        """Those that are closing are still among the connections."""
        return len(self._arriving) + sum(not each.is_closing for each in self._connections.open)

    def _is_above(self, descriptor: int) -> bool:
        return self._limits.most_descriptors is not None and descriptor > self._limits.most_descriptors

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
        if self._warnings.take():
            self._log.warning("%s", self._full())

    def _longest(self, since: Callable[[Connection], float | None]) -> Connection | None:
        waiting = [
            (began, connection) for connection in self._connections.open if (began := since(connection)) is not None
        ]
        return min(waiting, key=itemgetter(0))[1] if waiting else None

    def _full(self) -> str:
        most = self._limits.most
        if most is not None and self._count_open() >= most:
            return (
                f"there are {most} connections, as many as there may be: for each one more, another whose client keeps"
                " it waiting is closed"
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


def most_descriptors() -> int | None:
    """That HTTP's connections and all else may take together; None = any number."""
    limit = file_limit()
    return None if limit is None else limit - min(_KEPT_DESCRIPTORS, limit // 4)
