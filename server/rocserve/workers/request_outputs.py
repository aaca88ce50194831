"""The server's side of what became of a batch's requests, each for itself: checking what a worker says of them."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.core.errors import ServeError
from rocserve.core.requests import Parameters
from rocserve.workers.batch_outputs import OutputCuts, OutputLayout, OutputSlice, check_size, check_total
from rocserve.workers.messages import RequestResults
from rocserve.workers.wire import REMEMBERED, LayoutReader, status_code, unpack_tail


class RequestOutputLayouts:
    """Reads the tails of the EXECUTED messages of a model that sees single requests; as OutputLayouts does."""

    def __init__(self) -> None:
        self._reader = LayoutReader(RequestResults)
        self._layouts: dict[bytes, OutputLayout] = {}

    def of(self, tail: bytes, request_sizes: tuple[int, ...], cuts: OutputCuts | None = None) -> OutputLayout:
        """The layout that a tail tells, for a batch of these requests; such a model cuts its outputs itself.

        Raises:
            ValueError: the tail does not make sense.
        """
        layout = self._layouts.get(tail)
        if layout is None:
            numbers, body = unpack_tail(tail)
            layout = _layout(self._reader.read(body), numbers)
            if len(self._layouts) >= REMEMBERED:
                self._layouts.clear()
            self._layouts[tail] = layout
        if len(layout.slices) != len(request_sizes):
            raise ValueError(f"the results of {len(layout.slices)} requests for {len(request_sizes)}")
        return layout


def _layout(results: RequestResults, numbers: Sequence[int]) -> OutputLayout:
    slices: list[list[OutputSlice]] = []
    failures: dict[int, ServeError] = {}
    parameters: dict[int, Parameters] = {}
    open_requests: set[int] = set()
    position = end = total = 0
    for index, result in enumerate(results.requests):
        parts: list[OutputSlice] = []
        for head in result.outputs:
            if position + 2 > len(numbers):
                raise ValueError(f"{len(numbers)} numbers for more than {position // 2} outputs")
            offset, nbytes = numbers[position : position + 2]
            position += 2
            check_size(head, nbytes)
            end, total = max(end, offset + nbytes), total + nbytes
            parts.append((head.name, head.datatype, head.shape, offset, offset + nbytes))
        slices.append(parts)
        if result.code:
            failures[index] = ServeError(status_code(result.code), result.text)
        if result.is_open:
            open_requests.add(index)
        if result.parameters:
            parameters[index] = result.parameters
    check_total(total, end)
    return OutputLayout(slices, end, failures, frozenset(open_requests), parameters)
