"""The worker's side of a batch's outputs: from the engine's arrays to shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, BatchResult
from rocserve.core.datatypes import DataType, datatype_of
from rocserve.core.errors import ServeError, internal
from rocserve.core.plain import to_json
from rocserve.core.requests import Signature
from rocserve.core.tensors import Buffer, Tensor, bytes_elements, encode_bytes_elements
from rocserve.workers.memory import Arena, aligned
from rocserve.workers.messages import RequestFailure, ResultLayout, TensorHead
from rocserve.workers.wire import REMEMBERED, pack_tail

Array = np.ndarray[Any, Any]

NO_CUTS: Mapping[str, Sequence[tuple[int, ...]]] = {}
NO_ROOM: Mapping[str, Array] = {}
_FAILURE_TEXTS = 64 * 1024
"""Characters that the texts of one batch's failures share."""


@dataclass(slots=True)
class _Output:
    """One output on its way to shared memory."""

    head: TensorHead
    source: Array | Buffer
    nbytes: int
    bounds: tuple[int, ...] = ()
    """Of the requests' parts, for BYTES of several requests."""


@dataclass(slots=True)
class _Plan:
    """What to do with results of known shapes."""

    destinations: list[Array]
    """On the shared memory."""
    tail: bytes
    room: Mapping[str, Array]
    """The destinations by their outputs."""


class ResultWriter:
    """Writes the results of one slot's batches to its output memory, and the tails that tell of them.

    What goes where is worked out once for each set of shapes.
    """

    def __init__(self, arena: Arena, signature: Signature, batching: bool) -> None:
        self._arena = arena
        self._datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        self._batching = batching
        self._plans: dict[object, _Plan] = {}
        self.room: Mapping[str, Array] = NO_ROOM
        """Where the latest result went, for `Batch.room` of one alike."""

    def write(self, batch: Batch, result: BatchResult) -> bytes:
        """Put the outputs where the server reads them; the tail of the message for it.

        Raises:
            ServeError: INTERNAL, the outputs are not what was asked for, or not of the batch's rows.
        """
        outputs = result.outputs
        names = batch.requested_outputs or tuple(outputs)
        try:
            values: Sequence[Array | Tensor] = [outputs[name] for name in names]
        except KeyError as missing:
            raise internal(f"the engine gave no output {missing}, only {sorted(outputs)}") from None
        if batch.cuts:
            _check_cuts(batch.cuts, names, values)
        key = None
        if not result.failures:
            try:
                arrays = [(name, value.shape, value.dtype) for name, value in zip(names, values, strict=True)]  # type: ignore[union-attr]
            except AttributeError:
                pass  # A Tensor is among them.
            else:
                key = (sum(batch.request_sizes), *arrays)
                plan = self._plans.get(key)
                if plan is not None:
                    if batch.room is not plan.room:
                        values = _out_of(batch.room, values)
                    for destination, value in zip(plan.destinations, values, strict=True):
                        if value is not destination:
                            np.copyto(destination, value)  # type: ignore[arg-type]
                    self.room = plan.room
                    return plan.tail
        return self._write_anew(batch, names, _out_of(batch.room, values), result.failures, key)

    def _write_anew(
        self,
        batch: Batch,
        names: Sequence[str],
        values: Sequence[Array | Tensor],
        failures: Mapping[int, ServeError],
        key: object | None,
    ) -> bytes:
        sizes = batch.request_sizes
        entries = [self._output(name, value, sizes) for name, value in zip(names, values, strict=True)]
        if self._batching:
            _check_rows([entry for entry in entries if entry.head.name not in batch.cuts], sum(sizes))
        offsets: list[int] = []
        end = 0
        for entry in entries:
            offsets.append(aligned(end))
            end = offsets[-1] + entry.nbytes
        self._arena.reserve(end)
        destinations = [self._fill(entry, offset) for entry, offset in zip(entries, offsets, strict=True)]
        numbers = [number for entry, offset in zip(entries, offsets, strict=True) for number in (offset, entry.nbytes)]
        for entry in entries:
            numbers.extend(entry.bounds)
        layout = ResultLayout(tuple(entry.head for entry in entries), _told(failures))
        tail = pack_tail(numbers, to_json(layout))
        arrays = [destination for destination in destinations if destination is not None]
        self.room = NO_ROOM
        if key is not None and len(arrays) == len(entries):
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            self.room = dict(zip(names, arrays, strict=True))
            self._plans[key] = _Plan(arrays, tail, self.room)
        return tail

    def _output(self, name: str, value: Array | Tensor, sizes: tuple[int, ...]) -> _Output:
        if isinstance(value, Tensor):
            return _tensor_output(name, value, sizes)
        declared = self._datatypes.get(name)
        if declared is None or declared.numpy_dtype != value.dtype:
            declared = datatype_of(value)
        head = TensorHead(name, declared, value.shape)
        if declared is not DataType.BYTES:
            return _Output(head, value, value.size * declared.itemsize)
        if len(sizes) == 1:
            data = encode_bytes_elements(value.ravel())
            return _Output(head, data, len(data))
        ends = list(accumulate(sizes))
        parts = [encode_bytes_elements(value[end - size : end].ravel()) for size, end in zip(sizes, ends, strict=True)]
        data = b"".join(parts)
        return _Output(head, data, len(data), (0, *accumulate(map(len, parts))))

    def _fill(self, entry: _Output, offset: int) -> Array | None:
        """Copy an output to its place; for an array, that place as an array."""
        if not isinstance(entry.source, np.ndarray):
            self._arena.write(offset, memoryview(entry.source).cast("B"))
            return None
        destination: Array = np.ndarray(entry.head.shape, entry.head.datatype.numpy_dtype, self._arena.mapping, offset)
        np.copyto(destination, entry.source)
        return destination


def _out_of(room: Mapping[str, Array], values: Sequence[Array | Tensor]) -> Sequence[Array | Tensor]:
    """Values that lie in the room as copies: the result as a whole goes elsewhere, and might be written over them."""
    if not room:
        return values
    lying = {id(array) for array in room.values()}
    return [value.copy() if isinstance(value, np.ndarray) and id(value) in lying else value for value in values]


def _tensor_output(name: str, tensor: Tensor, sizes: tuple[int, ...]) -> _Output:
    head = TensorHead(name, tensor.datatype, tuple(tensor.shape))
    nbytes = memoryview(tensor.data).nbytes
    if tensor.datatype is not DataType.BYTES:
        expected = math.prod(tensor.shape) * tensor.datatype.itemsize
        if nbytes != expected:
            raise internal(f"output '{name}' of shape {list(tensor.shape)} needs {expected} bytes, got {nbytes}")
        return _Output(head, tensor.data, nbytes)
    if len(sizes) == 1:
        return _Output(head, tensor.data, nbytes)
    try:
        elements = bytes_elements(tensor.data, tensor.element_count, name)
    except ServeError:
        raise internal(f"output '{name}' does not hold the {tensor.element_count} elements of its shape") from None
    row = math.prod(tensor.shape[1:])
    ends = (0, *accumulate(4 + len(element) for element in elements))
    return _Output(head, tensor.data, nbytes, (0, *(ends[rows * row] for rows in accumulate(sizes))))


def _check_rows(entries: Sequence[_Output], rows: int) -> None:
    for entry in entries:
        if not entry.head.shape or entry.head.shape[0] != rows:
            raise internal(
                f"output '{entry.head.name}' has the shape {list(entry.head.shape)}, expected the batch's {rows} rows"
            )


def _check_cuts(
    cuts: Mapping[str, Sequence[tuple[int, ...]]], names: Sequence[str], values: Sequence[Array | Tensor]
) -> None:
    for name, value in zip(names, values, strict=True):
        if name in cuts:
            count = math.prod(value.shape)
            wanted = sum(math.prod(shape) for shape in cuts[name])
            if count != wanted:
                raise internal(
                    f"output '{name}' has {count} elements, expected the {wanted} of the requests' shapes"
                    f" {[list(shape) for shape in cuts[name]]}"
                )


def _told(failures: Mapping[int, ServeError]) -> tuple[RequestFailure, ...]:
    longest = _FAILURE_TEXTS // max(len(failures), 1)
    return tuple(RequestFailure(index, int(error.code), error.text[:longest]) for index, error in failures.items())
