"""The worker's end of one instance: batches come in, the engine runs them, results go out. One thread, no hand-over."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, BatchResult, LoadedModel
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import Tensor
from rocserve.workers.batch_loop import attach, error_text, failure_tail, input_tensors, serve_batches, stop_serving
from rocserve.workers.messages import BatchLayout
from rocserve.workers.result_writer import NO_CUTS, ResultWriter
from rocserve.workers.wire import (
    EXECUTE_FAILED,
    EXECUTED,
    HEADER,
    MAXIMUM_DATAGRAM,
    REMEMBERED,
    LayoutReader,
    unpack_tail,
)


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
        arenas, _ = attach(channel)
        self._input_arenas = arenas[0::2]
        self._writers = [ResultWriter(arena, model.signature, batching) for arena in arenas[1::2]]
        self._batches: list[dict[bytes, _ReceivedBatch]] = [{} for _ in self._input_arenas]
        self._reader = LayoutReader(BatchLayout)

    def run(self) -> None:
        """Until the server closes the channel, or `stop`."""
        serve_batches(self._socket, self._execute)

    def stop(self) -> None:
        """End `run` after the batches that were already sent. From any thread."""
        stop_serving(self._socket)

    def _execute(self, slot: int, batch_id: int, tail: bytes) -> bytes:
        """The answer to one batch."""
        input_end = output_start = time.monotonic_ns()
        try:
            batch = self._batches[slot].get(tail) or self._new_batch(slot, tail)
            input_end = time.monotonic_ns()
            result = self._execute_convoy(batch.convoy) if batch.convoy else self._model.execute(batch.whole)
            output_start = time.monotonic_ns()
            writer = self._writers[slot]
            kind, answer = EXECUTED, writer.write(batch.whole, result)
            if batch.whole.room is not writer.room:
                batch.whole = replace(batch.whole, room=writer.room)
            if len(answer) > MAXIMUM_DATAGRAM - HEADER.size:
                raise RuntimeError(f"the layout of the outputs takes {len(answer)} bytes, more than a message can hold")
        except BaseException as error:
            # SystemExit as well: a model that calls sys.exit() fails its batch, it does not take the worker along.
            kind, answer = EXECUTE_FAILED, self._failure(error)
            output_start = max(output_start, input_end)
        return HEADER.pack(kind, slot, batch_id, input_end, output_start, time.monotonic_ns()) + answer

    def _new_batch(self, slot: int, tail: bytes) -> _ReceivedBatch:
        numbers, body = unpack_tail(tail)
        layout = self._reader.read(body)
        arena = self._input_arenas[slot]
        inputs = input_tensors(layout, numbers, arena)
        cuts = layout.ragged.outputs if layout.ragged is not None else NO_CUTS
        whole = Batch(inputs, layout.requested_outputs, layout.request_sizes, cuts)
        batch = _ReceivedBatch(whole, _split(whole) if layout.one_by_one else ())
        if all(head.datatype is not DataType.BYTES for head in layout.inputs):
            batches = self._batches[slot]
            if len(batches) >= REMEMBERED:
                batches.clear()
            batches[tail] = batch
        return batch

    def _execute_convoy(self, convoy: Sequence[Batch]) -> BatchResult:
        """Each request for itself: one that fails leaves the others alone."""
        results: list[BatchResult | None] = []
        failures: dict[int, ServeError] = {}
        for index, single in enumerate(convoy):
            result = None
            try:
                result = self._model.execute(single)
            except BaseException as error:
                failures[index] = self._serve_error(error)
            if result is not None and result.failures:
                failures[index] = result.failures[0]
            results.append(result)
        return BatchResult(_joined(convoy, results, failures), failures)

    def _serve_error(self, error: BaseException) -> ServeError:
        if isinstance(error, ServeError):
            return error
        self._log.error("the engine failed to run a batch", exc_info=error)
        return ServeError(StatusCode.INTERNAL, error_text(error))

    def _failure(self, error: BaseException) -> bytes:
        return failure_tail(self._serve_error(error))


@dataclass(slots=True)
class _ReceivedBatch:
    whole: Batch
    """With room for outputs as they were the last time."""
    convoy: Sequence[Batch]
    """Its requests each for itself when they are to run one by one, else empty."""


def _split(batch: Batch) -> Sequence[Batch]:
    """The requests of a batch as batches of their own, on the same memory. Not for BYTES."""
    singles: list[Batch] = []
    row = 0
    for size in batch.request_sizes:
        inputs: dict[str, Tensor] = {}
        for name, tensor in batch.inputs.items():
            nbytes = math.prod(tensor.shape[1:]) * tensor.datatype.itemsize
            part = memoryview(tensor.data)[row * nbytes : (row + size) * nbytes]
            inputs[name] = Tensor(name, tensor.datatype, (size, *tensor.shape[1:]), part)
        singles.append(Batch(inputs, batch.requested_outputs, (size,)))
        row += size
    return singles


def _joined(
    convoy: Sequence[Batch], results: Sequence[BatchResult | None], failures: Mapping[int, ServeError]
) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of all requests, one behind the other; zeros stand for those that failed.

    Raises:
        ServeError: all failed; the first's.
    """
    good = next((result for result in results if result is not None), None)
    if good is None:
        raise failures[0]
    outputs: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in good.outputs.items():
        model = _as_array(value)
        outputs[name] = np.concatenate(
            [
                np.zeros((*single.request_sizes, *model.shape[1:]), model.dtype)
                if result is None
                else _as_array(result.outputs[name])
                for single, result in zip(convoy, results, strict=True)
            ]
        )
    return outputs


def _as_array(value: np.ndarray[Any, Any] | Tensor) -> np.ndarray[Any, Any]:
    return value.numpy() if isinstance(value, Tensor) else value
