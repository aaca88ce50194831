"""What a worker's model gives on its way to the server: responses to requests, results of batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.request_model import Answer, ModelResponse
from rocserve.core.datatypes import DataType, datatype_of
from rocserve.core.errors import ServeError, internal
from rocserve.core.memo import Memo
from rocserve.core.requests import NO_PARAMETERS, Parameters, Signature
from rocserve.core.tensor_places import aligned, padded
from rocserve.core.tensors import COPIED_SOONER, Buffer, Tensor, bytes_elements, flat_octets, octets, tensor_from_numpy
from rocserve.workers.entries import OPEN
from rocserve.workers.layouts import Layout, TensorSender, checked, parameters_text
from rocserve.workers.worker_end import OutgoingResult, WorkerEnd, error_result

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

_FAILURE_TEXTS = 64 * 1024
"""Characters that the texts of one batch's failures share."""
_REMEMBERED = 256
_TO_BYTES = methodcaller("tobytes")
_SHAPE_AND_DTYPE = attrgetter("shape", "dtype")
NO_ROOM: Mapping[str, Array] = {}


def answer_results(sender: TensorSender, answers: Sequence[Answer | None]) -> list[OutgoingResult]:
    """For the requests of a batch that is done, one for those in a row that are alike; None: a request is answered
    beside the batch."""
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
    """The next request's result, with that of the request before where the two differ in nothing but their bytes.
    Raises: ServeError: INTERNAL, it cannot be sent."""
    layout, data = sender.of(outputs), [each.data for each in outputs]
    if not parameters and results and results[-1].layout is layout:
        packed = layout.places.packed(data)
        if packed is not None:
            results[-1].add(layout.places.end, packed)
            return
    pieces, nbytes = layout.places.pieces(data, "output")
    result = OutgoingResult(0, 0, sender.number(layout), 0, nbytes, [*pieces], layout=layout)
    if parameters:
        details = checked(parameters_text(parameters))
        result.contents += padded((details,))
        result.nbytes, result.text_bytes, result.layout = nbytes + aligned(len(details)), len(details), None
    results.append(result)


class _Plan:
    """Where the outputs of results of known shapes go in a slot."""

    __slots__ = ("_rooms", "layout")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._rooms: Memo[int, Mapping[str, Array]] = Memo(_REMEMBERED)

    def room(self, place: int, view: memoryview) -> Mapping[str, Array]:
        """The outputs' places in a slot, as arrays. A slot that comes again has the same."""
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
    """Writes the results of one instance's batches. What goes where is worked out once for each set of shapes."""

    def __init__(self, end: WorkerEnd, signature: Signature, batching: bool) -> None:
        """`batching`: whether outputs have the batch's rows."""
        self._end = end
        self._datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        self._batching = batching
        self._plans: Memo[object, _Plan] = Memo(_REMEMBERED)
        self._last: Memo[tuple[int, ...], _Plan] = Memo(_REMEMBERED)
        """By the rows of a batch's requests, the plan of the latest result."""
        self._reserved: tuple[_Plan, int, memoryview] | None = None

    def make_room(self, batch: Batch) -> None:
        """Give the batch room for outputs as they were the last time, unless these are copied sooner."""
        plan = self._last.get(batch.request_sizes)
        if plan is not None and plan.layout.places.end > COPIED_SOONER:
            self._reserved = (plan, *self._end.reserve(plan.layout.places.end))
            batch.room = plan.room(*self._reserved[1:])
        else:
            batch.room = NO_ROOM

    def give_up_room(self) -> None:
        """The batch has failed, or its results are others."""
        if self._reserved is not None:
            self._end.give_up(self._reserved[1])
            self._reserved = None

    def write(self, results: list[OutgoingResult], batch: Batch, result: BatchResult) -> None:
        """The outputs on their way to the server, behind those of the requests before where requests run one by one.
        Raises: ServeError: INTERNAL, the outputs are not what was asked for, or not of the batch's rows."""
        outputs = result.outputs
        names = batch.requested_outputs or tuple(outputs)
        try:
            values: Sequence[Array | Tensor] = list(map(outputs.__getitem__, names))
        except KeyError as missing:
            raise internal(f"the engine gave no output {missing}, only {sorted(outputs)}") from None
        key = None
        if not result.failures and not batch.cuts:
            try:
                arrays = tuple(map(_SHAPE_AND_DTYPE, values))
            except AttributeError:
                pass  # A Tensor is among them.
            else:
                key = (sum(batch.request_sizes), names, arrays)
                plan = self._plans.get(key)
                if plan is not None:
                    self._write_as_before(results, batch, plan, values)
                    return
        self._write_anew(results, batch, dict(zip(names, values, strict=True)), result.failures, key)

    def _write_as_before(
        self, results: list[OutgoingResult], batch: Batch, plan: _Plan, values: Sequence[Array | Tensor]
    ) -> None:
        layout = plan.layout
        if self._reserved is not None and self._reserved[0] is plan:
            _, place, view = self._reserved
            self._reserved = None
            for destination, value in zip(plan.room(place, view).values(), values, strict=True):
                if value is not destination:
                    np.copyto(destination, value)  # type: ignore[arg-type]
            contents: list[Buffer] = []
        else:
            # What lies in the room for another plan goes to the server before that is given up.
            data: list[Buffer] = list(map(_TO_BYTES if layout.places.end <= COPIED_SOONER else _octets, values))
            contents, place = [*layout.places.pieces(data)[0]], None
            if results and results[-1].layout is layout:
                results[-1].add(layout.places.end, contents)
                return
        if self._last.get(batch.request_sizes) is not plan:
            self._last.keep(batch.request_sizes, plan)
        number = self._end.sender.number(layout)
        requests = 1 if len(batch.request_sizes) == 1 else 0
        results.append(OutgoingResult(0, 0, number, 0, layout.places.end, contents, requests, layout, place))

    def _write_anew(
        self,
        results: list[OutgoingResult],
        batch: Batch,
        values: Mapping[str, Array | Tensor],
        failures: Mapping[int, ServeError],
        key: object | None,
    ) -> None:
        sizes = batch.request_sizes
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
        # The server cuts by rows of one size; all else is cut here.
        is_text = any(self._datatype(name, value) is DataType.BYTES for name, value in values.items())
        if failures or (len(sizes) > 1 and (is_text or batch.cuts)):
            results += answer_results(self._end.sender, self._split(batch, values, failures))
            return
        tensors = [self._cut(name, one, batch.cuts.get(name, (one.shape,)))[0] for name, one in values.items()]
        _add_result(self._end.sender, results, tensors, NO_PARAMETERS)
        if len(sizes) > 1:
            results[-1].requests = 0
        layout = results[-1].layout
        if key is not None and layout is not None and layout.places.sizes is not None:
            self._last.keep(batch.request_sizes, self._plans.keep(key, _Plan(layout)))

    def _split(
        self, batch: Batch, values: Mapping[str, Array | Tensor], failures: Mapping[int, ServeError]
    ) -> list[Answer]:
        """The answer to each request of several."""
        columns = [
            self._cut(name, value, batch.cuts.get(name) or [(size, *value.shape[1:]) for size in batch.request_sizes])
            for name, value in values.items()
        ]
        longest = _FAILURE_TEXTS // max(len(failures), 1)
        return [
            ServeError(failures[index].code, failures[index].text[:longest])
            if index in failures
            else ModelResponse([column[index] for column in columns])
            for index in range(len(batch.request_sizes))
        ]

    def _cut(self, name: str, value: Array | Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """An output as tensors of these shapes, one behind the other. Raises: ServeError: INTERNAL, it is damaged."""
        datatype, counts = self._datatype(name, value), list(accumulate(map(math.prod, shapes), initial=0))
        if isinstance(value, Tensor):
            data, bounds = flat_octets(value.data), _ends(value, counts)
            parts: list[Buffer] = [data[begin:end] for begin, end in pairwise(bounds)]
        else:
            flat = value.reshape(-1)
            parts = [tensor_from_numpy(name, flat[begin:end], datatype).data for begin, end in pairwise(counts)]
        return [Tensor(name, datatype, tuple(shape), part) for shape, part in zip(shapes, parts, strict=True)]

    def _datatype(self, name: str, value: Array | Tensor) -> DataType:
        """As it is declared, where an array may be of that datatype."""
        if isinstance(value, Tensor):
            return value.datatype
        declared = self._datatypes.get(name)
        return declared if declared is not None and declared.numpy_dtype == value.dtype else datatype_of(value)


def _octets(array: Array | Tensor) -> Buffer:
    """The bytes of an array, one behind the other."""
    assert isinstance(array, np.ndarray)
    return octets(np.ascontiguousarray(array))


def _ends(tensor: Tensor, counts: Sequence[int]) -> list[int]:
    """Where the first elements of an output end, for each of these counts. Raises: ServeError: INTERNAL."""
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
