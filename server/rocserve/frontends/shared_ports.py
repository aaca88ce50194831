"""Reserves the ports that the server and its front end processes share, and decides which of them get new connections.

All processes listen on a port with SO_REUSEPORT. The kernel numbers their sockets: the server's, which listens first,
is 0, and stays 0; when a socket closes the last one takes its number. A filter of the port (socket(7),
SO_ATTACH_REUSEPORT_CBPF) returns the number of the socket that gets a new connection; if no socket has the number, the
kernel chooses any. So no process has to stop listening when another takes over, and no handshake is lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.frontends.listen_address import Filter, ListenAddress, set_filter

_SO_ATTACH_REUSEPORT_CBPF = 51
_RETURN, _RETURN_A, _LOAD, _MODULO, _ADD = 0x06, 0x16, 0x20, 0x94, 0x04
"""Instructions of the kernel's classic filters (linux/filter.h)."""


@dataclass(eq=False)
class SharedPorts:
    """The ports that the server and its front end processes share."""

    addresses: Sequence[ListenAddress]
    """One for each protocol."""
    ports: dict[str, int] = field(default_factory=dict, init=False)
    """Protocol -> port."""
    _reservations: list[socket.socket] = field(default_factory=list, init=False)
    """They do not listen. Without them another program could take a port while no process listens."""

    def reserve(self) -> list[Exception]:
        """Return the errors of ports that cannot be bound."""
        refusals: list[Exception] = []
        for where in self.addresses:
            try:
                self._reservations.append(where.bind())
                self.ports[where.protocol] = self._reservations[-1].getsockname()[1]
            except OSError as error:
                refusals.append(where.refusal(error))
        return refusals

    def close(self) -> None:
        for reservation in self._reservations:
            reservation.close()
        self._reservations.clear()

    # This process must listen on the ports.

    def give_to_this_process(self) -> None:
        """Let this process get all new connections. Only if its sockets were the first to listen."""
        self._filter([(_RETURN, 0, 0, 0)])

    def give_to_others(self, count: int) -> None:
        """Let `count` other processes share the new connections."""
        # SKF_AD_OFF + SKF_AD_RANDOM: loads a random number.
        random_number = 0xFFFFF000 + 56
        self._filter([(_LOAD, 0, 0, random_number), (_MODULO, 0, 0, count), (_ADD, 0, 0, 1), (_RETURN_A, 0, 0, 0)])

    def give_to_all(self) -> None:
        """Let all processes share the new connections. A process that begins to listen connects to itself."""
        no_socket = 0xFFFFFFFF
        self._filter([(_RETURN, 0, 0, no_socket)])

    def _filter(self, instructions: Filter) -> None:
        for port in self.ports.values():
            for _, found in sockets_of(port):
                if listens(found):
                    set_filter(found, _SO_ATTACH_REUSEPORT_CBPF, instructions)


def kernel_has_filters() -> bool:
    """Return whether the kernel does what a filter says. Sandboxes such as gVisor accept filters and ignore them."""
    # A kernel that ignores filters passes by chance once in 4,096 times.
    trials = 12
    trial_seconds = 1.0
    with contextlib.ExitStack() as opened:
        first, second = (opened.enter_context(socket.socket()) for _ in range(2))
        try:
            for one in (first, second):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                one.bind(("127.0.0.1", 0) if one is first else first.getsockname())
                one.listen(trials)
            set_filter(first, _SO_ATTACH_REUSEPORT_CBPF, [(_RETURN, 0, 0, 1)])
            # select() refuses descriptors above 1023.
            poll = select.poll()
            for one in (first, second):
                poll.register(one, select.POLLIN)
            for _ in range(trials):
                opened.enter_context(socket.create_connection(first.getsockname(), trial_seconds))
                if poll.poll(trial_seconds * 1000) != [(second.fileno(), select.POLLIN)]:
                    return False
                opened.enter_context(second.accept()[0])
        except OSError:
            return False
    return True


def has_connections(place: int | str) -> bool:
    """Return whether this process has connections of clients to the port, or to the path of a Unix socket."""
    for _, found in sockets_of(place):
        with contextlib.suppress(OSError):
            found.getpeername()
            return True
    return False


def listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def sockets_of(place: int | str) -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptor of each of this process's sockets that are bound to the port, or to the path under which a
    Unix socket was bound, and a duplicate that is open until the next one."""
    for entry in Path("/proc/self/fd").iterdir():
        # Other threads open and close descriptors meanwhile.
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                name = found.getsockname()
                if (name[1] if found.family in (socket.AF_INET, socket.AF_INET6) else name) == place:
                    yield int(entry.name), found
