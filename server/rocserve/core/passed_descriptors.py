"""Passed descriptors go from process to process over a socket, with a message.

Python 3.11's `socket.send_fds` and `socket.recv_fds` pass no flags on: they wait where they are told not to, and every
child of a model inherits what they have received.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

_DESCRIPTOR = struct.Struct("i")
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
"""A plain number: flags are joined for each ring, and enum's operators take microseconds."""


def send_with_descriptors(
    connection: socket.socket, message: bytes, descriptors: Sequence[int], flags: int = 0
) -> None:
    """Raises: OSError; BlockingIOError with MSG_DONTWAIT where there is no room."""
    rights = b"".join(map(_DESCRIPTOR.pack, descriptors))
    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], flags)


def receive_with_descriptors(
    connection: socket.socket, most_bytes: int, most_descriptors: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """What has come, and the descriptors with it, which no child inherits; no bytes: the other end is gone. Raises:
    OSError; BlockingIOError with MSG_DONTWAIT where nothing has come."""
    room = socket.CMSG_LEN(most_descriptors * _DESCRIPTOR.size)
    message, rights, _, _ = connection.recvmsg(most_bytes, room, int(flags) | _CLOSE_ON_EXEC)
    return message, descriptors_of(rights)


def descriptors_of(rights: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Those in what `recvmsg` gives beside a message."""
    return [descriptor for _, _, data in rights for (descriptor,) in _DESCRIPTOR.iter_unpack(data)]
