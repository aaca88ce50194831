"""Where a protocol is served, and why it cannot be."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from dataclasses import dataclass

_SO_ATTACH_FILTER = 26
_NO_HANDSHAKE_BEGINS = (
    (0x30, 0, 0, 13),  # The flags of a segment's TCP header.
    (0x54, 0, 0, 0x12),  # Of them SYN and ACK.
    (0x15, 0, 1, 0x02),  # SYN alone: drop it,
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFFFFFF),  # else take it whole.
)
"""A filter of the kernel's (socket(7), SO_ATTACH_FILTER)."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    protocol: str
    """Served there, e.g. "metrics"."""
    flags: str
    """The part of the name that the flags for it have in common."""
    address: str
    port: int
    """0 = any free one."""
    reuse_port: bool = False

    def bind(self) -> socket.socket:
        """A socket that has the port, and does not listen: processes of this user may share the port from then on.

        Without `reuse_port` it is an error when anybody else has the port.

        Raises:
            OSError: the port cannot be had, see `refusal`.
        """
        family, kind, number, _, place = socket.getaddrinfo(
            self.address, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, number)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.reuse_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(place)
            # Linux asks for the option of both when another binds; this one has bound without it, alone.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            bound.close()
            raise
        return bound

    def refusal(self, error: OSError) -> OSError:
        """Why it cannot be listened on, and what to do."""
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        remedy = f"name another with --{self.flags}-port, or switch {self.protocol} off with --allow-{self.flags}=false"
        # Names that cannot be resolved have numbers below zero.
        if error.errno in (errno.EADDRNOTAVAIL, None) or error.errno < 0:
            remedy = f"name an address of this machine with --{self.flags}-address"
        return OSError(error.errno, f"cannot serve {self.protocol} at {self.address}:{self.port}: {why}; {remedy}")


def begin_no_handshakes(listening: socket.socket) -> None:
    """Before the socket is closed: clients that connect between the last `accept` and the end would be reset, with the
    requests that they sent. The kernel answers no attempt to connect any more; they are made anew a second later."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _NO_HANDSHAKE_BEGINS))
    with contextlib.suppress(OSError):  # A kernel without filters.
        listening.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", len(_NO_HANDSHAKE_BEGINS), ctypes.addressof(code)),
        )
