"""How messages travel between the server and a worker. Standard library only, no pickle.

Control and zygote messages are JSON with the message's name; on a worker's control socket, a stream, each stands
behind its length (unsigned 32-bit, little-endian).

Batches and their results go by links (`entries.py`). What an instance shares with its worker comes as descriptors, with
ATTACH, over the instance's socket, which is the doorbell of both afterwards: the worker's ring and the server's, the
worker's heap, the heap of the version's inputs, the page where the server says that it sleeps, and, for a model that
sees each request for itself, the socket of its back channel.
"""

from __future__ import annotations

import struct
from typing import Any, cast, get_args

from rocserve.core.errors import StatusCode
from rocserve.core.plain import from_json, to_json
from rocserve.workers.messages import ControlMessage, ZygoteMessage

ATTACH = struct.Struct("<I")
"""How often the instance looks for a batch before it sleeps."""

LONGEST_TEXT = 8192
"""Characters of one text in a message: an error, or what is wrong with what came."""

_NAMED: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(ControlMessage | ZygoteMessage)}

FRAME_LENGTH = struct.Struct("<I")
LONGEST_FRAME = 4 * 1024 * 1024
"""Bytes of what a worker says: room for some ten thousand tensors' names, and little enough to be parsed between two
requests."""


def encode_message(message: ControlMessage | ZygoteMessage) -> bytes:
    return type(message).__name__.encode() + b" " + to_json(message)


def decode_message(data: bytes) -> ControlMessage | ZygoteMessage:
    """Raises: ValueError."""
    name, _, body = data.partition(b" ")
    kind = _NAMED.get(name.decode("ascii", "replace"))
    if kind is None:
        raise ValueError(f"unknown message {name[:40]!r}")
    message: ControlMessage | ZygoteMessage = from_json(kind, body)
    return message


def status_code(code: int) -> StatusCode:
    """A code as a worker sends it; one that does not exist is INTERNAL."""
    try:
        return StatusCode(code)
    except ValueError:
        return StatusCode.INTERNAL


def encode_frame(message: ControlMessage) -> bytes:
    """A control message behind its length, as it stands on the stream."""
    data = encode_message(message)
    return FRAME_LENGTH.pack(len(data)) + data


class FrameReader:
    """Finds the control messages in a stream that comes in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, piece: bytes) -> list[ControlMessage]:
        """The messages that this piece completes.

        Raises:
            ValueError: what came is no message.
        """
        self._data += piece
        taken: list[ControlMessage] = []
        while len(self._data) >= FRAME_LENGTH.size:
            (length,) = FRAME_LENGTH.unpack_from(self._data)
            if length > LONGEST_FRAME:
                raise ValueError(f"a message of {length} bytes is announced, expected at most {LONGEST_FRAME}")
            end = FRAME_LENGTH.size + length
            if len(self._data) < end:
                break
            message = decode_message(bytes(self._data[FRAME_LENGTH.size : end]))
            del self._data[:end]
            taken.append(cast(ControlMessage, message))
        return taken
