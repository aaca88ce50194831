"""The worker's side of a batch's outputs: from the engine's arrays to the heap that the server reads."""

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
from rocserve.core.tensor_places import aligned, lay_out, padded
from rocserve.core.tensors import Buffer, Tensor, TensorHead, bytes_elements, encode_bytes_elements, flat_octets, octets
from rocserve.workers.entries import numbers
from rocserve.workers.messages import RequestFailure, ResultLayout
from rocserve.workers.worker_end import OutgoingResult, WorkerEnd, checked

Array = np.ndarray[Any, Any]

_FAILURE_TEXTS = 64 * 1024
"""Characters that the texts of one batch's failures share."""
_REMEMBERED = 256
COPIED_SOONER = 4096
"""Bytes of an array up to which one copy more takes less time than a view of it."""
NO_ROOM: Mapping[str, Array] = {}


@dataclass(slots=True)
class _Output:
    """One output on its way to the heap."""

    head: TensorHead
    source: Array | Buffer
    nbytes: int
    bounds: tuple[int, ...] = ()
    """Of the requests' parts, for BYTES of several requests."""


class _Plan:
    """Where the outputs of results of known shapes go in a slot."""

    __slots__ = ("_rooms", "count", "end", "heads", "offsets", "table", "text")

    def __init__(
        self, text: bytes, heads: Sequence[TensorHead], table: bytes, offsets: Sequence[int], end: int
    ) -> None:
        self.text = text
        """Of the layout."""
        self.heads = heads
        self.table = table
        self.count = len(table) // 8
        self.offsets = offsets
        self.end = end
        self._rooms: dict[int, Mapping[str, Array]] = {}

    def room(self, place: int, view: memoryview) -> Mapping[str, Array]:
        """The outputs' places in a slot, as arrays. A slot that comes again has the same."""
        room = self._rooms.get(place)
        if room is None:
            room = {
                head.name: np.ndarray(head.shape, head.datatype.numpy_dtype, view, offset)
                for head, offset in zip(self.heads, self.offsets, strict=True)
            }
            if len(self._rooms) >= _REMEMBERED:
                self._rooms.clear()
            self._rooms[place] = room
        return room


class ResultWriter:
    """Writes the results of one instance's batches. What goes where is worked out once for each set of shapes."""

    def __init__(self, end: WorkerEnd, signature: Signature, batching: bool) -> None:
        """`batching`: whether outputs have the batch's rows."""
        self._end = end
        self._datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        self._batching = batching
        self._plans: dict[object, _Plan] = {}
        self._last: dict[tuple[int, ...], _Plan] = {}
        """By the rows of a batch's requests, the plan of the latest result."""
        self._reserved: tuple[_Plan, int, memoryview] | None = None
        self.reserved: int | None = None
        """The place where the latest result lies already."""

    def make_room(self, batch: Batch) -> None:
        """Give the batch room for outputs as they were the last time."""
        plan = self._last.get(batch.request_sizes)
        if plan is not None:
            self._reserved = (plan, *self._end.reserve(plan.end))
            batch.room = plan.room(*self._reserved[1:])
        else:
            batch.room = NO_ROOM

    def take_place(self) -> int | None:
        """The place where the result that was written last lies already; None = it is still to be copied."""
        place, self.reserved = self.reserved, None
        return place

    def give_up_room(self) -> None:
        """The batch has failed, or its results are others."""
        if self._reserved is not None:
            self._end.give_up(self._reserved[1])
            self._reserved = None

    def write(self, batch: Batch, result: BatchResult, last: OutgoingResult | None = None) -> OutgoingResult:
        """The outputs on their way to the server.

        Args:
            last: of the request before, where requests run one by one; it takes up outputs that are alike.

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
                    return self._write_as_before(batch, plan, values, last)
        return self._write_anew(batch, names, values, result.failures, key)

    def _write_as_before(
        self, batch: Batch, plan: _Plan, values: Sequence[Array | Tensor], last: OutgoingResult | None
    ) -> OutgoingResult:
        if self._reserved is not None and self._reserved[0] is plan:
            _, self.reserved, view = self._reserved
            self._reserved = None
            view[: len(plan.table)] = plan.table
            for destination, value in zip(plan.room(self.reserved, view).values(), values, strict=True):
                if value is not destination:
                    np.copyto(destination, value)  # type: ignore[arg-type]
            contents: list[Buffer] = []
        else:
            # What lies in the room for another plan goes to the server before that is given up.
            contents = padded([plan.table, *map(_octets, values)])
            if last is not None and last.form is plan:
                last.add(plan.end, contents)
                return last
        self._remember(batch, plan)
        layout = self._end.layout_number(plan.text)
        return OutgoingResult(0, 0, layout, plan.count, plan.end, contents, form=plan)

    def _remember(self, batch: Batch, plan: _Plan) -> None:
        if len(self._last) >= _REMEMBERED:
            self._last.clear()
        self._last[batch.request_sizes] = plan

    def _write_anew(
        self,
        batch: Batch,
        names: Sequence[str],
        values: Sequence[Array | Tensor],
        failures: Mapping[int, ServeError],
        key: object | None,
    ) -> OutgoingResult:
        sizes = batch.request_sizes
        entries = [self._output(name, value, sizes) for name, value in zip(names, values, strict=True)]
        if self._batching:
            _check_rows([entry for entry in entries if entry.head.name not in batch.cuts], sum(sizes))
        bounds = [bound for entry in entries for bound in entry.bounds]
        head = numbers(2 * len(entries) + len(bounds))
        offsets, end = lay_out([entry.nbytes for entry in entries], head.size)
        places = [number for entry, offset in zip(entries, offsets, strict=True) for number in (offset, entry.nbytes)]
        table = head.pack(*places, *bounds)
        end = aligned(end)
        contents = padded([table, *[_octets(entry.source) for entry in entries]])
        heads = tuple(entry.head for entry in entries)
        text = checked(to_json(ResultLayout(heads, _told(failures))))
        if failures:
            return OutgoingResult(count=len(table) // 8, nbytes=end, contents=contents, layout_text=text)
        if key is not None and all(head.datatype is not DataType.BYTES for head in heads):
            if len(self._plans) >= _REMEMBERED:
                self._plans.clear()
            plan = self._plans[key] = _Plan(text, heads, table, offsets, end)
            self._remember(batch, plan)
        return OutgoingResult(0, 0, self._end.layout_number(text), len(table) // 8, end, contents)

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


def _octets(source: Array | Buffer | Tensor) -> Buffer:
    """The bytes of an output, one behind the other."""
    if isinstance(source, np.ndarray):
        if source.nbytes <= COPIED_SOONER:
            return source.tobytes()
        return octets(np.ascontiguousarray(source))
    return flat_octets(source.data if isinstance(source, Tensor) else source)


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
