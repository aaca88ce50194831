"""Tells gRPC's server which user makes a call over a Unix socket, if the settings distinguish users.

gRPC's core accepts connections itself, and does not show their sockets. So the relay accepts them, asks the kernel for
the user, and connects to the core from a socket whose own name says the user: the core reports that name as the
client's address. Only the relay can connect to the core's socket. Each byte is copied once more, so without such
settings there is no relay.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import secrets
import socket

from rocserve.frontends.unix_sockets import client_of, listen
from rocserve.settings.server import USER
from rocserve.settings.unix_place import UnixPlace

_PAUSE_SECONDS = 0.05
"""Pause after a failure to accept or to connect."""
_PREFIX = "rocserve"


class UserRelay:
    """On the event loop of the plane's thread."""

    def __init__(self, place: UnixPlace, core: str, log: logging.Logger) -> None:
        """`core`: the path of the core's socket. Raises OSError if the address cannot be bound."""
        self._core = core
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        # Abstract names belong to all users, so nobody may guess them.
        self._names = (f"\0{_PREFIX}.{secrets.token_hex(8)}.{number}." for number in itertools.count())
        self._listening, self._published = listen(place, backlog=1024)
        self._listen()

    def stop_listening(self) -> None:
        """Accept the clients that have connected already, and no further ones."""
        self._published.withdraw()
        self._loop.remove_reader(self._listening.fileno())
        self._accept()
        self._listening.close()

    async def close(self) -> None:
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _listen(self) -> None:
        if self._listening.fileno() != -1:
            self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            while True:
                client, _ = self._listening.accept()
                connection = self._loop.create_task(self._serve(client))
                self._connections.add(connection)
                connection.add_done_callback(self._connections.discard)
        except BlockingIOError:
            pass
        except OSError as error:
            self._log.error("cannot accept connections: %s", error.strerror)
            self._loop.remove_reader(self._listening.fileno())
            self._loop.call_later(_PAUSE_SECONDS, self._listen)

    async def _serve(self, client: socket.socket) -> None:
        try:
            await self._relay(client)
        except OSError as error:
            # For example at the limit of open files.
            self._log.error("cannot relay a connection of the Unix socket: %s", error)

    async def _relay(self, client: socket.socket) -> None:
        """Raises OSError if the core cannot be reached."""
        with client, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as core:
            client.setblocking(False)
            core.bind(f"{next(self._names)}{client_of(client)}")
            while number := core.connect_ex(self._core):
                if number != errno.EAGAIN:
                    raise OSError(number, os.strerror(number))
                # The core has not accepted the clients before.
                await asyncio.sleep(_PAUSE_SECONDS)
            ways = [self._loop.create_task(_copy(*ends)) for ends in ((client, core), (core, client))]
            try:
                # gRPC cannot use a connection that is open in one direction only.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)


async def _copy(source: socket.socket, target: socket.socket) -> None:
    """Raises OSError if one of both is gone."""
    loop, piece = asyncio.get_running_loop(), memoryview(bytearray(64 << 10))
    while count := await loop.sock_recv_into(source, piece):
        await loop.sock_sendall(target, piece[:count])


def user_of(peer: str) -> str:
    """Return the user that the relay wrote into a client's address, as "uid:N"; "" = the relay did not."""
    name, separator, number = peer.rpartition(USER)
    return f"{USER}{number}" if separator and name.startswith(f"unix-abstract:{_PREFIX}.") else ""
