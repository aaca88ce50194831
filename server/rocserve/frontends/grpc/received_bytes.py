"""Reads from Linux how many bytes have come on each TCP connection of a port (sock_diag, see `man 7 sock_diag`).

gRPC's core owns the sockets and does not tell. The kernel does so of all sockets of the process's network namespace, by
their ports, and asks for no privilege.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from urllib.parse import unquote

Peer = tuple[bytes, int]
"""Address and port."""
ReceivedBytes = Mapping[Peer, Mapping[int, int]]
"""By peers and the kernel's numbers of sockets: two addresses of the server may have the same peer."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_AND_DUMP = 0x301
_ERROR, _DONE = 2, 3
_INET_DIAG_INFO = 2
_ESTABLISHED, _CLOSE_WAIT = 1 << 1, 1 << 8
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_SOCKET_ID = struct.Struct("!HH16s16s")
_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_COOKIE_AT, _ATTRIBUTES_AT, _MESSAGE_AT = 44, 72, 16
_BYTES_RECEIVED_AT = 128
"""Of tcp_info."""
_ATTRIBUTE = struct.Struct("=HH")
_COUNT = struct.Struct("=Q")
_IPV4_IN_IPV6 = bytes(10) + b"\xff\xff"
_SECONDS = 1.0
"""The kernel answers at once."""
_MOST_BYTES_AT_ONCE = 1 << 16
"""More than the kernel gives."""


def peer_of(text: str) -> Peer | None:
    """From gRPC's notation: "ipv4:127.0.0.1:40000", "ipv6:[::1]:40000" (also in URL's escapes); None = not of TCP."""
    kind, _, rest = text.partition(":")
    address, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return _plain(ipaddress.ip_address(address.strip("[]").partition("%")[0]).packed), int(port)


def received_bytes(port: int) -> ReceivedBytes:
    """Of all connections whose own port this is.

    Raises:
        OSError: the system does not tell.
    """
    found: dict[Peer, dict[int, int]] = {}
    kind = getattr(socket, "AF_NETLINK", None)
    if kind is None:
        raise OSError("this system has no sock_diag")
    with closing(socket.socket(kind, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)) as link:
        link.settimeout(_SECONDS)
        for family, nbytes in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
            body = _REQUEST.pack(
                family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, _ESTABLISHED | _CLOSE_WAIT
            ) + _SOCKET_ID.pack(port, 0, b"", b"")
            body += _NO_COOKIE
            link.sendto(
                _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0) + body, (0, 0)
            )
            for message in _messages(link):
                own_port, peer_port, _, address = _SOCKET_ID.unpack_from(message, 4)
                count = _bytes_received(message)
                if own_port == port and count is not None:
                    cookie: int = _COUNT.unpack_from(message, _COOKIE_AT)[0]
                    found.setdefault((_plain(address[:nbytes]), peer_port), {})[cookie] = count
    return found


def _plain(address: bytes) -> bytes:
    return address[12:] if len(address) == 16 and address.startswith(_IPV4_IN_IPV6) else address


def _messages(link: socket.socket) -> Iterator[memoryview]:
    while True:
        data = memoryview(link.recv(_MOST_BYTES_AT_ONCE))
        while len(data) >= _HEADER.size:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            if kind == _ERROR:
                number = -struct.unpack_from("=i", data, _MESSAGE_AT)[0]
                raise OSError(number, "the kernel refuses sock_diag")
            if kind == _DONE:
                return
            yield data[_MESSAGE_AT:length]
            data = data[(length + 3) & ~3 :]


def _bytes_received(message: memoryview) -> int | None:
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INET_DIAG_INFO and length >= _ATTRIBUTE.size + _BYTES_RECEIVED_AT + _COUNT.size:
            count: int = _COUNT.unpack_from(message, at + _ATTRIBUTE.size + _BYTES_RECEIVED_AT)[0]
            return count
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    return None
