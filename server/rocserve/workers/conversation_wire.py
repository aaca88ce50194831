"""How the two ends of a conversation talk: the second socket of a worker whose model sees each request for itself.

Datagrams (SOCK_SEQPACKET), little-endian: a header, then a tail as in `wire.py`, whose numbers are the length of its
JSON and the size of each tensor in bytes. The tensors follow the JSON one after the other; large ones lie in a memfd
that comes along, each at the next multiple of `memory.ALIGNMENT`, sealed so that neither its size nor its content can
change.

- ANSWER: JSON = AnswerLayout; a response to the request (from the worker) or call (from the server) of that number.
- END: no tail; the request or call has ended without another response.
- CALL: JSON = CallLayout; from the worker.
- AGAIN: no tail; from the worker: the request ends here, and is to be sent again in a later batch.
- CANCELLED: no tail; from the server: nobody waits for the request any more.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.backends.request_model import RESCHEDULED, Answer, ModelCall, ModelResponse, Result
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.plain import to_json
from rocserve.core.tensors import Buffer, Tensor, can_hold
from rocserve.plane.anonymous_file import MAPPED_WITHOUT_A_COPY
from rocserve.workers.memory import aligned, written_size
from rocserve.workers.messages import AnswerLayout, CallLayout, TensorHead
from rocserve.workers.wire import LONGEST_TEXT, MAXIMUM_DATAGRAM, LayoutReader, pack_tail, status_code, unpack_tail

HEADER = struct.Struct("<B?6xQ")
"""Kind, whether it is the last of its number, and the number."""

ANSWER, END, CALL, CANCELLED, AGAIN = range(5)

INLINE_BYTES = 32 * 1024
"""Tensors up to this, together, travel in the datagram."""
LONGEST_JSON = MAXIMUM_DATAGRAM - INLINE_BYTES - 16 * 1024

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_WRITTEN_AT_ONCE = 1 << 30


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message that is ready to go. Whoever has it closes it."""

    data: bytes
    descriptor: int | None = None

    def send(self, connection: socket.socket, flags: int = 0) -> None:
        """Raises: BlockingIOError and other OSErrors."""
        if self.descriptor is None:
            connection.send(self.data, flags)
        else:
            socket.send_fds(connection, [self.data], [self.descriptor], flags)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Message:
    """A message that was read; its tensors are the reader's own."""

    kind: int
    number: int
    is_final: bool
    answer: Result | None = None
    call: ModelCall | None = None


def pack_answer(number: int, answer: Result | None, final: bool) -> Parcel:
    """Raises: ValueError: it cannot be said in one message."""
    if answer is None:
        return Parcel(HEADER.pack(END, final, number))
    if answer is RESCHEDULED:
        return Parcel(HEADER.pack(AGAIN, True, number))
    if isinstance(answer, ServeError):
        layout = AnswerLayout(code=int(answer.code), text=answer.text[:LONGEST_TEXT])
        return _pack(HEADER.pack(ANSWER, final, number), to_json(layout), ())
    layout = AnswerLayout(_heads(answer.outputs), answer.parameters)
    return _pack(HEADER.pack(ANSWER, final, number), to_json(layout), answer.outputs)


def pack_call(number: int, call: ModelCall) -> Parcel:
    """Raises: ValueError: it cannot be said in one message."""
    layout = CallLayout(
        model_name=call.model_name,
        model_version=call.model_version,
        inputs=_heads(call.inputs),
        requested_outputs=tuple(call.requested_outputs),
        id=call.id,
        correlation_id=call.correlation_id,
        flags=call.flags,
        priority=call.priority,
        timeout_microseconds=call.timeout_microseconds,
        parameters=call.parameters,
        trace_number=call.trace_number,
    )
    return _pack(HEADER.pack(CALL, True, number), to_json(layout), call.inputs)


def pack_cancelled(number: int) -> Parcel:
    return Parcel(HEADER.pack(CANCELLED, True, number))


class MessageReader:
    """Reads one end's messages; one thread at a time."""

    def __init__(self, connection: socket.socket, buffer: memoryview) -> None:
        """`buffer`: takes a message while it is read, MAXIMUM_DATAGRAM bytes."""
        self._connection = connection
        self._buffer = buffer
        self._answers = LayoutReader(AnswerLayout)
        self._calls = LayoutReader(CallLayout)

    def read(self, flags: int = 0) -> Message:
        """The next message.

        Raises:
            EOFError: the other end is closed.
            ValueError: it sent what cannot be read.
            BlockingIOError: nothing is there (with MSG_DONTWAIT).
        """
        descriptors: list[int] = []
        try:
            size, ancillary, _, _ = self._connection.recvmsg_into(
                [self._buffer], socket.CMSG_SPACE(struct.calcsize("i")), flags | socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
            if size == 0:
                raise EOFError("the other end of the conversation is closed")
            return self._message(bytes(self._buffer[:size]), descriptors[0] if descriptors else None)
        except ConnectionError:
            raise EOFError("the other end of the conversation is closed") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _message(self, data: bytes, descriptor: int | None) -> Message:
        if len(data) < HEADER.size:
            raise ValueError(f"a message of {len(data)} bytes")
        kind, is_final, number = HEADER.unpack_from(data)
        if kind in (END, CANCELLED):
            return Message(kind, number, is_final)
        if kind == AGAIN:
            return Message(kind, number, True, answer=RESCHEDULED)
        (length, *sizes), rest = unpack_tail(data[HEADER.size :])
        contents = _contents(memoryview(rest)[length:], sizes, descriptor)
        if kind == ANSWER:
            return Message(kind, number, is_final, answer=_answer(self._answers.read(rest[:length]), contents))
        if kind == CALL:
            return Message(kind, number, is_final, call=_call(self._calls.read(rest[:length]), contents))
        raise ValueError(f"a message of kind {kind}")


def _heads(tensors: Sequence[Tensor]) -> tuple[TensorHead, ...]:
    return tuple(TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)


def _pack(header: bytes, text: bytes, tensors: Sequence[Tensor]) -> Parcel:
    if len(text) > LONGEST_JSON:
        raise ValueError(
            f"what stands beside the tensors (names, shapes, parameters) takes {len(text)} bytes, at most"
            f" {LONGEST_JSON} can be sent"
        )
    views = [_octets(tensor.data) for tensor in tensors]
    sizes = [view.nbytes for view in views]
    for tensor, size in zip(tensors, sizes, strict=True):
        _check_size(TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape)), size)
    start = header + pack_tail((len(text), *sizes), text)
    if sum(sizes) <= INLINE_BYTES:
        return Parcel(b"".join((start, *views)))
    return Parcel(start, _memory_of(views))


def _octets(data: Buffer) -> memoryview:
    view = memoryview(data)
    # An empty view cannot be cast.
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _memory_of(views: Sequence[memoryview]) -> int:
    """A sealed memfd that holds them."""
    descriptor = os.memfd_create("rocserve:conversation", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        offset = 0
        for view in views:
            offset = aligned(offset)
            position = 0
            while position < view.nbytes:
                position += os.pwrite(descriptor, view[position : position + _WRITTEN_AT_ONCE], offset + position)
            offset += view.nbytes
        os.ftruncate(descriptor, offset)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _contents(inline: memoryview, sizes: Sequence[int], descriptor: int | None) -> list[Buffer]:
    """Each tensor's bytes, on memory that may be kept and written to."""
    if descriptor is None:
        if sum(sizes) != len(inline):
            raise ValueError(f"tensors of {sum(sizes)} bytes in a message that brings {len(inline)}")
        contents: list[Buffer] = []
        position = 0
        for size in sizes:
            contents.append(bytearray(inline[position : position + size]))
            position += size
        return contents
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(aligned(end))
        end = offsets[-1] + size
    view = _mapped(descriptor, end)
    return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]


def _mapped(descriptor: int, size: int) -> memoryview:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        true_size = written_size(descriptor)
        if seals & _SEALS != _SEALS or not 0 < size <= true_size:
            raise ValueError(f"tensors of {size} bytes in memory of {true_size} bytes with the seals {seals:#x}")
        return memoryview(
            mmap.mmap(
                descriptor,
                size,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                **MAPPED_WITHOUT_A_COPY,
            )
        )
    except OSError as error:
        raise ValueError(f"the memory that came along cannot be read: {error}") from None


def _tensors(heads: Sequence[TensorHead], contents: Sequence[Buffer]) -> list[Tensor]:
    if len(heads) != len(contents):
        raise ValueError(f"{len(contents)} tensors, told of {len(heads)}")
    for head, content in zip(heads, contents, strict=True):
        _check_size(head, len(content))
    return [
        Tensor(head.name, head.datatype, head.shape, content) for head, content in zip(heads, contents, strict=True)
    ]


def _check_size(head: TensorHead, size: int) -> None:
    if not can_hold(head.datatype, head.shape, size):
        is_bytes = head.datatype is DataType.BYTES
        needed = "4 for each element" if is_bytes else f"{math.prod(head.shape) * head.datatype.itemsize} bytes"
        raise ValueError(f"tensor '{head.name}' of shape {list(head.shape)} needs {needed}, got {size}")


def _answer(layout: AnswerLayout, contents: Sequence[Buffer]) -> Answer:
    if layout.code:
        return ServeError(status_code(layout.code), layout.text)
    return ModelResponse(_tensors(layout.outputs, contents), layout.parameters)


def _call(layout: CallLayout, contents: Sequence[Buffer]) -> ModelCall:
    return ModelCall(
        model_name=layout.model_name,
        inputs=_tensors(layout.inputs, contents),
        requested_outputs=layout.requested_outputs,
        model_version=layout.model_version,
        id=layout.id,
        correlation_id=layout.correlation_id,
        flags=layout.flags,
        priority=layout.priority,
        timeout_microseconds=layout.timeout_microseconds,
        parameters=layout.parameters,
        trace_number=layout.trace_number,
    )
