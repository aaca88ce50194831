"""Finds the versions that serve requests and hands the requests over, once all that takes long is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId
from rocserve.core.serving import Responder, ServingTableHolder
from rocserve.core.tensors import COUNTED_AT_ONCE, count_elements

_COUNTED_APART = 4 * COUNTED_AT_ONCE
"""Bytes of an input: fewer have no more elements than are counted in a step."""

Steps = Iterator[None]
_Unprepared = tuple[InferRequest, Responder, Sequence[Steps]]


class Dispatcher:
    """On the data plane's thread, where versions are closed as well: none can end between look-up and request."""

    def __init__(self, tables: ServingTableHolder, work_off: Callable[[Steps], object]) -> None:
        """`work_off`: takes the steps of what takes long."""
        self.tables = tables
        self.work_off = work_off
        self._unprepared: dict[tuple[str, SequenceId] | None, list[_Unprepared]] = {}
        """By sequences of which a request is being prepared, those that have come behind it."""

    def dispatch(self, request: InferRequest, responder: Responder, copying: Sequence[Steps] = ()) -> None:
        """Schedule a request with the version that it names; every error goes to the responder.

        What copies its inputs, and the count of the elements of BYTES where there may be many, go before, a step a
        turn; a sequence keeps its order meanwhile.
        """
        head = request.head
        if not (copying or head.has_strings or self._unprepared):
            # As `_hand_over`, without a call: every request comes by.
            table = self.tables.table
            try:
                (table.by_head.get(head) or table.named_by(head)).infer(request, responder)
            except ServeError as error:
                responder.send(error)
            return
        sequence = request.sequence
        key = None if sequence is None else (request.head.model_name, sequence.id)
        if key in self._unprepared:
            self._unprepared[key].append((request, responder, copying))
        elif copying or _has_many_strings(request):
            if key is not None:
                self._unprepared[key] = []
            self.work_off(self._prepare(request, responder, copying, key))
        else:
            self._hand_over(request, responder)

    def _hand_over(self, request: InferRequest, responder: Responder) -> None:
        try:
            self.tables.table.named_by(request.head).infer(request, responder)
        except ServeError as error:
            responder.send(error)

    def _prepare(
        self,
        request: InferRequest,
        responder: Responder,
        copying: Sequence[Steps],
        key: tuple[str, SequenceId] | None,
    ) -> Generator[None, None, None]:
        try:
            for steps in copying:
                yield from steps
        except ServeError as error:
            responder.send(error)
        else:
            if request.head.has_strings:
                request.element_faults = yield from _count(request)
            self._hand_over(request, responder)
        if key is not None:
            for behind in self._unprepared.pop(key):
                self.dispatch(*behind)


def _count(request: InferRequest) -> Generator[None, None, list[str]]:
    """What is wrong with the elements of each input."""
    faults: list[str] = []
    for entry, data in zip(request.head.inputs, request.data, strict=True):
        is_counted = entry.datatype == DataType.BYTES.value
        faults.append((yield from count_elements(data, math.prod(entry.shape))) if is_counted else "")
    return faults


def _has_many_strings(request: InferRequest) -> bool:
    return any(
        entry.datatype == DataType.BYTES.value and len(data) > _COUNTED_APART
        for entry, data in zip(request.head.inputs, request.data, strict=True)
    )
