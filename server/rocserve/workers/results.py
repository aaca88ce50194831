"""What becomes of a batch in a worker: checks what the worker says of its results, and cuts them into requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from rocserve.core.errors import ServeError
from rocserve.core.requests import LARGE_RESPONSE, Parameters
from rocserve.core.tensor_places import Bounds, TensorPlaces
from rocserve.core.tensors import Buffer, TensorHead
from rocserve.plane.heap import HeapReader
from rocserve.plane.link import ENTRY_BYTES
from rocserve.workers.entries import ENTRY, ERROR, OPEN, RESULT
from rocserve.workers.layouts import KnownLayouts, bounds_of, read_parameters, text_length
from rocserve.workers.messages import LONGEST_TEXT, status_code

Outputs = tuple[tuple[TensorHead, ...], Sequence[Buffer]]
"""What one request's part of a result is, and its bytes."""
Part = tuple[tuple[TensorHead, ...], Sequence[slice]]
"""What one request's part of a result is, and where each of its outputs lies, counted from the result's first byte."""

_MOST_REMEMBERED = 8192
"""Outputs of requests; a few hundred bytes each."""

_NO_PART: Part = ((), ())
_ALONE = (1,)
"""A request whose result is not cut."""
_NOTHING = memoryview(b"")


class BatchOutcome:
    """What became of a batch."""

    __slots__ = (
        "_parts",
        "_view",
        "compute_end_ns",
        "error",
        "failures",
        "input_end_ns",
        "is_large",
        "open",
        "output_start_ns",
        "parameters",
        "slot",
    )

    def __init__(self, error: ServeError | None, times: tuple[int, int, int], view: memoryview = _NOTHING) -> None:
        """`view`: the memory of all outputs."""
        self.error = error
        """Set when the whole batch failed."""
        # time.monotonic_ns() when the engine began, when it ended, and when the outputs lay in the heap.
        self.input_end_ns, self.output_start_ns, self.compute_end_ns = times
        self.failures: dict[int, ServeError] = {}
        """Single requests that failed, by their place in the batch."""
        self.open: set[int] = set()
        """The requests that the model answers, or has answered, by responses of their own."""
        self.parameters: dict[int, Parameters] = {}
        """What the model says beside the outputs of its response, by request."""
        self._view = view
        self.is_large = len(view) > LARGE_RESPONSE
        self.slot: object = None
        """See InferResponse."""
        self._parts: list[tuple[int, Part]] = []
        """By request: where its result begins, and what it has of that."""

    def outputs_of(self, request_index: int) -> Outputs:
        """One request's rows of each output, as views on the worker's heap."""
        start, (heads, slices) = self._parts[request_index]
        return heads, list(map(self._view[start:].__getitem__, slices))

    def add(self, starts: Sequence[int], parts: Sequence[Part]) -> None:
        """Results that begin there, each of as many requests as there are parts, one behind the other."""
        self._parts += [(start, part) for start in starts for part in parts]

    def add_open(self, count: int) -> None:
        """So many requests that are open."""
        self.open.update(range(len(self._parts), len(self._parts) + count))
        self._parts += [(0, _NO_PART)] * count

    def add_failure(self, error: ServeError) -> None:
        self.failures[len(self._parts)] = error
        self._parts.append((0, _NO_PART))

    @property
    def request_count(self) -> int:
        """Of those that have been added."""
        return len(self._parts)


class ResultReader:
    """Reads the results of one instance. All that raises ValueError does so because the worker told what does not make
    sense."""

    def __init__(self, heap: HeapReader) -> None:
        self._heap = heap
        self.layouts = KnownLayouts(heap)
        self._parts: dict[tuple[TensorPlaces, tuple[int, ...]], Sequence[Part]] = {}
        """Of results together whose places follow from their layout, by that and by the rows of the requests."""
        self._remembered = 0

    def error(self, code: int, place: int, nbytes: int) -> ServeError:
        """Whose text has a slot of its own. Raises: ValueError."""
        return _error(code, self.layouts.text(place, nbytes))

    def read_batch(
        self, place: int, nbytes: int, entries: int, times: tuple[int, int, int], sizes: tuple[int, ...], may_open: bool
    ) -> BatchOutcome:
        """The results of a batch.

        Args:
            place: of their slot of so many bytes, at whose beginning is a table of so many entries.
            times: see BatchOutcome.
            sizes: of the batch's requests, in rows.
            may_open: the model sees each request for itself, so that it may keep one open.
        """
        if not 0 < entries * ENTRY_BYTES <= nbytes:
            raise ValueError(f"results in {entries} entries of {nbytes} bytes")
        view = self._heap.checked(place, nbytes)
        outcome = BatchOutcome(None, times, view)
        for kind, flags, code, number, count, start, details in ENTRY.iter_unpack(view[: entries * ENTRY_BYTES]):
            left = len(sizes) - outcome.request_count
            is_whole = not count and left == len(sizes) and not flags
            if kind != RESULT or not (0 < count <= left or is_whole) or (flags & OPEN and not may_open):
                raise ValueError(f"a message of kind {kind} among the results of {len(sizes)} requests")
            if flags & OPEN:
                outcome.add_open(count)
            elif flags & ERROR:
                outcome.add_failure(_error(code, _text(view, start, details)))
            else:
                places = self.layouts.get(number)
                bounds, end = bounds_of(places, view[start : start + places.table_bytes])
                stride = end + details
                if start + (count or 1) * stride > len(view):
                    raise ValueError(f"a result of {stride} bytes at byte {start} of {len(view)}")
                if details:
                    outcome.parameters[outcome.request_count] = read_parameters(_text(view, start + end, details))
                parts = self._cut(places, bounds, sizes if is_whole else _ALONE)
                outcome.add([start + index * stride for index in range(count or 1)], parts)
        if outcome.request_count != len(sizes):
            raise ValueError(f"results of {outcome.request_count} requests where there are {len(sizes)}")
        return outcome

    def _cut(self, places: TensorPlaces, bounds: Bounds, sizes: tuple[int, ...]) -> Sequence[Part]:
        """Each request's part of a result of all together."""
        key = (places, sizes)
        parts = self._parts.get(key)
        if parts is None:
            parts = _cut(places.heads, bounds, sizes)
            if places.sizes is not None:
                self._remembered += len(sizes) * len(places.heads) + 1
                if self._remembered > _MOST_REMEMBERED:
                    self._parts.clear()
                    self._remembered = 0
                self._parts[key] = parts
        return parts


def _cut(heads: tuple[TensorHead, ...], bounds: Bounds, sizes: tuple[int, ...]) -> Sequence[Part]:
    """Raises: ValueError."""
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
    # Requests with as many rows share what tells of their parts.
    by_size = {size: tuple([head._replace(shape=(size, *head.shape[1:])) for head in heads]) for size in {*sizes}}
    return [(by_size[size], of_request) for size, of_request in zip(sizes, places, strict=True)]


def _text(view: memoryview, start: int, nbytes: int) -> bytes:
    """Bytes of a slot. Raises: ValueError."""
    if start + text_length(nbytes) > len(view):
        raise ValueError(f"a text of {nbytes} bytes at byte {start} of {len(view)}")
    return bytes(view[start : start + nbytes])


def _error(code: int, text: bytes) -> ServeError:
    return ServeError(status_code(code), text.decode(errors="replace")[:LONGEST_TEXT])
