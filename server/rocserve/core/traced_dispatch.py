"""Requests that a traced request makes: the steps of an ensemble, calls of other models by a model."""

from __future__ import annotations

import time

from rocserve.core.datatypes import DataType
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError
from rocserve.core.requests import Answer, InferRequest, InferResponse
from rocserve.core.serving import ForwardingResponder, Responder
from rocserve.core.tensors import Tensor
from rocserve.core.trace import REQUEST_END, TENSOR_BACKEND_OUTPUT, TENSOR_QUEUE_INPUT, Trace


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
    """Stands before the responder of a request that another one made, and ends its trace."""

    __slots__ = ("_trace",)

    def __init__(self, responder: Responder, trace: Trace) -> None:
        super().__init__(responder)
        self._trace = trace

    def send(self, answer: Answer, final: bool = True) -> None:
        """See core.serving.Responder."""
        if self._trace.wants_tensors and isinstance(answer, InferResponse):
            self._trace.note_tensors(TENSOR_BACKEND_OUTPUT, answer.outputs)
        # Before the answer goes on: it may end the whole, and this trace is part of it.
        if final:
            self._trace.note(REQUEST_END, time.monotonic_ns())
            self._trace.end()
        self._responder.send(answer, final)
