"""Dispatches requests to the versions that they name, after copying inputs and counting BYTES elements. Requests that a
traced request causes (steps of an ensemble, calls by a model) get a child trace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rocserve.core.datatypes import DATATYPES, DataType
from rocserve.core.errors import ServeError
from rocserve.core.exchange import EndHook, Exchange, HookOrder, Responder, ResponseHook
from rocserve.core.requests import InferRequest
from rocserve.core.responses import InferResponse
from rocserve.core.sequences import SequenceOrder
from rocserve.core.serving import ServedVersion, ServingTable, ServingTableHolder
from rocserve.core.steps import Steps
from rocserve.core.tensors import COUNTED_AT_ONCE, Tensor, count_elements
from rocserve.core.timing import RequestTiming
from rocserve.core.trace import Trace

_COUNTED_APART = 4 * COUNTED_AT_ONCE
"""Bytes. A BYTES input up to this size has at most COUNTED_AT_ONCE elements, so validation counts them in one step."""


@dataclass(eq=False)
class Dispatcher:
    """Dispatches requests to versions. The data plane's thread also closes versions, so none closes after its
    look-up."""

    tables: ServingTableHolder
    work_off: Callable[[Steps[None]], object]
    """Runs the steps of long work on the data plane's thread, between other requests."""
    _order: SequenceOrder = field(default_factory=SequenceOrder)
    """Delays the requests of a sequence while an earlier request of it is being prepared."""

    @property
    def table(self) -> ServingTable:
        return self.tables.table

    def dispatch(
        self, request: InferRequest, exchange: Exchange, copying: Sequence[Steps[None]] = (), is_prepared: bool = False
    ) -> None:
        """Schedule a request; errors go to the exchange. First `copying` copies its inputs, and many BYTES elements are
        counted, in steps between other work, unless `is_prepared`. Requests of a sequence stay in order."""
        head = request.head
        if head.wants_timing and request.timing is None:
            begin_timing(request, exchange)
        if (
            (copying or head.has_strings or self._order.held)
            and not is_prepared
            and self._is_delayed(request, exchange, copying)
        ):
            return
        try:
            version: ServedVersion | None = request.member
            if version is None or version.is_cold:
                table = self.tables.table
                version = table.by_head.get(head) or table.find_by_head(head)
            if request.timing is not None:
                request.timing.note_version(version.version, version.load_check, version.config.is_ensemble)
            version.infer(request, exchange)
        except ServeError as error:
            exchange.send(error)

    def _is_delayed(self, request: InferRequest, exchange: Exchange, copying: Sequence[Steps[None]]) -> bool:
        """Prepare a request, or let it wait for an earlier one of its sequence. Returns False if it needs neither."""
        if self._order.held and self._order.wait_if_held(
            request.sequence_key, partial(self.dispatch, request, exchange, copying)
        ):
            return True
        if not copying and not _has_long_strings(request):
            return False
        self._order.hold(request.sequence_key)
        self.work_off(self._prepare(request, exchange, copying))
        return True

    def _prepare(self, request: InferRequest, exchange: Exchange, copying: Sequence[Steps[None]]) -> Steps[None]:
        try:
            for steps in copying:
                yield from steps
        except ServeError as error:
            exchange.send(error)
        else:
            if request.head.has_strings:
                faults: list[str] = []
                for entry, data in zip(request.head.inputs, request.data, strict=True):
                    is_counted = entry.datatype == DataType.BYTES.value
                    faults.append((yield from count_elements(data, math.prod(entry.shape))) if is_counted else "")
                request.element_faults = faults
            self.dispatch(request, exchange, is_prepared=True)
        self._order.release(request.sequence_key)


def _has_long_strings(request: InferRequest) -> bool:
    # Not any(), because every image and every text comes here.
    for entry, data in zip(request.head.inputs, request.data, strict=True):
        if len(data) > _COUNTED_APART and entry.datatype == DataType.BYTES.value:
            return True
    return False


def dispatch_caused(dispatcher: Dispatcher, request: InferRequest, client: Responder, parent: Trace | None) -> None:
    """Dispatch a request that another request caused, with a child of the trace `parent`, if there is one."""
    exchange = Exchange(client)
    if parent is not None:
        head = request.head
        try:
            version: ServedVersion = request.member or dispatcher.table.find(head.model_name, head.model_version)
        except ServeError as error:
            exchange.send(error)
            return
        trace = request.trace = parent.child(version.name, str(version.version), request.id)
        note_inputs(trace, request, exchange)
        exchange.add(EndHook(HookOrder.TRACE, partial(_end_trace, trace)))
    dispatcher.dispatch(request, exchange)


def note_inputs(trace: Trace, request: InferRequest, exchange: Exchange) -> None:
    """Record a request's inputs in its trace, and later the outputs, if the trace wants tensors. The inputs need not be
    validated yet: unknown datatypes are left out."""
    if trace.wants_tensors:
        tensors = [
            Tensor(head.name, DATATYPES[head.datatype], head.shape, data)
            for head, data in zip(request.head.inputs, request.data, strict=False)
            if head.datatype in DATATYPES
        ]
        trace.note_tensors("TENSOR_QUEUE_INPUT", tensors)
        exchange.add(ResponseHook(HookOrder.TENSORS, partial(_note_outputs, trace)))


def _note_outputs(trace: Trace, response: InferResponse) -> InferResponse:
    trace.note_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
    return response


def _end_trace(trace: Trace) -> None:
    # Before the answer is sent, because the answer may end the whole group of traces.
    trace.note("REQUEST_END", time.monotonic_ns())
    trace.end()


def begin_timing(request: InferRequest, exchange: Exchange) -> None:
    """Time a request, and send its client the times with each response."""
    request.timing = RequestTiming(request.head.model_name, time.monotonic_ns())
    exchange.add(ResponseHook(HookOrder.TIMING, partial(_with_times, request.timing)))


def _with_times(timing: RequestTiming, response: InferResponse) -> InferResponse:
    return replace(response, parameters={**response.parameters, **timing.parameters()})
