"""A TCP proxy: connections to it come to the server from another address of this machine."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self


class Forwarder:
    """Listens on a free port of the loopback; a context manager."""

    def __init__(self, port: int, source: str = "127.0.0.6") -> None:
        """`source`: where the server sees the connections come from."""
        self._target = ("127.0.0.1", port)
        self._source = (source, 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in (self._listener, *self._open):
            # Closing alone does not wake a thread that waits in it.
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target, source_address=self._source)
            self._open += [client, server]
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return
