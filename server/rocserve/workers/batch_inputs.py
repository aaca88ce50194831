"""Makes batches of received requests in the worker: inputs are used in place, or gathered one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from rocserve.backends.base import Batch
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import References
from rocserve.core.errors import invalid_argument
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import NO_PADDING, Buckets, Lengths, Padding, largest
from rocserve.core.ragged import RaggedBatching, Shape
from rocserve.core.requests import RequestForm
from rocserve.core.tensor_places import aligned, lay_out
from rocserve.core.tensors import COPIED_SOONER, Buffer, Tensor, filled_up, tensor_from_numpy
from rocserve.links.texts import REMEMBERED
from rocserve.plane.guarded_mapping import GuardedFile
from rocserve.plane.heap import HeapReader, fill
from rocserve.workers.worker_end import ReceivedRequest, WorkerEnd

_REMEMBERED_BATCHES = 256
"""Batches in each memo."""
READ_IN_PLACE = frozenset((DataType.FP16, DataType.BF16, DataType.FP32, DataType.FP64))
"""Datatypes of inputs that a model may read in a client's file or another worker's heap, although its owner may change
them meanwhile. Engines never check a value of these types and then use it as an index."""

_Gathered = tuple[Batch, Sequence[memoryview]]
"""A batch of requests of one form, and for each input the memory that the requests' data is copied to."""


def request_inputs(request: ReceivedRequest, files: Mapping[int, HeapReader | GuardedFile]) -> list[memoryview]:
    """Return the bytes of a request's inputs, in place. `files`: see ReceivedFiles."""
    places, source = request.form.places, files[request.file]
    if request.elsewhere:
        return _scattered_inputs(request, request.elsewhere, files)
    if places.sizes is not None:
        bounds, size = places.bounds, places.end
    else:
        bounds, size = places.of(source.view(request.place, places.table_bytes))
    view = source.view(request.place, size)
    return [view[begin:end] for begin, end in bounds]


def _scattered_inputs(
    request: ReceivedRequest,
    elsewhere: Mapping[int, tuple[int, int]],
    files: Mapping[int, HeapReader | GuardedFile],
) -> list[memoryview]:
    sizes = request.form.places.sizes
    assert sizes is not None, "only inputs whose sizes follow from their shapes are scattered"
    others = [index for index in range(len(sizes)) if index not in elsewhere]
    offsets, _ = lay_out([sizes[index] for index in others], request.place)
    places = {**dict(zip(others, ((0, offset) for offset in offsets), strict=True)), **elsewhere}
    return [files[places[index][0]].view(places[index][1], size) for index, size in enumerate(sizes)]


class BatchGatherer:
    """Makes a BatchLane's batches in one memory. Gathered batches of equal form and count are the same Batch object."""

    def __init__(
        self,
        end: WorkerEnd,
        config: ModelConfig,
        input_memory: Callable[[int, Lengths], Mapping[str, memoryview]],
        reads_files: bool,
        padding: Padding = NO_PADDING,
    ) -> None:
        """`input_memory`: see Execution. `reads_files`: see backends.base.model_reads_files."""
        self._files = end.files
        self._reads_files = reads_files
        self._input_memory = input_memory
        self._batching = config.max_batch_size > 0
        self._output_order = tuple(output.name for output in config.outputs)
        self._ragged = RaggedBatching(config)
        self._is_ragged = bool(self._ragged)
        self._buckets = Buckets(padding)
        self._lengths: Memo[RequestForm, Lengths] = Memo(REMEMBERED)
        self._single: Memo[tuple[RequestForm, int], Batch] = Memo(_REMEMBERED_BATCHES)
        self._gathered: Memo[tuple[RequestForm, int], _Gathered] = Memo(_REMEMBERED_BATCHES)
        self._memory = memoryview(bytearray())
        """The memory of gathered batches if the engine lends none; as large as the largest batch so far."""

    def batch(self, requests: Sequence[ReceivedRequest]) -> Batch:
        """Join the requests to one batch. Its inputs are valid until the batch is done or the next one is made."""
        form = requests[0].form
        alike = len(requests) == 1 or not any(request.form is not form for request in requests)
        alike = alike and not any(request.elsewhere for request in requests)
        lengths, sizes = self._bucket_of(requests) if self._buckets else ((), ())
        if form.places.sizes is None or self._is_ragged or not alike or (lengths and lengths[0] != sizes):
            return self._joined_batch(requests, lengths, sizes)
        key = (form, len(requests))
        gathered = self._gathered.get(key)
        if (
            gathered is None
            and len(requests) == 1
            and form.places.end > COPIED_SOONER
            and not self._engine_memory(form.layout.rows, sizes)
        ):
            # Small inputs lie in many places, so a copy costs less than a Batch for each place. An output that shares
            # the gathered inputs' memory is copied before the next batch is gathered.
            return self._batch_in_place(requests[0])
        if gathered is None:
            gathered = self._gathered.keep(key, self._new_gathered(form, len(requests), sizes))
        batch, columns = gathered
        for index, request in enumerate(requests):
            block = self._files[request.file].view(request.place, form.places.end)
            for (begin, end), column in zip(form.places.bounds, columns, strict=True):
                size = end - begin
                column[index * size : (index + 1) * size] = block[begin:end]
        return batch

    def _bucket_of(self, requests: Sequence[ReceivedRequest]) -> tuple[Sequence[Lengths], Lengths]:
        """Return the requests' lengths, and the sizes to which they are padded. Raises ServeError (INVALID_ARGUMENT)
        if there are none, which the server has checked."""
        lengths: list[Lengths] = []
        try:
            for request in requests:
                own = self._lengths.get(request.form)
                if own is None:
                    shapes = ((head.name, head.shape) for head in request.form.layout.inputs)
                    own = self._lengths.keep(request.form, self._buckets.lengths(shapes))
                lengths.append(own)
            return lengths, self._buckets.sizes_for(largest(lengths))
        except ValueError as fault:
            raise invalid_argument(str(fault)) from None

    def _batch_in_place(self, request: ReceivedRequest) -> Batch:
        key = (request.form, request.place)
        batch = self._single.get(key) if not request.file else None
        if batch is None:
            layout = request.form.layout
            inputs = {
                head.name: Tensor(head.name, head.datatype, head.shape, part)
                for head, part in zip(layout.inputs, self._inputs(request), strict=True)
            }
            batch = Batch(inputs, layout.requested_outputs, (layout.rows,), reference_outputs=layout.reference_outputs)
            if not request.file:
                self._single.keep(key, batch)
        return batch

    def _inputs(self, request: ReceivedRequest) -> Sequence[Buffer]:
        """Return a request's inputs in place, or copies if they are in a client's file that the model may not read."""
        data, heads = request_inputs(request, self._files), request.form.layout.inputs
        if request.elsewhere:
            return [
                bytes(one) if index in request.elsewhere and not self._reads_files else one
                for index, one in enumerate(data)
            ]
        if not request.file or (self._reads_files and all(head.datatype in READ_IN_PLACE for head in heads)):
            return data
        return [*map(bytes, data)]

    def _new_gathered(self, form: RequestForm, count: int, sizes: Lengths) -> _Gathered:
        layout = form.layout
        inputs: dict[str, Tensor] = {}
        columns: list[memoryview] = []
        lent, begin = self._engine_memory(layout.rows * count, sizes), 0
        if not lent:
            self._ensure_memory(form.places.end * count)
        for head in layout.inputs:
            shape = head.shape if count == 1 else (head.shape[0] * count, *head.shape[1:])
            nbytes = math.prod(shape) * head.datatype.itemsize
            columns.append(lent[head.name][:nbytes] if lent else self._memory[begin : begin + nbytes])
            begin += aligned(nbytes)
            inputs[head.name] = Tensor(head.name, head.datatype, shape, columns[-1].toreadonly())
        batch = Batch(
            inputs, layout.requested_outputs, (layout.rows,) * count, reference_outputs=layout.reference_outputs
        )
        return batch, columns

    def _ensure_memory(self, nbytes: int) -> None:
        if len(self._memory) < nbytes:
            # Remembered batches refer to the old memory.
            self._gathered.clear()
            self._memory = memoryview(bytearray(nbytes))

    def _engine_memory(self, rows: int, sizes: Lengths) -> Mapping[str, memoryview]:
        return self._input_memory(rows, sizes) if self._batching and not self._is_ragged else {}

    def _joined_batch(self, requests: Sequence[ReceivedRequest], lengths: Sequence[Lengths], sizes: Lengths) -> Batch:
        """Join requests that differ in the order of inputs, in the requested outputs, or in shapes. `lengths`: of the
        requests' padded dimensions, which are padded to `sizes`."""
        rows = tuple([one.form.layout.rows for one in requests])
        lent = self._engine_memory(sum(rows), sizes)
        parts: dict[str, list[Buffer]] = {head.name: [] for head in requests[0].form.layout.inputs}
        shapes: dict[str, list[Shape]] = {name: [] for name in parts}
        for request in requests:
            for head, part in zip(request.form.layout.inputs, self._inputs(request), strict=True):
                parts[head.name].append(part)
                shapes[head.name].append(head.shape)
        inputs: dict[str, Tensor] = {}
        for head in requests[0].form.layout.inputs:
            name = head.name
            # References are not put into the memory that the engine lends for the values of their input.
            memory = lent.get(name) if head.datatype is not DataType.BYTES else None
            shape = self._shape(name, shapes[name])
            if name in self._buckets.inputs:
                shape = self._buckets.padded_shape(name, shape, sizes)
                own = zip(shapes[name], parts[name], strict=True)
                data = filled_up(head.datatype, shape, self._buckets.value(name), own, memory)
            else:
                data = _joined(parts[name], memory)
            inputs[name] = Tensor(name, head.datatype, shape, data)
        for head in requests[0].form.layout.references:
            shape = head.shape
            if self._batching:
                shape = (sum(rows), *shape[1:])
            inputs[head.name] = Tensor(head.name, head.datatype, shape, References(inputs[head.name].data))
        made, cuts = self._ragged.parts(shapes)
        inputs.update((tensor.name, tensor) for tensor in made)
        reference_outputs = requests[0].form.layout.reference_outputs
        if any(one.form.layout.reference_outputs != reference_outputs for one in requests):
            reference_outputs = ()
        by_request = [request.form.layout.requested_outputs for request in requests]
        requested, wanted = by_request[0], {name for names in by_request for name in names}
        if len(wanted) != len(requested):
            requested = tuple(name for name in self._output_order if name in wanted)
        padded = self._buckets.padded_outputs(lengths, sizes)
        return Batch(inputs, requested, rows, cuts, padded, by_request, reference_outputs)

    def _shape(self, name: str, shapes: Sequence[Shape]) -> Shape:
        if name in self._ragged.inputs:
            return (sum(map(math.prod, shapes)),)
        if self._batching:
            return (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return shapes[0]


def _joined(parts: Sequence[Buffer], memory: memoryview | None) -> Buffer:
    if memory is None:
        return parts[0] if len(parts) == 1 else b"".join(parts)
    joined = memory[: sum(map(len, parts))]
    fill(joined, parts)
    return joined.toreadonly()


def split_sample(batch: Batch) -> list[dict[str, Tensor]]:
    """Copy each request's inputs from a warm-up sample. Raises ServeError (INVALID_ARGUMENT) if BYTES are malformed."""
    requests: list[dict[str, Tensor]] = [{} for _ in batch.request_sizes]
    for name, tensor in batch.inputs.items():
        parts = [tensor]
        if len(requests) > 1:
            rows = np.split(tensor.numpy(), [*accumulate(batch.request_sizes[:-1])])
            parts = [tensor_from_numpy(name, part, tensor.datatype) for part in rows]
        for request, part in zip(requests, parts, strict=True):
            request[name] = replace(part, data=bytearray(part.data))
    return requests
