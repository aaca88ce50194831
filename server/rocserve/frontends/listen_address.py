"""Where a protocol is served, why it cannot be, and the PEM files of its TLS, which are read again when they change: a
renewed certificate needs no restart."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rocserve.settings import GrpcSettings, HttpSettings, MetricsSettings

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


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where the certificates are."""

    chain: Path
    private_key: Path
    root: Path | None
    """Given: clients must show a certificate that it vouches for."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.chain, self.private_key, *((self.root,) if self.root else ()))

    @property
    def expected(self) -> str:
        return f"expected PEM files that belong together: {', '.join(map(str, self.paths))}"


@dataclass(eq=False)
class CertificateReloader:
    """Gives the certificates as they are on the disk. It is asked at each handshake, by gRPC from threads of its own.

    A renewal replaces several files, so for a moment they may not belong together; until they do, the earlier ones go
    on. Connections that are open keep what they were opened with.
    """

    _files: CertificateFiles
    _user: str
    """Who serves with them, for the log."""
    _log: logging.Logger
    context: ssl.SSLContext | None = field(default=None, init=False)
    """TLS with the certificates that were last given by `renewed`, as Python has it."""
    _marks: tuple[tuple[int, int, int], ...] = field(default=(), init=False)
    _fault: str = field(default="", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def first(self) -> Sequence[bytes]:
        """What the files hold, in their order. Raises: OSError when one cannot be read."""
        self._marks = self._read_marks()
        return self._read()

    def renewed(self) -> Sequence[bytes] | None:
        """The same if it has changed since it was last given, and can be used; else None."""
        with self._lock:
            try:
                marks = self._read_marks()
                if marks == self._marks:
                    return None
                certificates = self._read()
                context = self.checked()
                if self._read_marks() != marks:
                    # They are being written; the next handshake looks again.
                    return None
            except (OSError, ValueError) as error:
                # Once, not at every handshake.
                if str(error) != self._fault:
                    self._fault = str(error)
                    self._log.warning(
                        "the renewed certificate '%s' cannot be used (%s); %s goes on with the earlier one",
                        self._files.chain,
                        error,
                        self._user,
                    )
                return None
            self._marks, self._fault, self.context = marks, "", context
        self._log.info("%s uses the renewed certificate '%s' for new connections", self._user, self._files.chain)
        return certificates

    def _read_marks(self) -> tuple[tuple[int, int, int], ...]:
        """Raises: OSError."""
        found = (path.stat() for path in self._files.paths)
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)

    def _read(self) -> Sequence[bytes]:
        return [path.read_bytes() for path in self._files.paths]

    def checked(self) -> ssl.SSLContext:
        """TLS with what the files hold now. Raises: OSError (ssl.SSLError is one), ValueError: they do not belong
        together, or are no PEM."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.chain, self._files.private_key, _no_password)
        if self._files.root is not None:
            context.load_verify_locations(self._files.root)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class RenewedContext(ssl.SSLContext):
    """TLS of asyncio's servers, with the certificates as they are on the disk when a connection is made."""

    def __new__(cls, files: CertificateFiles, user: str, log: logging.Logger) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: CertificateFiles, user: str, log: logging.Logger) -> None:
        """Raises: OSError: a file cannot be read, or they do not belong together."""
        self._reloader = CertificateReloader(files, user, log)
        self._reloader.first()
        try:
            self._reloader.context = self._reloader.checked()
        except (ssl.SSLError, ValueError) as error:
            raise OSError(errno.EINVAL, f"cannot serve {user} with TLS: {files.expected} ({error})") from None

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Asked by asyncio for each connection."""
        self._reloader.renewed()
        assert self._reloader.context is not None
        return self._reloader.context.wrap_bio(*arguments, **named)


def certificate_files(
    grpc: GrpcSettings, port: GrpcSettings | HttpSettings | MetricsSettings
) -> CertificateFiles | None:
    """The certificates of a port: those of gRPC; None = it has no TLS. Raises: ValueError: one is not given."""
    if not (port.use_ssl or port.use_ssl_mutual):
        return None
    if grpc.server_cert is None or grpc.server_key is None:
        raise ValueError("TLS needs the server's certificate and its key (server_cert, server_key)")
    if port.use_ssl_mutual and grpc.root_cert is None:
        raise ValueError("mutual TLS needs the root certificate that vouches for clients (root_cert)")
    return CertificateFiles(grpc.server_cert, grpc.server_key, grpc.root_cert if port.use_ssl_mutual else None)


def tls_context(
    grpc: GrpcSettings, port: HttpSettings | MetricsSettings, user: str, log: logging.Logger
) -> ssl.SSLContext | None:
    """TLS of a port of HTTP; None = it has none. Raises: OSError."""
    files = certificate_files(grpc, port)
    return None if files is None else RenewedContext(files, user, log)


def _no_password() -> str:
    """An encrypted key would otherwise be asked for at the terminal."""
    raise ValueError("the private key is encrypted")
