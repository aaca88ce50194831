"""Finds this process's sockets of a port, which gRPC's core owns.

The core ends its port and its calls together: a call that is on its way then is answered CANCELLED. Who closes the port
first, and waits for the connections to leave, loses none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def stop_listening(port: int) -> None:
    """New connections are refused from now on; those that there are go on."""
    for descriptor, found in _sockets(port):
        if _listens(found):
            # The core keeps the descriptor, of which nothing will ever come.
            with socket.socket() as silent:
                os.dup2(silent.fileno(), descriptor, inheritable=False)


def has_connections(port: int) -> bool:
    """Whether a client is connected to the port."""
    return not all(_listens(found) for _, found in _sockets(port))


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
    for entry in Path("/proc/self/fd").iterdir():
        # Descriptors come and go meanwhile.
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                    yield int(entry.name), found
