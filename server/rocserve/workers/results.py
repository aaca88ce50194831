"""Checks a worker's report on a batch, and cuts the results into those of single requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from rocserve.core.errors import ServeError
from rocserve.core.parameters import Parameters
from rocserve.core.responses import LARGE_RESPONSE
from rocserve.core.tensor_places import Bounds, TensorPlaces
from rocserve.core.tensors import Buffer, TensorHead
from rocserve.links.entries import ENTRY, FAILURE, OPEN, RESPONSE, RESULTS_HEADER, WHOLE
from rocserve.links.rings import ENTRY_BYTES
from rocserve.links.tensors import TensorReader, bounds_of, read_error, read_parameters, text_length
from rocserve.plane.heap import HeapReader, Slot

Outputs = tuple[tuple[TensorHead, ...], Sequence[Buffer]]
"""The heads and the bytes of one request's outputs."""
Part = tuple[tuple[TensorHead, ...], Sequence[slice]]
"""The heads of one request's outputs, and where each lies, counted from the result's first byte."""


_Cut = tuple[TensorPlaces, tuple[int, ...]]
"""A result's layout, and the rows of the requests that share the result."""
_ALONE = (1,)
"""The rows in the key of a result that is not cut."""
_NO_PART: Part = ((), ())
_NOTHING = memoryview(b"")


class BatchOutcome:
    __slots__ = (
        "_view",
        "begun",
        "compute_end_ns",
        "error",
        "failures",
        "input_end_ns",
        "is_large",
        "open",
        "output_start_ns",
        "parameters",
        "parts",
        "slot",
    )

    def __init__(self, error: ServeError | None, times: Sequence[int], view: memoryview = _NOTHING) -> None:
        """`view`: the memory of all outputs."""
        self.error = error
        """The error of the whole batch; None = the batch ran."""
        # time.monotonic_ns() when the engine began, when it ended, and when the outputs were in the heap.
        self.input_end_ns, self.output_start_ns, self.compute_end_ns = times
        self.begun: int | None = None
        """How many of the requests may have begun to run, if the batch is a group and its worker has ended; the others
        may run elsewhere. None = the worker has not ended."""
        self.failures: dict[int, ServeError] = {}
        """Errors of single requests, by their index in the batch."""
        self.open: set[int] = set()
        """Indices of requests that the model answers, or has answered, by separate responses."""
        self.parameters: dict[int, Parameters] = {}
        """Parameters of the model's responses, by request."""
        self._view = view
        self.is_large = len(view) > LARGE_RESPONSE
        self.slot: Slot | None = None
        """See InferResponse."""
        self.parts: list[tuple[int, Part]] = []
        """For each request, the offset of its result in the view, and its part of that result."""

    @property
    def nbytes(self) -> int:
        return len(self._view)

    def outputs_of(self, request_index: int) -> Outputs:
        """Return one request's rows of each output, as views of the worker's heap."""
        start, (heads, slices) = self.parts[request_index]
        return heads, list(map(self._view[start:].__getitem__, slices))


class ResultReader:
    """Reads the results of one instance. Methods raise ValueError if the worker's messages are invalid."""

    def __init__(self, heap: HeapReader) -> None:
        self._heap = heap
        self.layouts = TensorReader(heap)
        self._cuts: dict[_Cut, Sequence[Part]] = {}
        """Only for results whose layout fixes where each output lies."""
        self._remembered = 0

    def read_batch(self, place: int, nbytes: int, sizes: tuple[int, ...], may_open: bool) -> BatchOutcome:
        """Read the results of a batch from their slot. `sizes`: rows of each request. `may_open`: the model may keep
        requests open."""
        view = self._heap.checked(place, max(nbytes, RESULTS_HEADER.size))
        entries, *times = RESULTS_HEADER.unpack_from(view)
        if not 0 < entries < nbytes // ENTRY_BYTES:
            raise ValueError(f"results in {entries} entries of {nbytes} bytes")
        outcome = BatchOutcome(None, times, view)
        parts = outcome.parts
        for kind, flags, code, text, count, start, details in ENTRY.iter_unpack(
            view[ENTRY_BYTES : (entries + 1) * ENTRY_BYTES]
        ):
            if not 0 < count <= len(sizes) - len(parts):
                raise ValueError(f"results of more than {len(sizes)} requests")
            is_whole = flags == WHOLE
            if is_whole and count != len(sizes):
                raise ValueError(f"a message of kind {kind} among the results of {len(sizes)} requests")
            if kind == RESPONSE:
                places = self.layouts.get(text)
                bounds, end = places.bounds, places.end
                if places.sizes is None:
                    bounds, end = bounds_of(places, view[start : start + places.table_bytes])
                stride = end + details
                if start + (1 if is_whole else count) * stride > len(view):
                    raise ValueError(f"a result of {stride} bytes at byte {start} of {len(view)}")
                if details:
                    outcome.parameters[len(parts)] = read_parameters(_text(view, start + end, details))
                key = (places, sizes if is_whole else _ALONE)
                cut = self._cuts.get(key) or self._cut(key, bounds)
                if is_whole:
                    parts += [(start, part) for part in cut]
                else:
                    for _ in range(count):
                        parts.append((start, cut[0]))
                        start += stride
            elif kind == FAILURE and is_whole:
                outcome.error = read_error(code, _text(view, start, details))
                return outcome
            elif kind == FAILURE and count == 1:
                outcome.failures[len(parts)] = read_error(code, _text(view, start, details))
                parts.append((0, _NO_PART))
            elif kind == OPEN and may_open:
                outcome.open.update(range(len(parts), len(parts) + count))
                parts += [(0, _NO_PART)] * count
            else:
                raise ValueError(f"a message of kind {kind} among the results of {len(sizes)} requests")
        if len(parts) != len(sizes):
            raise ValueError(f"results of {len(parts)} requests, expected {len(sizes)}")
        return outcome

    def _cut(self, key: _Cut, bounds: Bounds) -> Sequence[Part]:
        places, sizes = key
        parts = _parts(places.heads, bounds, sizes)
        if places.sizes is not None:
            self._remembered += len(sizes) * len(places.heads) + 1
            # Each entry takes a few hundred bytes.
            if self._remembered > 8192:
                self._cuts.clear()
                self._remembered = 0
            self._cuts[key] = parts
        return parts


def _parts(heads: tuple[TensorHead, ...], bounds: Bounds, sizes: tuple[int, ...]) -> Sequence[Part]:
    if len(sizes) == 1:
        return ((heads, [slice(*bound) for bound in bounds]),)
    rows = sum(sizes)
    places: list[list[slice]] = [[] for _ in sizes]
    for head, (begin, end) in zip(heads, bounds, strict=True):
        if not head.shape or head.shape[0] != rows or head.datatype.itemsize * math.prod(head.shape) != end - begin:
            raise ValueError(f"output '{head.name}' has the shape {list(head.shape)} for a batch of {rows} rows")
        row = math.prod(head.shape[1:]) * head.datatype.itemsize
        for of_request, (first, last) in zip(places, pairwise(accumulate(sizes, initial=0)), strict=True):
            of_request.append(slice(begin + first * row, begin + last * row))
    # Requests with equally many rows share the heads of their parts.
    by_size = {size: tuple([head._replace(shape=(size, *head.shape[1:])) for head in heads]) for size in {*sizes}}
    return [(by_size[size], of_request) for size, of_request in zip(sizes, places, strict=True)]


def _text(view: memoryview, start: int, nbytes: int) -> bytes:
    if start + text_length(nbytes) > len(view):
        raise ValueError(f"a text of {nbytes} bytes at byte {start} of {len(view)}")
    return bytes(view[start : start + nbytes])
