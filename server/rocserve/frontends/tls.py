"""Serves TLS with PEM files, and reads them again when they change: renewing certificates needs no restart."""

from __future__ import annotations

import errno
import logging
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rocserve.settings import GrpcSettings, HttpSettings, MetricsSettings


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files of a port's certificate."""

    chain: Path
    private_key: Path
    root: Path | None
    """The root certificate that must have signed clients' certificates; None = clients need no certificate."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.chain, self.private_key, *((self.root,) if self.root else ()))

    @property
    def expected(self) -> str:
        return f"expected a matching certificate and key as PEM files: {', '.join(map(str, self.paths))}"


@dataclass(eq=False)
class CertificateReloader:
    """Reads certificates again when their files change. gRPC calls it from several threads, at each handshake. A
    renewal replaces several files: until the files belong together, the earlier certificates stay in use. Open
    connections keep their certificates."""

    _files: CertificateFiles
    _user: str
    """The name of the port in the log, such as "gRPC"."""
    _log: logging.Logger
    context: ssl.SSLContext | None = field(default=None, init=False)
    """TLS for Python with the certificates that `renewed` last returned."""
    _marks: tuple[tuple[int, int, int], ...] = field(default=(), init=False)
    _fault: str = field(default="", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def first(self) -> Sequence[bytes]:
        """Return the files' contents in order. Raises OSError if one cannot be read."""
        self._marks = self._read_marks()
        return self._read()

    def renewed(self) -> Sequence[bytes] | None:
        """Return the files' contents if they have changed and are usable, else None."""
        with self._lock:
            try:
                marks = self._read_marks()
                if marks == self._marks:
                    return None
                certificates = self._read()
                context = self.checked()
                if self._read_marks() != marks:
                    # The files are being written: the next handshake reads them again.
                    return None
            except (OSError, ValueError) as error:
                # Logged once, not at every handshake.
                if str(error) != self._fault:
                    self._fault = str(error)
                    self._log.warning(
                        "cannot use the renewed certificate '%s' (%s); %s keeps the earlier one",
                        self._files.chain,
                        error,
                        self._user,
                    )
                return None
            self._marks, self._fault, self.context = marks, "", context
        self._log.info("%s uses the renewed certificate '%s' for new connections", self._user, self._files.chain)
        return certificates

    def _read_marks(self) -> tuple[tuple[int, int, int], ...]:
        found = (path.stat() for path in self._files.paths)
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)

    def _read(self) -> Sequence[bytes]:
        return [path.read_bytes() for path in self._files.paths]

    def checked(self) -> ssl.SSLContext:
        """Return TLS with the present files. Raises OSError or ValueError if they do not belong together or are not
        PEM."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.chain, self._files.private_key, _no_password)
        if self._files.root is not None:
            context.load_verify_locations(self._files.root)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class RenewedContext(ssl.SSLContext):
    """TLS for asyncio's servers. Each new connection uses the certificates that are on the disk."""

    def __new__(cls, files: CertificateFiles, user: str, log: logging.Logger) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: CertificateFiles, user: str, log: logging.Logger) -> None:
        """Raises OSError if a file cannot be read, or if the files do not belong together."""
        self._reloader = CertificateReloader(files, user, log)
        self._reloader.first()
        try:
            self._reloader.context = self._reloader.checked()
        except (ssl.SSLError, ValueError) as error:
            raise OSError(errno.EINVAL, f"cannot serve {user} with TLS: {files.expected} ({error})") from None

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Called by asyncio for each connection."""
        self._reloader.renewed()
        assert self._reloader.context is not None
        return self._reloader.context.wrap_bio(*arguments, **named)


def certificate_files(
    grpc: GrpcSettings, port: GrpcSettings | HttpSettings | MetricsSettings
) -> CertificateFiles | None:
    """Return a port's files, which are those of gRPC; None = no TLS. Raises ValueError if a file is not given."""
    if not (port.use_ssl or port.use_ssl_mutual):
        return None
    if grpc.server_cert is None or grpc.server_key is None:
        raise ValueError("TLS needs the server's certificate and its key (server_cert, server_key)")
    if port.use_ssl_mutual and grpc.root_cert is None:
        raise ValueError("mutual TLS needs the root certificate of the clients' certificates (root_cert)")
    return CertificateFiles(grpc.server_cert, grpc.server_key, grpc.root_cert if port.use_ssl_mutual else None)


def tls_context(
    grpc: GrpcSettings, port: HttpSettings | MetricsSettings, user: str, log: logging.Logger
) -> ssl.SSLContext | None:
    """Return the TLS of an HTTP port; None = the port has none. Raises OSError."""
    files = certificate_files(grpc, port)
    return None if files is None else RenewedContext(files, user, log)


def _no_password() -> str:
    """Refuse an encrypted key, for which OpenSSL would otherwise ask at the terminal."""
    raise ValueError("the private key is encrypted")
