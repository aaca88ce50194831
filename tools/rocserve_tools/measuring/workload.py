"""Makes the batches that engines are timed with: random inputs of one shape or, with --lengths, what a server's queue
makes of requests with these lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from rocserve.backends.written_sizes import is_mask
from rocserve.core.padding import Bucket, Buckets, Padding
from rocserve.core.parameters import NO_PARAMETERS
from rocserve.core.requests import InferRequest, RequestHead, RequestPlan
from rocserve.core.tensors import scalar
from rocserve.load_check.tensors import Array
from rocserve.scheduling.batch import padded_elements
from rocserve.scheduling.batch_policy import DynamicBatcher
from rocserve.scheduling.bucket_batcher import BucketBatcher
from rocserve_tools.measuring.candidates import MeasuredInput, OpenCandidate, random_inputs
from rocserve_tools.measuring.lengths import STRATA, DrawnLengths, draw_lengths
from rocserve_tools.measuring.timed_runs import Sample

_FEWEST = 2 * STRATA
"""Requests of a workload. With 64, a few long ones decide how much is padded: 0.24 elements for each real one, where it
is 0.21 with 128 and 0.20 with thousands (log-normal around 40, half steps of sizes)."""
_REQUESTS = 8
"""For each row of a batch: the last batches, for which fewer requests wait, are then few."""
_WAITING = 2
"""For each row of a batch, requests that wait when the next batch is formed: enough for another."""


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Requests of one row each that run together."""

    lengths: Sequence[Mapping[str, int]]
    """Of each request, by dimension; empty = the shape of the measured inputs."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """To which they are filled up."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is timed of one batch size; each batch runs equally often."""

    batches: Sequence[RequestBatch]
    has_rows: bool
    values: Mapping[str, float] = field(default_factory=dict)
    """Input -> the value that it is filled up with; 0 if it is not here."""
    padded: float | None = None
    """Padded elements for each real one; None = nothing is padded."""

    @property
    def rows(self) -> float:
        """Return the mean rows of a batch; 1 for each request to a model that does not batch."""
        return sum(len(batch.lengths) for batch in self.batches) / len(self.batches)


class MadeSamples:
    """The batches of a workload for one engine. Each is made when it is asked for, as all of them may need much memory.
    Implements Samples."""

    def __init__(self, workload: Workload, inputs: Sequence[MeasuredInput]) -> None:
        self._workload, self._inputs = workload, inputs
        largest: dict[str, int] = {}
        for batch in workload.batches:
            for label, size in batch.sizes.items():
                largest[label] = max(size, largest.get(label, 0))
        self._values = random_inputs([replace(one, shape=_sized(one, largest)) for one in inputs])
        for one in inputs:
            if one.labels and is_mask(one.name):
                self._values[one.name].fill(1)

    def __len__(self) -> int:
        return len(self._workload.batches)

    def __iter__(self) -> Iterator[Sample]:
        for batch in self._workload.batches:
            yield {one.name: self._input(one, batch) for one in self._inputs}

    def _input(self, one: MeasuredInput, batch: RequestBatch) -> Array:
        values, has_rows, rows = self._values[one.name], self._workload.has_rows, len(batch.lengths)
        if not one.labels:
            return values[:rows] if has_rows else values
        shape = _sized(one, batch.sizes)
        filled: Array = np.full(
            (rows, *shape[1:]) if has_rows else shape,
            scalar(one.datatype, self._workload.values.get(one.name, 0.0)),
            values.dtype,
        )
        for row, lengths in enumerate(batch.lengths):
            own = [slice(size) for size in _sized(one, lengths)]
            if has_rows:
                own[0] = slice(row, row + 1)
            filled[tuple(own)] = values[tuple(own)]
        return filled


def workload(opened: OpenCandidate, batch_size: int) -> Workload:
    """Return what all engines run at a batch size (0 = the model does not batch). `opened`: the first of them, whose
    requests are joined and padded as a server does."""
    if not opened.laws:
        return Workload((RequestBatch(({},) * max(batch_size, 1)),), batch_size > 0)
    columns = _drawn(opened, batch_size)
    requests = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    padding = opened.workers.signature.padding
    batches: list[RequestBatch] = []
    real = padded = 0
    for members in _formed(_Plans(opened.inputs[batch_size], padding, batch_size), requests, opened.keeps_order):
        lengths = [requests[int(member.id)] for member in members]
        bucket = members[0].plan.bucket
        sizes = {} if bucket is None else dict(zip(_labels(padding), bucket.sizes, strict=True))
        batches.append(RequestBatch(lengths, {**lengths[0], **sizes}))
        elements = padded_elements([member.plan for member in members])
        real, padded = real + elements[0], padded + elements[1]
    return Workload(batches, batch_size > 0, padding.values, padded / real if real else None)


def drawn_lengths(opened: OpenCandidate) -> Mapping[str, DrawnLengths]:
    """Return what was drawn for the largest batch size; smaller ones have the first of it."""
    return {label: DrawnLengths.of(lengths) for label, lengths in _drawn(opened, max(opened.inputs)).items()}


def _drawn(opened: OpenCandidate, batch_size: int) -> Mapping[str, Sequence[int]]:
    count = max(_FEWEST, _REQUESTS * batch_size)
    return {label: draw_lengths(law, count, label) for label, law in opened.laws.items()}


class _Plans:
    """Plans requests of one row, as far as it is decided by that which of them run together."""

    def __init__(self, inputs: Sequence[MeasuredInput], padding: Padding, batch_size: int) -> None:
        self.padding = padding
        self.rows = max(batch_size, 1)
        self._inputs = inputs if not batch_size else [replace(one, shape=(1, *one.shape[1:])) for one in inputs]
        self._has_rows = batch_size > 0
        self._buckets = Buckets(padding)
        self._known: dict[object, Bucket] = {}

    def plan(self, lengths: Mapping[str, int]) -> RequestPlan:
        shapes = [(one.name, _sized(one, lengths)) for one in self._inputs]
        bucket = self._buckets.bucket(shapes, 1) if self._buckets else None
        if bucket is not None:
            bucket = self._known.setdefault(bucket.sizes, bucket)
        return RequestPlan(
            batch_size=1,
            inputs=(),
            batch_key=tuple(
                (one.name, one.datatype, self._buckets.shared_shape(name, shape)[int(self._has_rows) :])
                for one, (name, shape) in zip(self._inputs, shapes, strict=True)
            ),
            outputs=(),
            classifications={},
            priority=0,
            timeout_microseconds=0,
            parameters=NO_PARAMETERS,
            bucket=bucket,
            real_elements=self._buckets.elements(shapes),
        )


def _formed(plans: _Plans, lengths: Sequence[Mapping[str, int]], keeps_order: bool) -> Iterator[Sequence[InferRequest]]:
    """Yield the batches that a server forms of requests with these lengths, while many of them wait."""
    dynamic = DynamicBatcher(plans.rows, (plans.rows,), 0)
    batcher = BucketBatcher(dynamic, plans.padding, keeps_order) if plans.padding.dimensions else dynamic
    head = RequestHead("", "", ())
    upcoming = iter(enumerate(lengths))
    queue: list[InferRequest] = []
    while True:
        for number, own in islice(upcoming, _WAITING * plans.rows - len(queue)):
            request = InferRequest(head, str(number), ())
            request.plan, request.queue_start_ns = plans.plan(own), 0
            queue.append(request)
        if not queue:
            return
        members = batcher.decide(queue, 0).members(queue)
        yield members
        queue = [request for request in queue if request not in members]


def _labels(padding: Padding) -> Sequence[str]:
    return [dimension.label for dimension in padding.dimensions]


def _sized(one: MeasuredInput, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return an input's shape with these sizes of its dimensions; those that are not there stay."""
    return tuple(sizes.get(one.labels.get(place, ""), size) for place, size in enumerate(one.shape))
