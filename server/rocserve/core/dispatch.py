"""Gives requests to the versions that they name, after copying inputs and counting BYTES elements. Requests that a
traced request causes (steps of an ensemble, calls by a model) get a child trace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import Answer, InferRequest, InferResponse
from rocserve.core.sequences import SequenceOrder
from rocserve.core.serving import ForwardingResponder, Responder, ServingTableHolder
from rocserve.core.steps import Steps
from rocserve.core.tensors import COUNTED_AT_ONCE, Tensor, count_elements
from rocserve.core.trace import REQUEST_END, TENSOR_BACKEND_OUTPUT, TENSOR_QUEUE_INPUT, Trace

_COUNTED_APART = 4 * COUNTED_AT_ONCE
"""Bytes. A BYTES input up to this size has at most COUNTED_AT_ONCE elements, so validation counts them in one step."""


@dataclass(eq=False)
class Dispatcher:
    """Gives requests to versions. The same thread, the data plane's, closes versions: none closes after its look-up."""

    tables: ServingTableHolder
    work_off: Callable[[Steps[None]], object]
    """Runs the steps of long work on the data plane's thread, between other requests."""
    _order: SequenceOrder = field(default_factory=SequenceOrder, init=False)
    """Delays the requests of a sequence while an earlier request of it is being prepared."""

    def dispatch(self, request: InferRequest, responder: Responder, copying: Sequence[Steps[None]] = ()) -> None:
        """Schedule a request; all errors go to the responder. First `copying` copies its inputs, and BYTES elements are
        counted if there may be many, in steps between other work. Requests of a sequence stay in order."""
        head = request.head
        if not (copying or head.has_strings or self._order.held):
            # The same as _hand_over, but without the call, because every request comes through here.
            table = self.tables.table
            try:
                (table.by_head.get(head) or table.find_by_head(head)).infer(request, responder)
            except ServeError as error:
                responder.send(error)
            return
        if self._order.held and self._order.wait_if_held(request, partial(self.dispatch, request, responder, copying)):
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
            self.tables.table.find_by_head(request.head).infer(request, responder)
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
    """Dispatch a request that another request caused, with a child of the trace `parent`, if there is one."""
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
    """Record a request's inputs in its trace. They need not be validated yet: unknown datatypes are left out."""
    if trace.wants_tensors:
        known = {datatype.value: datatype for datatype in DataType}
        tensors = [
            Tensor(head.name, known[head.datatype], head.shape, data)
            for head, data in zip(request.head.inputs, request.data, strict=False)
            if head.datatype in known
        ]
        trace.note_tensors(TENSOR_QUEUE_INPUT, tensors)


class TracedResponder(ForwardingResponder):
    """Forwards answers and ends the trace of a request that another request caused."""

    __slots__ = ("_trace",)

    def __init__(self, responder: Responder, trace: Trace) -> None:
        super().__init__(responder)
        self._trace = trace

    def send(self, answer: Answer, final: bool = True) -> None:
        if self._trace.wants_tensors and isinstance(answer, InferResponse):
            self._trace.note_tensors(TENSOR_BACKEND_OUTPUT, answer.outputs)
        # The trace must end before the answer is sent: the answer may end the whole group of traces.
        if final:
            self._trace.note(REQUEST_END, time.monotonic_ns())
            self._trace.end()
        self._responder.send(answer, final)
