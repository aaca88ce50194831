"""How messages travel between the server and a worker. Standard library only, no pickle.

Control and zygote messages are JSON with the message's name; on a worker's control socket, a stream, each stands
behind its length (unsigned 32-bit, little-endian).

A channel's messages are datagrams (SOCK_SEQPACKET), little-endian: HEADER, then a tail of numbers and a JSON body:

    tail = count (u32), count numbers (u64 each), body

- EXECUTE: body = BatchLayout; numbers = offset and nbytes of each input in the slot's input memory.
- EXECUTED: body = ResultLayout; numbers = offset and nbytes of each output in the slot's output memory; then, for a
  batch of several requests, for each BYTES output where each request's part begins, and the end of the last, in bytes
  from the output's offset.
- EXECUTE_FAILED: body = BatchFailure.
- ATTACH: no tail; carries the file descriptor of the slots' memory, input and output of each in turn, and, for a model
  that sees each request for itself, that of its conversation. Such a model's batches have one more input
  (`request_details.py`), and what EXECUTED says of them is in `request_results.py`.

The same layouts come thousands of times a second, so JSON is made and read once for each (`LayoutReader`), and both
ends remember what they did for a whole tail.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import StatusCode
from rocserve.core.plain import from_json, to_json
from rocserve.workers import messages
from rocserve.workers.messages import ControlMessage, ZygoteMessage

HEADER = struct.Struct("<BB6xQqqq")
"""Message kind, slot, batch id, input_end_ns, output_start_ns, compute_end_ns (time.monotonic_ns(); 0 in EXECUTE)."""

ATTACH, EXECUTE, EXECUTED, EXECUTE_FAILED = range(4)

MAXIMUM_DATAGRAM = 160 * 1024
"""Bytes; Linux's default socket buffers take datagrams a little over 200 KiB."""

LONGEST_TEXT = 8192
"""Characters of one text in a message: an error, or what is wrong with what came."""

_COUNT = struct.Struct("<I")
REMEMBERED = 256
"""How many layouts each memory of them holds."""

Layout = TypeVar("Layout")


def pack_tail(numbers: Sequence[int], body: bytes) -> bytes:
    return _COUNT.pack(len(numbers)) + _numbers(len(numbers)).pack(*numbers) + body


def unpack_tail(tail: bytes) -> tuple[tuple[int, ...], bytes]:
    """The numbers and the body of a tail.

    Raises:
        ValueError: it ends too early.
    """
    if len(tail) < _COUNT.size:
        raise ValueError(f"a message's tail has {len(tail)} bytes, expected at least {_COUNT.size}")
    (count,) = _COUNT.unpack_from(tail)
    end = _COUNT.size + 8 * count
    if end > len(tail):
        raise ValueError(f"a message's tail has {len(tail)} bytes, expected at least {end}")
    return _numbers(count).unpack_from(tail, _COUNT.size), tail[end:]


@functools.lru_cache(maxsize=256)
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


class LayoutReader(Generic[Layout]):
    """Reads layouts, each text once. Bounded: when full it starts anew."""

    def __init__(self, kind: type[Layout]) -> None:
        self._kind = kind
        self._layouts: dict[bytes, Layout] = {}

    def read(self, body: bytes) -> Layout:
        """Raises: ValueError."""
        layout = self._layouts.get(body)
        if layout is None:
            layout = from_json(self._kind, body)
            if len(self._layouts) >= REMEMBERED:
                self._layouts.clear()
            self._layouts[body] = layout
        return layout


_NAMED: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        messages.Load,
        messages.Loaded,
        messages.LoadFailed,
        messages.Progress,
        MetricChanges,
        messages.WarmUp,
        messages.WarmedUp,
        messages.Unload,
        messages.Verbosity,
        messages.Spawn,
        messages.Spawned,
        messages.SpawnFailed,
        messages.Exited,
    )
}

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
