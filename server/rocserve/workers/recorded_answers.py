"""Runs the recorded request of check.npz on a model that is warm, and compares the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import numpy as np

from rocserve.backends.base import Batch, LoadedModel, model_executions
from rocserve.backends.request_model import ModelRequest, ModelResponse, RequestModel, Rescheduled, Result
from rocserve.backends.warmup import as_served
from rocserve.core.errors import ServeError
from rocserve.core.load_check import RECORDED_ANSWERS, RECORDED_FILE, LoadCheckFailed, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.load_check.recorded import compare_recorded, joined, read_recorded, recorded_request
from rocserve.load_check.tensors import Array
from rocserve.workers.batch_inputs import split_sample
from rocserve.workers.worker_end import error_text


def check_recorded_answers(
    model: LoadedModel | RequestModel,
    file: str,
    config: ModelConfig,
    answers_requests: bool,
    report_check: Callable[[str], None],
) -> LoadCheckReport:
    """Check the model against `file`. `answers_requests`: it is a RequestModel. `report_check`: see ModelSource. Raises
    LoadCheckFailed if the file is wrong, the model fails, or its answer differs."""
    report_check(f"comparing its answer with {RECORDED_FILE}")
    began = time.monotonic()
    recorded = read_recorded(Path(file))
    request = recorded_request(recorded, config)
    inputs = {
        entry.name: Tensor(entry.name, entry.datatype, entry.shape, data)
        for entry, data in zip(request.plan.inputs, request.data, strict=True)
    }
    batch = Batch(inputs, request.plan.outputs, (request.plan.batch_size,))
    outputs: Mapping[str, Array | Tensor]
    try:
        if answers_requests:
            outputs = _answer_of_requests(cast(RequestModel, model), batch)
        else:
            outputs = _answer_of_tensors(cast(LoadedModel, model), batch, config)
    except LoadCheckFailed:
        raise
    except Exception as error:
        fault = error.text if isinstance(error, ServeError) else error_text(error)
        failure = LoadCheckFailed(RECORDED_ANSWERS, f"it fails on the inputs of {RECORDED_FILE}: {fault}")
        failure.can_pass = isinstance(error, ServeError) and error.can_pass
        raise failure from error
    found = compare_recorded(recorded, outputs, config)
    report_check("")
    return LoadCheckReport((found,), seconds=time.monotonic() - began)


def _answer_of_tensors(model: LoadedModel, batch: Batch, config: ModelConfig) -> Mapping[str, Array | Tensor]:
    served = as_served(batch, config, model.signature.padding)
    # The first execution, which also serves batches.
    execution, *_ = model_executions(model)
    execution.start(served)
    result = execution.result()
    for failure in result.failures.values():
        raise failure
    outputs = dict(result.outputs)
    for name, (shape, *_) in served.cuts.items():
        if isinstance(array := outputs.get(name), np.ndarray):
            outputs[name] = array.reshape(shape)
    for name in served.padded.keys() & outputs.keys():
        value = outputs[name]
        own = tuple(served.padded[name].own(0, value.shape))
        if isinstance(value, Tensor):
            outputs[name] = tensor_from_numpy(name, value.numpy()[own], value.datatype)
        else:
            outputs[name] = value[own]
    return outputs


def _answer_of_requests(model: RequestModel, batch: Batch) -> Mapping[str, Array]:
    """Return the answer of a model, which gets the request again if it reschedules it."""
    responses: list[Sequence[Tensor]] = []

    def keep(response: ModelResponse) -> None:
        # The model may use the memory again.
        responses.append([tensor.copied() for tensor in response.outputs])

    last: Result | None = Rescheduled.RESCHEDULED
    while isinstance(last, Rescheduled):
        responses.clear()
        responder = TrialResponder(keep)
        (inputs,) = split_sample(batch)
        (last,) = model.execute([ModelRequest(inputs, batch.requested_outputs, responder)])
        if last is None:
            last = responder.ended.result()
        elif isinstance(last, ModelResponse):
            responses.append(last.outputs)
    if isinstance(last, ServeError):
        raise last
    return joined(responses)


class TrialResponder:
    """Takes the answers to a request that no client has sent. Implements request_model.RequestResponder."""

    is_cancelled = False

    def __init__(self, on_response: Callable[[ModelResponse], object] = lambda response: None) -> None:
        self.ended: Future[Result | None] = Future()
        """Completed with the last answer, or with the first error."""
        self._on_response = on_response
        self._error: ServeError | None = None

    def send(self, answer: Result | None, final: bool) -> None:
        if self.ended.done():
            raise RuntimeError("the final response to this request has already been sent")
        if isinstance(answer, ModelResponse):
            self._on_response(answer)
        elif isinstance(answer, ServeError):
            self._error = self._error or answer
        if final:
            self.ended.set_result(self._error or answer)
