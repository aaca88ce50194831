"""Finds the versions that serve requests and hands the requests over, once all that takes long is done; those that a
traced request makes (steps of an ensemble, calls by a model) with a trace below its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import Answer, InferRequest, InferResponse
from rocserve.core.sequence_order import SequenceOrder
from rocserve.core.serving import ForwardingResponder, Responder, ServingTableHolder
from rocserve.core.steps import Steps
from rocserve.core.tensors import COUNTED_AT_ONCE, Tensor, count_elements
from rocserve.core.trace import REQUEST_END, TENSOR_BACKEND_OUTPUT, TENSOR_QUEUE_INPUT, Trace

_COUNTED_APART = 4 * COUNTED_AT_ONCE
"""Bytes of an input: fewer have no more elements than are counted in a step."""


@dataclass(eq=False)
class Dispatcher:
    """On the data plane's thread, where versions are closed as well: none can end between look-up and request."""

    tables: ServingTableHolder
    work_off: Callable[[Steps[None]], object]
    """Takes the steps of what takes long."""
    _order: SequenceOrder = field(default_factory=SequenceOrder, init=False)
    """Of requests that come behind one that is being prepared."""

    def dispatch(self, request: InferRequest, responder: Responder, copying: Sequence[Steps[None]] = ()) -> None:
        """Schedule a request with the version that it names; every error goes to the responder. What copies its inputs,
        and the count of the elements of BYTES where there may be many, go before, a step a turn; a sequence keeps its
        order meanwhile."""
        head = request.head
        if not (copying or head.has_strings or self._order.held):
            # As `_hand_over`, without a call: every request comes by.
            table = self.tables.table
            try:
                (table.by_head.get(head) or table.named_by(head)).infer(request, responder)
            except ServeError as error:
                responder.send(error)
            return
        if self._order.held and self._order.waits(request, partial(self.dispatch, request, responder, copying)):
            return
        if copying or any(
            entry.datatype == DataType.BYTES.value and len(data) > _COUNTED_APART
            for entry, data in zip(head.inputs, request.data, strict=True)
        ):
            self._order.hold(request)
            self.work_off(self._prepare(request, responder, copying))
        else:
            self._hand_over(request, responder)

    def _hand_over(self, request: InferRequest, responder: Responder) -> None:
        try:
            self.tables.table.named_by(request.head).infer(request, responder)
        except ServeError as error:
            responder.send(error)

    def _prepare(self, request: InferRequest, responder: Responder, copying: Sequence[Steps[None]]) -> Steps[None]:
        try:
            for steps in copying:
                yield from steps
        except ServeError as error:
            responder.send(error)
        else:
            if request.head.has_strings:
                faults: list[str] = []
                for entry, data in zip(request.head.inputs, request.data, strict=True):
                    is_counted = entry.datatype == DataType.BYTES.value
                    faults.append((yield from count_elements(data, math.prod(entry.shape))) if is_counted else "")
                request.element_faults = faults
            self._hand_over(request, responder)
        self._order.release(request)


def dispatch_traced(dispatcher: Dispatcher, request: InferRequest, responder: Responder, parent: Trace | None) -> None:
    """As its `dispatch`, with a trace of its own below that of the request that made it, where this one has one."""
    if parent is None:
        dispatcher.dispatch(request, responder)
        return
    head = request.head
    try:
        version = dispatcher.tables.table.find(head.model_name, head.model_version)
    except ServeError as error:
        responder.send(error)
        return
    trace = request.trace = parent.child(version.name, str(version.version), request.id)
    note_inputs(trace, request)
    dispatcher.dispatch(request, TracedResponder(responder, trace))


def note_inputs(trace: Trace, request: InferRequest) -> None:
    """The tensors that come with a request, where they are wanted. They need not have been checked: what says to be of
    a datatype that there is not is left out."""
    if trace.wants_tensors:
        known = {datatype.value: datatype for datatype in DataType}
        tensors = [
            Tensor(head.name, known[head.datatype], head.shape, data)
            for head, data in zip(request.head.inputs, request.data, strict=False)
            if head.datatype in known
        ]
        trace.note_tensors(TENSOR_QUEUE_INPUT, tensors)


class TracedResponder(ForwardingResponder):
    """Ends the trace of a request that another one made, and forwards its answers."""

    __slots__ = ("_trace",)

    def __init__(self, responder: Responder, trace: Trace) -> None:
        super().__init__(responder)
        self._trace = trace

    def send(self, answer: Answer, final: bool = True) -> None:
        if self._trace.wants_tensors and isinstance(answer, InferResponse):
            self._trace.note_tensors(TENSOR_BACKEND_OUTPUT, answer.outputs)
        # Before the answer goes on: it may end the whole, and this trace is part of it.
        if final:
            self._trace.note(REQUEST_END, time.monotonic_ns())
            self._trace.end()
        self._responder.send(answer, final)
