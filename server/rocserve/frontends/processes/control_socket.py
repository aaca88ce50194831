"""Control socket of a front end carries what is rare between it and the server: messages of calls, and of nobody's.

A message has a head, a small dataclass in JSON, and a body of bytes. It travels in pieces, and those of different calls
take turns: a model that comes with a call is as large as gRPC takes, and a question about health must not wait for it.

Neither end waits for the other: what a front end that stands still does not read is kept, as much as it has asked for.
"""

from __future__ import annotations

import asyncio
import enum
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.plain import from_json, to_json

NOBODYS = 0
"""In place of a call's number."""


class Kind(enum.Enum):
    """What a message says; those of a call but for its BEGIN name it by its number."""

    LISTENING = "listening"
    """From a front end: it serves clients."""
    NOT_LISTENING = "not listening"
    """From a front end: it cannot, for the reason `text` (`number`: the system's, 0 = another), and ends."""
    STOP = "stop"
    """From the server: refuse new calls, answer those in flight within so many `seconds`, and end."""
    BEGIN = "begin"
    """From a front end: a call of the method `text` (its full name), with all that its client sent, `metadata` and the
    body, and where that is: `peer`."""
    CANCELLED = "cancelled"
    """From a front end: the client has gone. Nothing follows."""
    MESSAGE = "message"
    """From the server: one of a stream's answers, which is the body."""
    REPLY = "reply"
    """From the server: a unary call's answer, which is the body."""
    FINISH = "finish"
    """From the server: a call's end with the status `number` and its `text`."""


@dataclass(frozen=True, slots=True)
class Head:
    kind: Kind
    text: str = ""
    number: int = 0
    seconds: float = 0.0
    metadata: tuple[tuple[str, ...], ...] = ()
    peer: str = ""


_PIECE = struct.Struct("<IIB")
"""Call, bytes, whether it is its message's last."""
_HEAD_BYTES = struct.Struct("<I")
"""The head and the body stand behind it."""
_PIECE_BYTES = 64 << 10
_PIECES_AT_ONCE = 16
"""After which others of the loop have their turn."""
_LARGEST_HEAD = 1 << 20
"""Beside the largest body; gRPC itself takes 16 KiB of metadata."""

OnMessage = Callable[[int, Head, bytes], None]
"""Takes the call, the head and the body."""


class ControlSocket(asyncio.Protocol):
    """One end. On its event loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        most_body_bytes: int,
        on_message: OnMessage,
        on_end: Callable[[str], None],
    ) -> None:
        """Takes the connection over, and begins to read.

        Args:
            on_message: what it raises as a ValueError ends the connection.
            on_end: called once, with the reason, when the other end is closed or says what cannot be read.
        """
        self._most_bytes = most_body_bytes + _LARGEST_HEAD
        self._on_message = on_message
        self._on_end = on_end
        self._is_open = True
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        """Of what the system has not taken yet."""
        self._loop = loop
        self._writes_on = False
        """After others have had their turn."""
        self._unread = b""
        """Of a piece that has come in part."""
        self._partial: dict[int, bytearray] = {}
        """Messages that have come in part, by call."""
        self._unsent: dict[int, deque[memoryview]] = {}
        """By call; that whose turn it is comes first. An empty view ends a message."""
        self.opening = loop.create_task(loop.create_unix_connection(lambda: self, sock=connection))

    def send(self, call: int, head: Head, body: bytes = b"") -> None:
        """Never waits. Without the other end it goes nowhere."""
        if not self._is_open:
            return
        text = to_json(head)
        parts = self._unsent.setdefault(call, deque())
        parts.append(memoryview(_HEAD_BYTES.pack(len(text)) + text))
        if body:
            parts.append(memoryview(body))
        parts.append(memoryview(b""))
        if not self._writes_on:
            self._write()

    def close(self) -> None:
        self._is_open = False
        self._unsent.clear()
        self._partial.clear()
        if self._transport is not None:
            self._transport.abort()

    def _write(self) -> None:
        self._writes_on = False
        for _ in range(_PIECES_AT_ONCE):
            if not self._unsent or self._transport is None or self._is_full:
                return
            self._transport.write(self._next_piece())
        self._writes_on = True
        self._loop.call_soon(self._write)

    def _next_piece(self) -> bytes:
        call = next(iter(self._unsent))
        parts = self._unsent.pop(call)
        data = parts.popleft()
        if len(data) > _PIECE_BYTES:
            parts.appendleft(data[_PIECE_BYTES:])
            data = data[:_PIECE_BYTES]
        is_last = not parts[0]
        if is_last:
            parts.popleft()
        if parts:
            self._unsent[call] = parts
        return _PIECE.pack(call, len(data), is_last) + data

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._is_open:
            self._write()
        else:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        known = isinstance(error, OSError) and error.errno
        self._end(os.strerror(known) if known else "it closed its control socket")

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if not self._writes_on:
            self._write()

    def data_received(self, data: bytes) -> None:
        try:
            self._take_pieces(self._unread + data)
        except (ValueError, struct.error) as error:
            self._end(f"it sent what cannot be read: {error}")

    def _take_pieces(self, data: bytes) -> None:
        """Raises: ValueError, struct.error."""
        at = 0
        while self._is_open and len(data) - at >= _PIECE.size:
            call, nbytes, is_last = _PIECE.unpack_from(data, at)
            start = at + _PIECE.size
            if nbytes > _PIECE_BYTES:
                raise ValueError(f"a piece of {nbytes} bytes, expected at most {_PIECE_BYTES}")
            if len(data) - start < nbytes:
                break
            at = start + nbytes
            message = self._partial.setdefault(call, bytearray())
            message += data[start:at]
            if len(message) > self._most_bytes:
                raise ValueError(f"a message of more than {self._most_bytes} bytes")
            if is_last:
                view = memoryview(self._partial.pop(call))
                (head_bytes,) = _HEAD_BYTES.unpack_from(view)
                start = _HEAD_BYTES.size + head_bytes
                head = from_json(Head, bytes(view[_HEAD_BYTES.size : start]))
                self._on_message(call, head, bytes(view[start:]))
        self._unread = data[at:]

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._on_end(reason)
