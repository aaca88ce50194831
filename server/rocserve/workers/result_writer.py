"""Prepares a model's outputs for the server, as results of batches or of single requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.dropped_sizes import with_dropped_sizes
from rocserve.backends.request_model import Answer, ModelResponse
from rocserve.core.datatypes import DataType, datatype_of
from rocserve.core.errors import ServeError, internal
from rocserve.core.memo import Memo
from rocserve.core.padding import PaddedOutput
from rocserve.core.parameters import NO_PARAMETERS, Parameters
from rocserve.core.requests import Signature
from rocserve.core.tensor_places import aligned, padded
from rocserve.core.tensors import COPIED_SOONER, Buffer, Tensor, bytes_elements, flat_octets, octets, tensor_from_numpy
from rocserve.links.entries import OPEN, RESPONSE, WHOLE
from rocserve.links.tensors import Layout, TensorSender, checked, parameters_text
from rocserve.workers.worker_end import OutgoingResult, WorkerEnd, error_result

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

_REMEMBERED = 256
_TO_BYTES = methodcaller("tobytes")
_SHAPE_AND_DTYPE = attrgetter("shape", "dtype")
NO_ROOM: Mapping[str, Array] = {}


def answer_results(sender: TensorSender, answers: Sequence[Answer | None]) -> list[OutgoingResult]:
    """Make results for a batch's requests, one for neighbours that differ only in bytes. None = messages answer."""
    results: list[OutgoingResult] = []
    for answer in answers:
        if answer is None:
            results.append(OutgoingResult(OPEN))
        elif isinstance(answer, ServeError):
            results.append(error_result(answer))
        else:
            try:
                _add_result(sender, results, answer.outputs, answer.parameters)
            except ServeError as error:
                results.append(error_result(error))
    return results


def _add_result(
    sender: TensorSender, results: list[OutgoingResult], outputs: Sequence[Tensor], parameters: Parameters
) -> None:
    """Add a request's result; to the previous result, if only the bytes differ. Raises ServeError (INTERNAL)."""
    layout, data = sender.of(outputs), [output.data for output in outputs]
    if not parameters and results and results[-1].is_like(layout):
        packed = layout.places.packed(data)
        if packed is not None:
            results[-1].add(layout.places.end, packed)
            return
    pieces, nbytes = layout.places.pieces(data, "output")
    result = OutgoingResult(RESPONSE, 1, 0, 0, 0, nbytes, [*pieces], layout)
    if parameters:
        details = checked(parameters_text(parameters))
        result.contents += padded((details,))
        result.nbytes, result.text_bytes = nbytes + aligned(len(details)), len(details)
    results.append(result)


class _Plan:
    __slots__ = ("_rooms", "layout")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._rooms: Memo[int, Mapping[str, Array]] = Memo(_REMEMBERED)

    def room(self, place: int, view: memoryview) -> Mapping[str, Array]:
        """Return arrays that lie in a slot at the outputs' places; the same arrays each time for the same slot."""
        room = self._rooms.get(place)
        if room is None:
            places = self.layout.places
            room = {
                head.name: np.ndarray(head.shape, head.datatype.numpy_dtype, view, begin)
                for head, (begin, _) in zip(places.heads, places.bounds, strict=True)
            }
            self._rooms.keep(place, room)
        return room


class ResultWriter:
    """Writes the results of one instance. For each set of shapes, the outputs' parts of a slot are computed once."""

    def __init__(self, end: WorkerEnd, signature: Signature, batching: bool) -> None:
        """`batching`: the outputs' first dimension is the batch's rows."""
        self._end = end
        self._datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        self._declared = {spec.name: spec.shape for spec in signature.outputs if not spec.any_rank}
        self._batching = batching
        self._plans: Memo[object, _Plan] = Memo(_REMEMBERED)
        self._last: Memo[object, _Plan] = Memo(_REMEMBERED)
        """The plan of the latest result, by the rows of a batch's requests and the shapes of its inputs."""
        self._reserved: tuple[_Plan, int, memoryview] | None = None

    def make_room(self, batch: Batch) -> None:
        """Reserve memory for outputs as large as those of the last batch of these shapes, unless copying them is
        faster."""
        plan = self._last.get(_shapes(batch))
        if plan is not None and plan.layout.places.end > COPIED_SOONER:
            self._reserved = (plan, *self._end.reserve(plan.layout.places.end))
            batch.room = plan.room(*self._reserved[1:])
        else:
            batch.room = NO_ROOM

    def give_up_room(self) -> None:
        """Free the reserved memory if the results do not use it."""
        if self._reserved is not None:
            self._end.give_up(self._reserved[1])
            self._reserved = None

    def write(self, results: list[OutgoingResult], batch: Batch, result: BatchResult) -> None:
        """Add results of a batch, or of one request of a group. Raises ServeError (INTERNAL) for wrong outputs or
        rows."""
        outputs = result.outputs
        names = batch.requested_outputs or tuple(outputs)
        try:
            values: Sequence[Array | Tensor] = list(map(outputs.__getitem__, names))
        except KeyError as missing:
            raise internal(f"expected output {missing} from the engine, got {sorted(outputs)}") from None
        key = None
        if not result.failures and not batch.cuts and not _is_padded(batch, names):
            try:
                arrays = tuple(map(_SHAPE_AND_DTYPE, values))
            except AttributeError:
                pass  # The values include a Tensor.
            else:
                key = (sum(batch.request_sizes), names, arrays)
                plan = self._plans.get(key)
                if plan is not None:
                    self._write_planned(results, batch, plan, values)
                    return
        self._write_unplanned(results, batch, dict(zip(names, values, strict=True)), result.failures, key)

    def _write_planned(
        self, results: list[OutgoingResult], batch: Batch, plan: _Plan, values: Sequence[Array | Tensor]
    ) -> None:
        layout = plan.layout
        if self._reserved is not None and self._reserved[0] is plan:
            _, place, view = self._reserved
            self._reserved = None
            for destination, value in zip(plan.room(place, view).values(), values, strict=True):
                if value is not destination:
                    np.copyto(destination, value.reshape(destination.shape))  # type: ignore[union-attr]
            contents: list[Buffer] = []
        else:
            # Outputs in memory that was reserved for another plan are copied before that memory is freed.
            data: list[Buffer] = list(map(_TO_BYTES if layout.places.end <= COPIED_SOONER else _octets, values))
            contents, place = [*layout.places.pieces(data)[0]], None
            if results and results[-1].is_like(layout):
                results[-1].add(layout.places.end, contents)
                return
        shapes = _shapes(batch)
        if self._last.get(shapes) is not plan:
            self._last.keep(shapes, plan)
        requests = len(batch.request_sizes)
        flags = 0 if requests == 1 else WHOLE
        results.append(OutgoingResult(RESPONSE, requests, flags, 0, 0, layout.places.end, contents, layout, place))

    def _write_unplanned(
        self,
        results: list[OutgoingResult],
        batch: Batch,
        values: Mapping[str, Array | Tensor],
        failures: Mapping[int, ServeError],
        key: object | None,
    ) -> None:
        sizes = batch.request_sizes
        values = {name: self._with_row(name, value, batch) for name, value in values.items()}
        for name, value in values.items():
            if (shapes := batch.cuts.get(name)) is not None:
                count, wanted = math.prod(value.shape), sum(map(math.prod, shapes))
                if count != wanted:
                    raise internal(
                        f"output '{name}' has {count} elements, expected the {wanted} of the requests' shapes"
                        f" {[list(shape) for shape in shapes]}"
                    )
            elif self._batching and (not value.shape or value.shape[0] != sum(sizes)):
                raise internal(
                    f"output '{name}' has the shape {list(value.shape)}, expected the batch's {sum(sizes)} rows"
                )
        # The server cuts rows of one size; everything else is cut here.
        is_text = any(self._datatype(name, value) is DataType.BYTES for name, value in values.items())
        if failures or _is_padded(batch, values) or (len(sizes) > 1 and (is_text or batch.cuts)):
            results += answer_results(self._end.sender, self._split(batch, values, failures))
            return
        tensors = [self._cut(name, one, batch.cuts.get(name, (one.shape,)))[0] for name, one in values.items()]
        _add_result(self._end.sender, results, tensors, NO_PARAMETERS)
        if len(sizes) > 1:
            results[-1].flags, results[-1].requests = WHOLE, len(sizes)
        layout = results[-1].layout
        if key is not None and layout is not None and layout.places.sizes is not None:
            self._last.keep(_shapes(batch), self._plans.keep(key, _Plan(layout)))

    def _with_row(self, name: str, value: Array | Tensor, batch: Batch) -> Array | Tensor:
        """Give an output of one row back the sizes of 1 that the model has dropped, the row's among them."""
        declared = self._declared.get(name, ())
        # Nearly every output of every batch returns here.
        if len(value.shape) >= len(declared) or name in batch.cuts:
            return value
        if sum(batch.request_sizes) != 1 or any(one.shape[:1] != (1,) for one in batch.inputs.values()):
            return value
        whole = with_dropped_sizes(declared, value.shape)
        if whole is None:
            return value
        return replace(value, shape=whole) if isinstance(value, Tensor) else value.reshape(whole)

    def _split(
        self, batch: Batch, values: Mapping[str, Array | Tensor], failures: Mapping[int, ServeError]
    ) -> list[Answer]:
        columns = [self._parts(name, value, batch) for name, value in values.items()]
        # The error texts of one batch share 64 Ki characters.
        longest = 64 * 1024 // max(len(failures), 1)
        return [
            ServeError(failures[index].code, failures[index].text[:longest])
            if index in failures
            else ModelResponse([column[index] for column in columns])
            for index in range(len(batch.request_sizes))
        ]

    def _parts(self, name: str, value: Array | Tensor, batch: Batch) -> list[Tensor]:
        """Return the requests' parts of an output."""
        sizes = batch.request_sizes
        if name in batch.padded:
            return self._cut_back(name, value, sizes, batch.padded[name])
        rows = [(size, *value.shape[1:]) for size in sizes] if self._batching else [tuple(value.shape)]
        return self._cut(name, value, batch.cuts.get(name, rows))

    def _cut(self, name: str, value: Array | Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Cut an output into consecutive tensors. Raises ServeError (INTERNAL) if its bytes do not fit its shape."""
        datatype, counts = self._datatype(name, value), list(accumulate(map(math.prod, shapes), initial=0))
        if isinstance(value, Tensor):
            data, bounds = flat_octets(value.data), _element_ends(value, counts)
            parts: list[Buffer] = [data[begin:end] for begin, end in pairwise(bounds)]
        else:
            flat = value.reshape(-1)
            parts = [tensor_from_numpy(name, flat[begin:end], datatype).data for begin, end in pairwise(counts)]
        return [Tensor(name, datatype, tuple(shape), part) for shape, part in zip(shapes, parts, strict=True)]

    def _cut_back(self, name: str, value: Array | Tensor, rows: Sequence[int], padded: PaddedOutput) -> list[Tensor]:
        """Cut a padded output into those of the requests. Raises ServeError (INTERNAL) if it is not as long as the
        padded inputs."""
        datatype, array = self._datatype(name, value), value.numpy() if isinstance(value, Tensor) else value
        for place, size in padded.sizes.items():
            if array.shape[place : place + 1] != (size,):
                raise internal(
                    f"output '{name}' has the shape {list(array.shape)}, expected {size} for dimension {place}, as its"
                    " inputs have been padded to that size"
                )
        tensors: list[Tensor] = []
        row = 0
        for request, count in enumerate(rows):
            places = padded.own(request, array.shape)
            if self._batching:
                places[0] = slice(row, row := row + count)
            tensors.append(tensor_from_numpy(name, array[tuple(places)], datatype))
        return tensors

    def _datatype(self, name: str, value: Array | Tensor) -> DataType:
        """Return the declared datatype if the array can have it, else the datatype of the array's dtype."""
        if isinstance(value, Tensor):
            return value.datatype
        declared = self._datatypes.get(name)
        return declared if declared is not None and declared.numpy_dtype == value.dtype else datatype_of(value)


def _shapes(batch: Batch) -> object:
    return batch.request_sizes, *[tensor.shape for tensor in batch.inputs.values()]


def _is_padded(batch: Batch, names: Iterable[str]) -> bool:
    padded = batch.padded
    return bool(padded) and any(name in padded for name in names)


def _octets(array: Array | Tensor) -> Buffer:
    assert isinstance(array, np.ndarray)
    return octets(np.ascontiguousarray(array))


def _element_ends(tensor: Tensor, counts: Sequence[int]) -> list[int]:
    """Return the byte at which the first elements end, for each count. Raises ServeError (INTERNAL)."""
    nbytes = memoryview(tensor.data).nbytes
    if tensor.datatype is not DataType.BYTES:
        expected = tensor.element_count * tensor.datatype.itemsize
        if nbytes != expected:
            raise internal(f"output '{tensor.name}' of shape {list(tensor.shape)} needs {expected} bytes, got {nbytes}")
        return [count * tensor.datatype.itemsize for count in counts]
    if len(counts) == 2:
        return [0, nbytes]
    try:
        elements = bytes_elements(tensor.data, tensor.element_count, tensor.name)
    except ServeError:
        raise internal(
            f"output '{tensor.name}' does not hold the {tensor.element_count} elements of its shape"
        ) from None
    ends = (0, *accumulate(4 + len(element) for element in elements))
    return [ends[count] for count in counts]
