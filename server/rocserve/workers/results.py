"""What becomes of a batch in a worker: checks what the worker says of its results, and cuts them into requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.plain import from_json
from rocserve.core.requests import LARGE_RESPONSE, Parameters
from rocserve.core.tensor_places import aligned
from rocserve.core.tensors import Buffer, TensorHead, can_hold
from rocserve.plane.heap import HeapReader
from rocserve.plane.link import ENTRY_BYTES
from rocserve.workers.entries import (
    ENTRY,
    ERROR,
    LONGEST_TEXT_BYTES,
    ONCE,
    OPEN,
    REMEMBERED_LAYOUTS,
    RESULT,
    RESULT_LAYOUT,
    numbers,
)
from rocserve.workers.messages import ResultLayout
from rocserve.workers.wire import LONGEST_TEXT, status_code

Outputs = tuple[tuple[TensorHead, ...], Sequence[Buffer]]
"""What one request's part of a result is, and its bytes."""
Part = tuple[tuple[TensorHead, ...], Sequence[slice]]
"""What one request's part of a result is, and where each of its outputs lies, counted from the result's first byte."""

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

_Known = tuple[int, Sequence[Part], ResultLayout]
"""Where a result ends, each request's part, and its layout."""


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

    def add(self, starts: Sequence[int], parts: Sequence[Part], layout: ResultLayout) -> None:
        """Results that begin there, each of as many requests as there are parts, one behind the other.

        Raises:
            ValueError: there is no such request as one that failed.
        """
        index = len(self._parts)
        if layout.parameters:
            self.parameters[index] = layout.parameters
        self._parts += [(start, part) for start in starts for part in parts]
        for failure in layout.failures:
            if not 0 <= failure.request_index < len(parts):
                raise ValueError(f"a failure of request {failure.request_index} of {len(parts)}")
            self.failures[index + failure.request_index] = ServeError(status_code(failure.code), failure.text)

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
    """Reads the results of one instance. Bounded memory of the layouts seen before.

    All that raises ValueError does so because the worker told what does not make sense.
    """

    def __init__(self, heap: HeapReader) -> None:
        self._heap = heap
        self._layouts: dict[int, ResultLayout] = {}
        self._known: dict[tuple[int, bytes, tuple[int, ...]], _Known] = {}
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
        """Of a slot of its own. Raises: ValueError."""
        if nbytes > LONGEST_TEXT_BYTES:
            raise ValueError(f"a text of {nbytes} bytes, expected at most {LONGEST_TEXT_BYTES}")
        return bytes(self._heap.checked(place, nbytes))

    def error(self, code: int, place: int, nbytes: int) -> ServeError:
        """Whose text has a slot of its own. Raises: ValueError."""
        return _error(code, self.text(place, nbytes))

    def read_batch(
        self,
        place: int,
        nbytes: int,
        entries: int,
        times: tuple[int, int, int],
        sizes: tuple[int, ...],
        cuts: OutputCuts | None,
        each: bool,
        sees_requests: bool,
    ) -> BatchOutcome:
        """The results of a batch.

        Args:
            place: of their slot of so many bytes, at whose beginning is a table of so many entries.
            times: see BatchOutcome.
            sizes: of the batch's requests, in rows.
            cuts: where outputs are cut otherwise than by rows.
            each: there are results of each request, else there is one of all.
            sees_requests: the model sees each request for itself, so that it may keep one open.
        """
        if not 0 < entries * ENTRY_BYTES <= nbytes:
            raise ValueError(f"results in {entries} entries of {nbytes} bytes")
        view = self._heap.checked(place, nbytes)
        outcome = BatchOutcome(None, times, view)
        for kind, flags, code, number, a, b, c in ENTRY.iter_unpack(view[: entries * ENTRY_BYTES]):
            if kind == RESULT_LAYOUT:
                self.define_once(_part(view, a, b))
                continue
            count = a if each else len(sizes)
            may_be = not flags & (OPEN | ERROR) or (each and (sees_requests or not flags & OPEN))
            if kind != RESULT or not 0 < count <= len(sizes) - outcome.request_count or not may_be:
                raise ValueError(f"a message of kind {kind} among the results of {len(sizes)} requests")
            if flags & OPEN:
                outcome.add_open(count)
            elif flags & ERROR:
                outcome.add_failure(_error(code, _part(view, b, c)))
            else:
                end, parts, layout = self.read(view, number, b, c, _ALONE if each else sizes, cuts)
                stride = aligned(end)
                starts = [b + index * stride for index in range(count if each else 1)]
                if starts[-1] + end > len(view):
                    raise ValueError(f"a result of {end} bytes at byte {starts[-1]} of {len(view)}")
                outcome.add(starts, parts, layout)
        if outcome.request_count != len(sizes):
            raise ValueError(f"results of {outcome.request_count} requests where there are {len(sizes)}")
        return outcome

    def read(
        self,
        view: memoryview,
        number: int,
        start: int,
        count: int,
        sizes: tuple[int, ...],
        cuts: OutputCuts | None = None,
    ) -> _Known:
        """Where a result ends and each request's part of it, counted from `start`, and its layout.

        Args:
            view: the slot of the result, whose numbers begin at its byte `start`.
            sizes: of the requests that it is of, in rows.
            cuts: where outputs are cut otherwise than by rows.
        """
        once, self._once = self._once, None
        table = bytes(view[start : start + 8 * count])
        key = (number, table, sizes)
        known = self._known.get(key) if once is None and cuts is None else None
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
                    self._known.clear()
                    self._remembered = 0
                self._known[key] = known
        if start + known[0] > len(view):
            raise ValueError(f"a result of {known[0]} bytes at byte {start} of {len(view)}")
        return known

    def read_at(self, place: int, number: int, count: int) -> tuple[Outputs, ResultLayout]:
        """A single result in a slot of its own, and its layout."""
        if count > _MOST_NUMBERS:
            raise ValueError(f"a result with {count} numbers")
        table = numbers(count).unpack(self._heap.checked(place, 8 * count))
        end = max(8 * count, *[start + nbytes for start, nbytes in zip(table[0::2], table[1::2], strict=True)])
        view = self._heap.checked(place, end)
        _, ((heads, slices),), layout = self.read(view, number, 0, count, _ALONE)
        return (heads, [view[each] for each in slices]), layout


def _cut(
    layout: ResultLayout, numbers: Sequence[int], request_sizes: tuple[int, ...], cuts: OutputCuts
) -> tuple[int, Sequence[Part]]:
    """Where a result ends, and each request's part."""
    heads: list[list[TensorHead]] = [[] for _ in request_sizes]
    places: list[list[slice]] = [[] for _ in request_sizes]
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
            places[request].append(slice(offset + begin, offset + finish))
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


def _part(view: memoryview, start: int, nbytes: int) -> bytes:
    """Bytes of a slot. Raises: ValueError."""
    if nbytes > LONGEST_TEXT_BYTES or start + nbytes > len(view):
        raise ValueError(f"a text of {nbytes} bytes at byte {start} of {len(view)}")
    return bytes(view[start : start + nbytes])


def _error(code: int, text: bytes) -> ServeError:
    return ServeError(status_code(code), text.decode(errors="replace")[:LONGEST_TEXT])
