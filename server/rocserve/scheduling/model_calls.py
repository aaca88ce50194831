"""Dispatches the calls that models make to other models (Triton's BLS) like clients' requests: calls are validated and
queued, and may go to ensembles and decoupled models. As in Triton a model can call itself only while another of its
instances is free: an instance that waits for an answer cannot compute it."""

from __future__ import annotations

from contextlib import suppress

from rocserve.backends.request_model import ModelCall
from rocserve.core.device_references import device_of, join_references, referable_outputs, split_into_rows
from rocserve.core.dispatch import Dispatcher, dispatch_caused
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.parameters import ParameterValue
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import END_FLAG, START_FLAG, SequenceTag, sequence_id
from rocserve.core.tensors import Buffer
from rocserve.scheduling.ensemble.graph import step_head
from rocserve.workers.instance_requests import OpenCall


def start_call(dispatcher: Dispatcher, call: ModelCall, opened: OpenCall, caller: object = None) -> None:
    """Dispatch a call to the version that now serves its model. See workers.instance_requests.CallStarter. `caller`:
    see InferRequest."""
    version = "" if call.model_version < 0 else str(call.model_version)
    called: ModelConfig | None = None
    if call.device:
        with suppress(ServeError):  # The dispatcher answers a call of an unknown model.
            served = dispatcher.tables.table.find(call.model_name, version)
            called = served.config if device_of(served) == call.device else None
    if call.references and called is None:
        opened.send_again()
        return
    if called is not None and call.accepts_references:
        opened.reference_outputs, opened.references_are_rows = referable_outputs(called), called.max_batch_size > 0
    inputs: list[tuple[str, str, tuple[int, ...]]] = []
    data: list[Buffer] = []
    for tensor in call.inputs:
        sent = tensor
        if tensor.name in call.references:
            sent = join_references(tensor)
            if called is not None and called.max_batch_size > 0:
                tensor = split_into_rows(tensor)
        inputs.append((sent.name, sent.datatype.value, sent.shape))
        data.append(tensor.data)
    # A client's request has these fields as parameters.
    parameters: dict[str, ParameterValue] = dict(call.parameters)
    if call.priority:
        parameters["priority"] = call.priority
    if call.timeout_microseconds:
        parameters["timeout"] = call.timeout_microseconds
    head, _ = step_head(
        call.model_name,
        version,
        tuple(inputs),
        call.requested_outputs,
        parameters,
        frozenset(call.references),
        opened.reference_outputs,
    )
    sequence = None
    if call.correlation_id or call.flags:
        starts, ends = bool(call.flags & START_FLAG), bool(call.flags & END_FLAG)
        sequence = SequenceTag(sequence_id(call.correlation_id), starts, ends)
    request = InferRequest(head, call.id, data, sequence=sequence, data_owner=opened.slot, caller=caller)
    # The trace of the in-flight request to which the model says that the call belongs.
    trace = opened.instance.trace(call.trace_number) if call.trace_number else None
    dispatch_caused(dispatcher, request, opened, trace)
