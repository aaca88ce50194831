"""The worker's end of its control socket."""

from __future__ import annotations

import socket
import threading
from typing import cast

from rocserve.workers.messages import ControlMessage, Progress
from rocserve.workers.wire import FRAME_LENGTH, decode_message, encode_frame


class ControlSocket:
    """Messages to the server from any thread, messages from it on one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._rest = b""
        """Of a frame whose beginning has been sent."""
        self._waiting = b""
        """The newest Progress that found no room; older ones are of no interest any more."""

    def send(self, message: ControlMessage) -> None:
        """Wait until it is on its way, behind all that was told before. Raises: OSError: the server is gone."""
        with self._lock:
            self._connection.sendall(self._rest + self._waiting + encode_frame(message))
            self._rest = self._waiting = b""

    def tell(self, progress: Progress) -> None:
        """Never waits for the server: what there is no room for goes with the next message, unless that is a newer
        Progress. Without a server it is for nobody."""
        frame = encode_frame(progress)
        with self._lock:
            try:
                if self._rest:
                    self._rest = self._send_at_once(self._rest)
                if self._rest:
                    self._waiting = frame
                else:
                    self._waiting = b""
                    self._rest = self._send_at_once(frame)
            except OSError:
                pass

    def _send_at_once(self, data: bytes) -> bytes:
        """What there was no room for."""
        try:
            return data[self._connection.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data

    def renew(self, connection: socket.socket) -> None:
        """Talk to another server."""
        with self._lock:
            self._connection.close()
            self._connection = connection
            self._rest = self._waiting = b""

    def receive(self) -> ControlMessage:
        """The next message. Raises: EOFError, ConnectionError: the server is gone."""
        (length,) = FRAME_LENGTH.unpack(self._receive_exactly(FRAME_LENGTH.size))
        return cast(ControlMessage, decode_message(self._receive_exactly(length)))

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._connection.recv(size - len(data))
            if not piece:
                raise EOFError("the server closed the control socket")
            data += piece
        return bytes(data)
