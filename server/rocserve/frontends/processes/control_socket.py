"""Control socket of a front end carries what is rare between it and the server: messages of calls, and of nobody's.

A message has a head, a small dataclass in JSON, and a body of bytes. It travels in pieces, and those of different calls
take turns: a model that comes with a call is as large as gRPC takes, and a question about health must not wait for it.

Neither end waits for the other: what a front end that stands still does not read is kept, as much as it has asked for.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rocserve.core.plain import from_json, to_json
from rocserve.plane.loop import PlaneLoop

NOBODYS = 0
"""The number of no call."""


@dataclass(frozen=True, slots=True)
class Listening:
    """From the front end: its port is open."""


@dataclass(frozen=True, slots=True)
class NotListening:
    """From the front end: its port cannot be opened. It ends."""

    error_number: int
    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """From the server: refuse new calls, let those in flight finish, then end."""

    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Begin:
    """From the front end: a call. The body is a unary call's message."""

    method: str
    metadata: tuple[tuple[str, ...], ...]
    """Keys and values; bytes of "-bin" keys as text, a character a byte."""
    peer: str
    seconds_left: float | None
    """Until the client no longer waits."""


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """Either way: the body is one more message of a stream."""


@dataclass(frozen=True, slots=True)
class Next:
    """From the server: a stream's message has been answered in full."""


@dataclass(frozen=True, slots=True)
class HalfClosed:
    """From the front end: the client of a stream sends no more."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """From the front end: the client has gone. Nothing follows."""


@dataclass(frozen=True, slots=True)
class Reply:
    """From the server: a unary call's answer, which is the body."""

    trailing_metadata: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """From the server: a call's end with a status."""

    code: int
    text: str
    trailing_metadata: tuple[tuple[str, ...], ...]


Head = Listening | NotListening | Stop | Begin | StreamMessage | Next | HalfClosed | Cancelled | Reply | Finish
_KINDS: tuple[type[Any], ...] = (
    Listening,
    NotListening,
    Stop,
    Begin,
    StreamMessage,
    Next,
    HalfClosed,
    Cancelled,
    Reply,
    Finish,
)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}

_PIECE = struct.Struct("<IIB")
"""Call, bytes, whether it is its message's last."""
_MESSAGE = struct.Struct("<BI")
"""Kind, bytes of the head; the head and the body stand behind it."""
_PIECE_BYTES = 64 << 10
_PIECES_AT_ONCE = 16
"""After which others of the loop have their turn."""
_READ_BYTES = 256 << 10
_LARGEST_HEAD = 1 << 20
"""Beside the largest body; gRPC itself takes 16 KiB of metadata."""

OnMessage = Callable[[int, Any, bytes], None]
"""Takes the call, the head and the body."""


class Watch(Protocol):
    """Watches a socket for an event loop."""

    def read(self, callback: Callable[[], None]) -> None:
        """Call back whenever it can be read, from now on."""

    def write(self, callback: Callable[[], None] | None) -> None:
        """Call back whenever it can be written to; None = no more."""

    def close(self) -> None: ...


class AsyncioWatch:
    def __init__(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection

    def read(self, callback: Callable[[], None]) -> None:
        self._loop.add_reader(self._connection, callback)

    def write(self, callback: Callable[[], None] | None) -> None:
        if callback is None:
            self._loop.remove_writer(self._connection)
        else:
            self._loop.add_writer(self._connection, callback)

    def close(self) -> None:
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)


class PlaneWatch:
    def __init__(self, connection: socket.socket, plane: PlaneLoop) -> None:
        self._plane = plane
        self._descriptor = connection.fileno()
        # The plane looks what can be read. An epoll can be once its socket can be written to.
        self._writable = select.epoll()
        self._writes = False

    def read(self, callback: Callable[[], None]) -> None:
        self._plane.register(self._descriptor, callback)

    def write(self, callback: Callable[[], None] | None) -> None:
        if callback is not None and not self._writes:
            self._writable.register(self._descriptor, select.EPOLLOUT)
            self._plane.register(self._writable.fileno(), callback)
        elif callback is None and self._writes:
            self._plane.unregister(self._writable.fileno())
            self._writable.unregister(self._descriptor)
        self._writes = callback is not None

    def close(self) -> None:
        self.write(None)
        self._plane.unregister(self._descriptor)
        self._writable.close()


class ControlSocket:
    """One end. On its event loop's thread."""

    def __init__(
        self,
        connection: socket.socket,
        watch: Watch,
        most_body_bytes: int,
        on_message: OnMessage,
        on_end: Callable[[str], None],
    ) -> None:
        """Takes the connection over, and begins to read.

        Args:
            on_end: called once, with the reason, when the other end is closed or says what cannot be read.
        """
        connection.setblocking(False)
        self._connection = connection
        self._watch = watch
        self._most_bytes = most_body_bytes + _LARGEST_HEAD
        self._on_message = on_message
        self._on_end = on_end
        self._is_open = True
        self._unread = b""
        """Of a piece that has come in part."""
        self._partial: dict[int, bytearray] = {}
        """Messages that have come in part, by call."""
        self._unsent: dict[int, deque[memoryview]] = {}
        """By call; that whose turn it is comes first. An empty view ends a message."""
        self._rest = memoryview(b"")
        """Of a piece that has been sent in part."""
        watch.read(self._read)

    def send(self, call: int, head: Head, body: bytes = b"") -> None:
        """Never waits. Without the other end it goes nowhere."""
        if not self._is_open:
            return
        text = to_json(head)
        parts = self._unsent.setdefault(call, deque())
        parts.append(memoryview(_MESSAGE.pack(_NUMBERS[type(head)], len(text)) + text))
        if body:
            parts.append(memoryview(body))
        parts.append(memoryview(b""))
        if len(self._unsent) == 1 and not self._rest:
            self._write()

    @property
    def has_sent_all(self) -> bool:
        return not self._unsent and not self._rest

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._watch.close()
            self._connection.close()
            self._unsent.clear()
            self._partial.clear()

    def _write(self) -> None:
        try:
            for _ in range(_PIECES_AT_ONCE):
                if not self._rest:
                    if not self._unsent:
                        break
                    self._rest = self._next_piece()
                self._rest = self._rest[self._connection.send(self._rest) :]
        except BlockingIOError:
            pass
        except OSError:
            # The reading side tells of the end.
            self._rest = memoryview(b"")
            self._unsent.clear()
        self._watch.write(None if self.has_sent_all else self._write)

    def _next_piece(self) -> memoryview:
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
        return memoryview(_PIECE.pack(call, len(data), is_last) + data)

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(os.strerror(error.errno or 0))
            return
        if not data:
            self._end("it closed its control socket")
            return
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
                self._take_message(call, self._partial.pop(call))
        self._unread = data[at:]

    def _take_message(self, call: int, message: bytearray) -> None:
        number, head_bytes = _MESSAGE.unpack_from(message)
        if number >= len(_KINDS):
            raise ValueError(f"a message of kind {number}")
        start = _MESSAGE.size + head_bytes
        head = from_json(_KINDS[number], bytes(memoryview(message)[_MESSAGE.size : start]))
        self._on_message(call, head, bytes(memoryview(message)[start:]))

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._on_end(reason)
