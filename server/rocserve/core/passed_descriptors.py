"""Passes file descriptors between processes over a socket, with a message. `socket.send_fds` and `socket.recv_fds` of
Python 3.11 ignore their flags: they block in spite of MSG_DONTWAIT, and every child process of a model would inherit
the received descriptors."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

_DESCRIPTOR = struct.Struct("i")
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
"""A plain int: this is combined with other flags at every ring of a doorbell, and enum operators take microseconds."""


def send_with_descriptors(
    connection: socket.socket, message: bytes, descriptors: Sequence[int], flags: int = 0
) -> None:
    """Raises OSError; BlockingIOError if MSG_DONTWAIT is set and the socket is full."""
    rights = b"".join(map(_DESCRIPTOR.pack, descriptors))
    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], flags)


def receive_with_descriptors(
    connection: socket.socket, most_bytes: int, most_descriptors: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Receive a message and descriptors, which no child process inherits. No bytes mean that the other end is closed.
    Raises OSError; BlockingIOError if MSG_DONTWAIT is set and there is no message."""
    room = socket.CMSG_LEN(most_descriptors * _DESCRIPTOR.size)
    message, rights, _, _ = connection.recvmsg(most_bytes, room, int(flags) | _CLOSE_ON_EXEC)
    return message, descriptors_of(rights)


def descriptors_of(rights: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in the ancillary data that `recvmsg` returns."""
    return [descriptor for _, _, data in rights for (descriptor,) in _DESCRIPTOR.iter_unpack(data)]
