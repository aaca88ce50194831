"""The server's side of a batch's outputs: checking what a worker says of them, and cutting them into requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import Parameters
from rocserve.core.tensors import can_hold
from rocserve.workers.messages import ResultLayout, TensorHead
from rocserve.workers.wire import LayoutReader, status_code, unpack_tail

OutputSlice = tuple[str, DataType, tuple[int, ...], int, int]
"""Name, datatype, shape, first byte and end of one request's part of an output."""

OutputCuts = Mapping[str, Sequence[tuple[int, ...]]]
"""By output, the shape of each request's part, where that is not the request's rows."""

_REMEMBERED_SLICES = 8192
"""A few hundred bytes each."""

NO_CUTS: OutputCuts = {}
NO_FAILURES: Mapping[int, ServeError] = {}
NONE_OPEN: frozenset[int] = frozenset()
NO_RESPONSE_PARAMETERS: Mapping[int, Parameters] = {}


class OutputLayout:
    """Where the outputs of a batch lie and which part of them is whose; checked."""

    __slots__ = ("end", "failures", "open_requests", "parameters", "slices")

    def __init__(
        self,
        slices: Sequence[Sequence[OutputSlice]],
        end: int,
        failures: Mapping[int, ServeError] = NO_FAILURES,
        open_requests: frozenset[int] = NONE_OPEN,
        parameters: Mapping[int, Parameters] = NO_RESPONSE_PARAMETERS,
    ) -> None:
        self.slices = slices
        """By request."""
        self.end = end
        """Of the last output, in bytes from the start of the output memory."""
        self.failures = failures
        self.open_requests = open_requests
        """Those that are answered over the conversation."""
        self.parameters = parameters
        """Of the responses that have any, by request."""


class OutputLayouts:
    """Reads the tails of a channel's EXECUTED messages. Bounded memory of those seen before."""

    def __init__(self) -> None:
        self._reader = LayoutReader(ResultLayout)
        self._layouts: dict[tuple[bytes, tuple[int, ...]], OutputLayout] = {}
        self._remembered = 0
        """Slices of all of them."""

    def of(self, tail: bytes, request_sizes: tuple[int, ...], cuts: OutputCuts | None = None) -> OutputLayout:
        """The layout that a tail tells, for a batch of these requests.

        Raises:
            ValueError: the tail does not make sense.
        """
        if cuts is not None:
            return self._cut(tail, request_sizes, cuts)
        key = (tail, request_sizes)
        layout = self._layouts.get(key)
        if layout is None:
            numbers, body = unpack_tail(tail)
            result = self._reader.read(body)
            layout = _layout(result, numbers, request_sizes)
            if not layout.failures and all(head.datatype is not DataType.BYTES for head in result.outputs):
                self._remembered += len(request_sizes) * len(result.outputs)
                if self._remembered > _REMEMBERED_SLICES:
                    self._layouts.clear()
                    self._remembered = 0
                self._layouts[key] = layout
        return layout

    def _cut(self, tail: bytes, request_sizes: tuple[int, ...], cuts: OutputCuts) -> OutputLayout:
        numbers, body = unpack_tail(tail)
        return _layout(self._reader.read(body), numbers, request_sizes, cuts)


def _layout(
    result: ResultLayout, numbers: Sequence[int], request_sizes: tuple[int, ...], cuts: OutputCuts = NO_CUTS
) -> OutputLayout:
    slices: list[list[OutputSlice]] = [[] for _ in request_sizes]
    position, end, total = 2 * len(result.outputs), 0, 0
    if position > len(numbers):
        raise ValueError(f"{len(numbers)} numbers for {len(result.outputs)} outputs")
    for index, head in enumerate(result.outputs):
        offset, nbytes = numbers[2 * index : 2 * index + 2]
        end, total = max(end, offset + nbytes), total + nbytes
        check_size(head, nbytes)
        if head.name in cuts:
            shapes = cuts[head.name]
            for part, shape, (begin, finish) in zip(slices, shapes, _part_bounds(head, shapes, nbytes), strict=True):
                part.append((head.name, head.datatype, shape, offset + begin, offset + finish))
            continue
        if len(request_sizes) == 1:
            slices[0].append((head.name, head.datatype, head.shape, offset, offset + nbytes))
            continue
        if head.datatype is DataType.BYTES:
            bounds = numbers[position : position + len(request_sizes) + 1]
            position += len(bounds)
        else:
            bounds = _row_bounds(head, request_sizes)
        _check_bounds(head, bounds, nbytes, request_sizes)
        for request, size in enumerate(request_sizes):
            shape = (size, *head.shape[1:])
            begin, finish = bounds[request : request + 2]
            slices[request].append((head.name, head.datatype, shape, offset + begin, offset + finish))
    check_total(total, end)
    failures = {
        failure.request_index: ServeError(status_code(failure.code), failure.text) for failure in result.failures
    }
    if any(not 0 <= index < len(request_sizes) for index in failures):
        raise ValueError(f"a failure of request {max(failures)} of {len(request_sizes)}")
    return OutputLayout(slices, end, failures)


def _part_bounds(head: TensorHead, shapes: Sequence[tuple[int, ...]], nbytes: int) -> Sequence[tuple[int, int]]:
    """Where parts of these shapes lie, one behind the other."""
    ends = [count * head.datatype.itemsize for count in itertools.accumulate(map(math.prod, shapes))]
    if ends[-1] != nbytes:
        raise ValueError(f"output '{head.name}' of {nbytes} bytes is to be cut into {ends[-1]}")
    return list(itertools.pairwise((0, *ends)))


def _row_bounds(head: TensorHead, request_sizes: tuple[int, ...]) -> list[int]:
    row = math.prod(head.shape[1:]) * head.datatype.itemsize
    bounds = [0]
    for size in request_sizes:
        bounds.append(bounds[-1] + size * row)
    return bounds


def check_size(head: TensorHead, nbytes: int) -> None:
    """Raises: ValueError: no tensor of this shape has so many bytes."""
    if not can_hold(head.datatype, head.shape, nbytes):
        raise ValueError(f"output '{head.name}' of shape {list(head.shape)} has {nbytes} bytes")


def check_total(total: int, end: int) -> None:
    """Raises: ValueError: outputs lie upon each other, by which a little memory would become a large response."""
    if total > end:
        raise ValueError(f"outputs of {total} bytes in {end} bytes of memory")


def _check_bounds(head: TensorHead, bounds: Sequence[int], nbytes: int, request_sizes: tuple[int, ...]) -> None:
    rows = sum(request_sizes)
    if not head.shape or head.shape[0] != rows:
        raise ValueError(f"output '{head.name}' has the shape {list(head.shape)} for a batch of {rows} rows")
    rising = all(first <= second for first, second in itertools.pairwise(bounds))
    if len(bounds) != len(request_sizes) + 1 or bounds[0] != 0 or bounds[-1] != nbytes or not rising:
        raise ValueError(f"output '{head.name}' of {nbytes} bytes is cut at {list(bounds)}")
