"""The transport of one HTTP connection: answers go out as fast as the client reads."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import time

from rocserve.core.tensors import Buffer
from rocserve.frontends.unix_sockets import client_of


class Wire:
    """On the event loop; times are time.monotonic() seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.is_open = False
        """False before the connection is made, and once nothing is read or written any more."""
        self.remote = ""
        """The client's address; "" if the client had left before the connection was set up."""
        self.ends_at = math.inf
        """The time after which the next answer is the last."""
        self.unread_since: float | None = None
        """Since when the client must read."""
        self.reads = True
        self._transport: asyncio.Transport
        self._drained: asyncio.Future[None] | None = None

    def open(self, transport: asyncio.Transport, age_seconds: float) -> None:
        self._transport = transport
        self.is_open = True
        peer, connection = transport.get_extra_info("peername"), transport.get_extra_info("socket")
        if connection is not None and connection.family == socket.AF_UNIX:
            self.remote = client_of(connection)
        else:
            self.remote = str(peer[0]) if isinstance(peer, tuple) else ""
        if age_seconds:
            # Connections that began together must not end together; gRPC's core spreads them in the same way.
            self.ends_at = time.monotonic() + age_seconds * random.uniform(0.9, 1.1)

    def pause_reading(self) -> None:
        if self.reads and self.is_open:
            self.reads = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.reads and self.is_open:
            self.reads = True
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.unread_since = time.monotonic()

    def resume_writing(self) -> None:
        self.unread_since = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def write(self, data: Buffer) -> None:
        if self.is_open:
            self._transport.write(data)

    def check_open(self) -> None:
        if not self.is_open:
            raise ConnectionResetError("the client has gone")

    async def drain(self) -> None:
        """Wait until the client has read most of what was written. Raises ConnectionError if the client has gone."""
        if self.unread_since is not None:
            self._drained = self.loop.create_future()
            await self._drained
        self.check_open()

    @property
    def descriptor(self) -> int:
        """-1 if the connection has been closed."""
        connection = self._transport.get_extra_info("socket")
        return -1 if connection is None else int(connection.fileno())

    def end_writing(self) -> bool:
        """End only the writing side. Returns False if that is not possible."""
        if not (self.is_open and self._transport.can_write_eof()):
            return False
        self._transport.write_eof()
        return True

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def abort(self) -> None:
        self.is_open = False
        self._transport.abort()
