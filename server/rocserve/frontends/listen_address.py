"""Binds the ports that front ends listen on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.settings.unix_place import UnixPlace, unix_place

Filter = Sequence[tuple[int, int, int, int]]
"""The instructions of a classic filter: code, jumps if true and false, operand."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a protocol is served, as the settings have it."""

    protocol: str
    """The protocol served here, such as "metrics"."""
    flags: str
    """The common part of the flags' names, such as "grpc" in --grpc-port."""
    address: str
    port: int
    """0 = any free port."""
    reuse_port: bool = False

    @property
    def unix(self) -> UnixPlace | None:
        """The Unix socket that is listened on in place of a port."""
        return unix_place(self.address)

    def shown(self, port: int) -> str:
        """Return the address as users read it. `port`: the one that was found for 0."""
        return str(self.unix or f"{self.address}:{port}")

    def bind(self) -> socket.socket:
        """Return a bound socket that does not listen; other processes of this user may then share its port. Raises
        OSError (see `refusal`), without `reuse_port` also if another socket has the port."""
        family, kind, number, _, place = socket.getaddrinfo(
            self.address, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, number)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.reuse_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(place)
            # When a second socket binds, Linux requires the option of both. Without `reuse_port`, this one bound alone.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            bound.close()
            raise
        return bound

    def refusal(self, error: OSError) -> OSError:
        where = self.shown(self.port)
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        off = f"or switch {self.protocol} off with --allow-{self.flags}=false"
        if self.unix is not None:
            detail = error.strerror if error.errno in (errno.EEXIST, errno.EINVAL) and error.strerror else why
            text = f"cannot serve {self.protocol} at {where}: {detail}; name another with --{self.flags}-address, {off}"
            return OSError(error.errno, text)
        remedy = f"name another with --{self.flags}-port, {off}"
        # Errors of name resolution have negative numbers.
        if error.errno in (errno.EADDRNOTAVAIL, None) or error.errno < 0:
            remedy = f"name an address of this machine with --{self.flags}-address"
        return OSError(error.errno, f"cannot serve {self.protocol} at {where}: {why}; {remedy}")


def begin_no_handshakes(listening: socket.socket) -> None:
    """Ignore new connections before a listening socket is closed: the kernel would reset those that arrive between the
    last `accept` and the close, with their requests. Clients try again a second later."""
    # A socket filter of the kernel (socket(7), SO_ATTACH_FILTER) that drops attempts to connect.
    no_handshake_begins = (
        (0x30, 0, 0, 13),  # The flags of a segment's TCP header.
        (0x54, 0, 0, 0x12),  # SYN and ACK of these flags.
        (0x15, 0, 1, 0x02),  # SYN alone: drop the segment,
        (0x06, 0, 0, 0),
        (0x06, 0, 0, 0xFFFFFFFF),  # else accept it whole.
    )
    with contextlib.suppress(OSError):  # A kernel without filters.
        # 26 is SO_ATTACH_FILTER.
        set_filter(listening, 26, no_handshake_begins)


def set_filter(listening: socket.socket, option: int, instructions: Filter) -> None:
    """Set an option of SOL_SOCKET that takes a classic filter (struct sock_fprog of linux/filter.h). Raises OSError."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    listening.setsockopt(socket.SOL_SOCKET, option, struct.pack("HP", len(instructions), ctypes.addressof(code)))
