"""The worker's end of one instance: batches come in, the engine runs them, results go out. One thread, no hand-over."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence

from rocserve.backends.base import Batch, LoadedModel
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import Tensor
from rocserve.workers.memory import Arena
from rocserve.workers.messages import BatchFailure, BatchLayout
from rocserve.workers.plain import to_json
from rocserve.workers.result_writer import ResultWriter
from rocserve.workers.wire import (
    ATTACH,
    EXECUTE,
    EXECUTE_FAILED,
    EXECUTED,
    HEADER,
    MAXIMUM_DATAGRAM,
    REMEMBERED,
    LayoutReader,
    pack_tail,
    unpack_tail,
)

_LONGEST_TEXT = 8192
_MOST_DESCRIPTORS = 16


class Executor:
    """Serves one channel until the server closes it.

    A batch of shapes that came before is the same Batch object on the same memory, so nothing is built for it.
    """

    def __init__(self, channel: socket.socket, model: LoadedModel, batching: bool, log: logging.Logger) -> None:
        """`batching`: whether the model has a batch dimension (max_batch_size > 0).

        Raises:
            EOFError: the server is gone.
        """
        self._socket = channel
        self._model = model
        self._log = log
        arenas = _receive_arenas(channel)
        self._input_arenas = arenas[0::2]
        self._writers = [ResultWriter(arena, model.signature, batching) for arena in arenas[1::2]]
        self._batches: list[dict[bytes, Batch]] = [{} for _ in self._input_arenas]
        self._reader = LayoutReader(BatchLayout)

    def run(self) -> None:
        """Until the server closes the channel, or `stop`."""
        buffer = bytearray(MAXIMUM_DATAGRAM)
        received = memoryview(buffer)
        receive, send, unpack = self._socket.recv_into, self._socket.send, HEADER.unpack_from
        start = HEADER.size
        try:
            while size := receive(buffer):
                kind, slot, batch_id, *_ = unpack(buffer)
                if kind != EXECUTE:
                    raise ValueError(f"expected a batch, got a message of kind {kind}")
                send(self._execute(slot, batch_id, bytes(received[start:size])))
        except ConnectionError:
            pass  # The server is gone; the control conversation ends the worker.

    def stop(self) -> None:
        """End `run` after the batches that were already sent. From any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RD)
        except OSError:
            pass  # The server has closed it.

    def _execute(self, slot: int, batch_id: int, tail: bytes) -> bytes:
        """The answer to one batch."""
        input_end = output_start = time.monotonic_ns()
        try:
            batch = self._batches[slot].get(tail) or self._new_batch(slot, tail)
            input_end = time.monotonic_ns()
            result = self._model.execute(batch)
            output_start = time.monotonic_ns()
            kind, answer = EXECUTED, self._writers[slot].write(batch, result)
            if len(answer) > MAXIMUM_DATAGRAM - HEADER.size:
                raise RuntimeError(f"the layout of the outputs takes {len(answer)} bytes, more than a message can hold")
        except BaseException as error:
            # SystemExit as well: a model that calls sys.exit() fails its batch, it does not take the worker along.
            kind, answer = EXECUTE_FAILED, self._failure(error)
            output_start = max(output_start, input_end)
        return HEADER.pack(kind, slot, batch_id, input_end, output_start, time.monotonic_ns()) + answer

    def _new_batch(self, slot: int, tail: bytes) -> Batch:
        numbers, body = unpack_tail(tail)
        layout = self._reader.read(body)
        arena = self._input_arenas[slot]
        inputs = _input_tensors(layout, numbers, arena)
        batch = Batch(inputs, layout.requested_outputs, layout.request_sizes)
        if all(head.datatype is not DataType.BYTES for head in layout.inputs):
            batches = self._batches[slot]
            if len(batches) >= REMEMBERED:
                batches.clear()
            batches[tail] = batch
        return batch

    def _failure(self, error: BaseException) -> bytes:
        if isinstance(error, ServeError):
            failure = BatchFailure(int(error.code), error.text[:_LONGEST_TEXT])
        else:
            self._log.error("the engine failed to run a batch", exc_info=error)
            failure = BatchFailure(int(StatusCode.INTERNAL), error_text(error))
        return pack_tail((), to_json(failure))


def error_text(error: BaseException) -> str:
    """What an exception says, in the engine's own words; its name when it says nothing."""
    text = str(error).strip()
    if isinstance(error, KeyError | SystemExit) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:_LONGEST_TEXT]


def _input_tensors(layout: BatchLayout, numbers: Sequence[int], arena: Arena) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, head in enumerate(layout.inputs):
        offset, nbytes = numbers[2 * index : 2 * index + 2]
        arena.cover(offset + nbytes)
        tensors[head.name] = Tensor(head.name, head.datatype, head.shape, arena.view[offset : offset + nbytes])
    return tensors


def _receive_arenas(channel: socket.socket) -> list[Arena]:
    """The memory of the channel's slots, input and output in turn; the first message brings it."""
    data, descriptors, _, _ = socket.recv_fds(channel, HEADER.size, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError("the server closed the channel")
    kind, slots, *_ = HEADER.unpack(data)
    if kind != ATTACH or len(descriptors) != 2 * slots:
        raise ValueError(f"expected the channel's memory, got a message of kind {kind}, {len(descriptors)} descriptors")
    return [Arena(descriptor) for descriptor in descriptors]
