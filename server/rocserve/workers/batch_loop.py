"""What every worker does with the batches of a channel, whatever its engine: receive, execute, answer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from rocserve.core.errors import ServeError
from rocserve.core.plain import to_json
from rocserve.core.tensors import Tensor
from rocserve.workers.memory import Arena, ArenaFile
from rocserve.workers.messages import BatchFailure, BatchLayout
from rocserve.workers.wire import ATTACH, EXECUTE, HEADER, LONGEST_TEXT, MAXIMUM_DATAGRAM, pack_tail

_MOST_DESCRIPTORS = 2


def attach(channel: socket.socket) -> tuple[list[Arena], list[int]]:
    """What the channel's first message brings: the memory of its slots, input and output in turn, and the descriptors
    that are left: the conversation, where the engine has one.

    Raises:
        EOFError: the server is gone.
    """
    data, descriptors, _, _ = socket.recv_fds(channel, HEADER.size, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError("the server closed the channel")
    kind, slots, *_ = HEADER.unpack(data)
    if kind != ATTACH or not descriptors:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError(f"expected the channel's memory, got a message of kind {kind}, {len(descriptors)} descriptors")
    memory = ArenaFile(descriptors[0])
    return [Arena(memory, index) for index in range(2 * slots)], list(descriptors[1:])


def serve_batches(channel: socket.socket, execute: Callable[[int, int, bytes], bytes]) -> None:
    """Answer batches until the server closes the channel, or `stop_serving`.

    Args:
        execute: takes a batch's slot, id and tail, and gives the whole answer; never raises.
    """
    buffer = bytearray(MAXIMUM_DATAGRAM)
    received = memoryview(buffer)
    receive, send, unpack = channel.recv_into, channel.send, HEADER.unpack_from
    start = HEADER.size
    try:
        while size := receive(buffer):
            kind, slot, batch_id, *_ = unpack(buffer)
            if kind != EXECUTE:
                raise ValueError(f"expected a batch, got a message of kind {kind}")
            send(execute(slot, batch_id, bytes(received[start:size])))
    except ConnectionError:
        pass  # The server is gone; the control conversation ends the worker.


def stop_serving(channel: socket.socket) -> None:
    """End `serve_batches` after the batches that were already sent. From any thread."""
    try:
        channel.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # The server has closed it.


def failure_tail(error: ServeError) -> bytes:
    """The tail of a message that says that a whole batch failed."""
    return pack_tail((), to_json(BatchFailure(int(error.code), error.text[:LONGEST_TEXT])))


def error_text(error: BaseException) -> str:
    """What an exception says, in the engine's own words; its name when it says nothing."""
    text = str(error).strip()
    if isinstance(error, KeyError | SystemExit) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:LONGEST_TEXT]


def input_tensors(layout: BatchLayout, numbers: Sequence[int], arena: Arena) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, head in enumerate(layout.inputs):
        offset, nbytes = numbers[2 * index : 2 * index + 2]
        end = offset + nbytes
        if end > arena.peak:
            arena.cover(end)
        tensors[head.name] = Tensor(head.name, head.datatype, head.shape, arena.view[offset:end])
    return tensors
