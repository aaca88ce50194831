"""What becomes of a batch in a worker: checks what the worker says of its results, and cuts them into requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.plain import from_json
from rocserve.core.requests import LARGE_RESPONSE, NO_PARAMETERS, Parameters
from rocserve.core.tensors import Buffer, TensorHead, can_hold
from rocserve.plane.heap import HeapReader
from rocserve.workers.entries import LONGEST_TEXT_BYTES, ONCE, REMEMBERED_LAYOUTS, numbers
from rocserve.workers.messages import ResultLayout
from rocserve.workers.wire import status_code

Outputs = tuple[tuple[TensorHead, ...], Sequence[Buffer]]
"""What one request's part of a result is, and its bytes."""
Part = tuple[tuple[TensorHead, ...], Sequence[tuple[int, int]]]
"""What one request's part of a result is, and the first byte and the end of each of its outputs."""

OutputCuts = Mapping[str, Sequence[tuple[int, ...]]]
"""By output, the shape of each request's part, where that is not the request's rows."""

_MOST_REMEMBERED = 8192
"""Outputs of requests; a few hundred bytes each."""
_MOST_NUMBERS = 1 << 16
"""Of one result."""

NO_CUTS: OutputCuts = {}
_NO_PART: Part = ((), ())
_NOTHING = memoryview(b"")
_ALONE = (1,)
"""A request whose result is not cut."""


class BatchOutcome:
    """What became of a batch."""

    __slots__ = (
        "_open",
        "_parameters",
        "_parts",
        "_view",
        "compute_end_ns",
        "error",
        "failures",
        "input_end_ns",
        "is_large",
        "output_start_ns",
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
        self._view = view
        self.is_large = len(view) > LARGE_RESPONSE
        self.slot: object = None
        """See InferResponse."""
        self._open: set[int] | None = None
        self._parameters: dict[int, Parameters] | None = None
        self._parts: list[tuple[int, Part]] = []
        """By request: where the memory of its outputs begins, and where in it they lie."""

    def outputs_of(self, request_index: int) -> Outputs:
        """One request's rows of each output, as views on the worker's heap."""
        start, (heads, bounds) = self._parts[request_index]
        view = self._view
        return heads, [view[start + begin : start + end] for begin, end in bounds]

    def is_open(self, request_index: int) -> bool:
        """Whether the model answers the request, or has answered it, by responses of its own."""
        return self._open is not None and request_index in self._open

    def parameters_of(self, request_index: int) -> Parameters:
        """What the model says beside the outputs of its response to a request."""
        return NO_PARAMETERS if self._parameters is None else self._parameters.get(request_index, NO_PARAMETERS)

    def add(self, index: int, start: int, parts: Sequence[Part], layout: ResultLayout) -> None:
        """A result, of the requests from `index` on. Raises: ValueError."""
        if layout.parameters:
            if self._parameters is None:
                self._parameters = {}
            self._parameters[index] = layout.parameters
        self._parts += [(start, part) for part in parts]
        for failure in layout.failures:
            if not 0 <= failure.request_index < len(parts):
                raise ValueError(f"a failure of request {failure.request_index} of {len(parts)}")
            self.failures[index + failure.request_index] = ServeError(status_code(failure.code), failure.text)

    def add_open(self, index: int) -> None:
        if self._open is None:
            self._open = set()
        self._open.add(index)
        self._parts.append((0, _NO_PART))

    def add_failure(self, index: int, error: ServeError) -> None:
        self.failures[index] = error
        self._parts.append((0, _NO_PART))


class ResultReader:
    """Reads the results of one instance. Bounded memory of the layouts seen before.

    All that raises ValueError does so because the worker told what does not make sense.
    """

    def __init__(self, heap: HeapReader) -> None:
        self._heap = heap
        self._layouts: dict[int, ResultLayout] = {}
        self._parts: dict[tuple[int, bytes, tuple[int, ...]], tuple[int, Sequence[Part], ResultLayout]] = {}
        self._remembered = 0
        self._once: ResultLayout | None = None

    def define(self, flags: int, number: int, text: bytes) -> None:
        """A layout of that number. Raises: ValueError."""
        if flags & ONCE:
            self.define_once(text)
            return
        if len(self._layouts) >= 2 * REMEMBERED_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[number] = from_json(ResultLayout, text)

    def define_once(self, text: bytes) -> None:
        """The layout of the next result. Raises: ValueError."""
        self._once = from_json(ResultLayout, text)

    def text(self, place: int, nbytes: int) -> bytes:
        if nbytes > LONGEST_TEXT_BYTES:
            raise ValueError(f"a text of {nbytes} bytes, expected at most {LONGEST_TEXT_BYTES}")
        return bytes(self._heap.checked(place, nbytes))

    def read(
        self,
        view: memoryview,
        number: int,
        start: int,
        count: int,
        sizes: tuple[int, ...],
        cuts: OutputCuts | None = None,
    ) -> tuple[Sequence[Part], ResultLayout]:
        """For each request its part of a result, counted from `start`, and the result's layout.

        Args:
            view: the slot of the result, whose numbers begin at its byte `start`.
            sizes: of the requests that it is of, in rows.
            cuts: where outputs are cut otherwise than by rows.
        """
        once, self._once = self._once, None
        table = bytes(view[start : start + 8 * count])
        key = (number, table, sizes)
        known = self._parts.get(key) if once is None and cuts is None else None
        if known is None:
            layout = once or self._layouts.get(number)
            if layout is None:
                raise ValueError(f"a result of layout {number}, which it has not told")
            if count > _MOST_NUMBERS or len(table) != 8 * count:
                raise ValueError(f"a result with {count} numbers in {len(view) - start} bytes")
            known = (*_cut(layout, numbers(count).unpack(table), sizes, cuts or NO_CUTS), layout)
            if once is None and cuts is None:
                self._remembered += len(sizes) * len(layout.outputs) + 1
                if self._remembered > _MOST_REMEMBERED:
                    self._parts.clear()
                    self._remembered = 0
                self._parts[key] = known
        end, parts, layout = known
        if start + end > len(view):
            raise ValueError(f"a result of {end} bytes at byte {start} of {len(view)}")
        return parts, layout

    def read_at(self, place: int, number: int, count: int) -> tuple[Outputs, ResultLayout]:
        """A single result in a slot of its own, and its layout."""
        if count > _MOST_NUMBERS:
            raise ValueError(f"a result with {count} numbers")
        table = numbers(count).unpack(self._heap.checked(place, 8 * count))
        end = max(8 * count, *[start + nbytes for start, nbytes in zip(table[0::2], table[1::2], strict=True)])
        view = self._heap.checked(place, end)
        ((heads, bounds),), layout = self.read(view, number, 0, count, _ALONE)
        return (heads, [view[begin:end] for begin, end in bounds]), layout


def _cut(
    layout: ResultLayout, numbers: Sequence[int], request_sizes: tuple[int, ...], cuts: OutputCuts
) -> tuple[int, Sequence[Part]]:
    """Where a result ends, and each request's part."""
    heads: list[list[TensorHead]] = [[] for _ in request_sizes]
    places: list[list[tuple[int, int]]] = [[] for _ in request_sizes]
    position, end, total = 2 * len(layout.outputs), 8 * len(numbers), 0
    if position > len(numbers):
        raise ValueError(f"{len(numbers)} numbers for {len(layout.outputs)} outputs")
    for index, head in enumerate(layout.outputs):
        offset, nbytes = numbers[2 * index : 2 * index + 2]
        if not can_hold(head.datatype, head.shape, nbytes):
            raise ValueError(f"output '{head.name}' of shape {list(head.shape)} has {nbytes} bytes")
        end, total = max(end, offset + nbytes), total + nbytes
        shapes: Sequence[tuple[int, ...]] = (head.shape,)
        bounds: Sequence[int] = (0, nbytes)
        if head.name in cuts:
            shapes = cuts[head.name]
            bounds = _part_bounds(head, shapes, nbytes)
        elif len(request_sizes) > 1:
            if head.datatype is DataType.BYTES:
                bounds = numbers[position : position + len(request_sizes) + 1]
                position += len(bounds)
            else:
                bounds = _row_bounds(head, request_sizes)
            _check_bounds(head, bounds, nbytes, request_sizes)
            shapes = [(size, *head.shape[1:]) for size in request_sizes]
        for request, (shape, (begin, finish)) in enumerate(zip(shapes, itertools.pairwise(bounds), strict=True)):
            heads[request].append(TensorHead(head.name, head.datatype, shape))
            places[request].append((offset + begin, offset + finish))
    if total > end:
        raise ValueError(f"outputs of {total} bytes in {end} bytes of memory")
    shared: dict[tuple[TensorHead, ...], tuple[TensorHead, ...]] = {}
    told = [shared.setdefault(each, each) for each in map(tuple, heads)]
    return end, list(zip(told, places, strict=True))


def _part_bounds(head: TensorHead, shapes: Sequence[tuple[int, ...]], nbytes: int) -> list[int]:
    """Where parts of these shapes lie, one behind the other."""
    ends = [count * head.datatype.itemsize for count in itertools.accumulate(map(math.prod, shapes))]
    if ends[-1] != nbytes:
        raise ValueError(f"output '{head.name}' of {nbytes} bytes is to be cut into {ends[-1]}")
    return [0, *ends]


def _row_bounds(head: TensorHead, request_sizes: tuple[int, ...]) -> list[int]:
    row = math.prod(head.shape[1:]) * head.datatype.itemsize
    bounds = [0]
    for size in request_sizes:
        bounds.append(bounds[-1] + size * row)
    return bounds


def _check_bounds(head: TensorHead, bounds: Sequence[int], nbytes: int, request_sizes: tuple[int, ...]) -> None:
    rows = sum(request_sizes)
    if not head.shape or head.shape[0] != rows:
        raise ValueError(f"output '{head.name}' has the shape {list(head.shape)} for a batch of {rows} rows")
    rising = all(first <= second for first, second in itertools.pairwise(bounds))
    if len(bounds) != len(request_sizes) + 1 or bounds[0] != 0 or bounds[-1] != nbytes or not rising:
        raise ValueError(f"output '{head.name}' of {nbytes} bytes is cut at {list(bounds)}")
