"""The worker's end of an instance whose model sees each request for itself: requests come in, answers go out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from rocserve.backends.request_model import Answer, ModelRequest, ModelResponse, RequestModel, Rescheduled, Result
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import Tensor
from rocserve.workers.back_channel import BackChannel
from rocserve.workers.batch_inputs import details_of, request_inputs
from rocserve.workers.current_requests import begin_requests, end_requests
from rocserve.workers.request_details import read_details
from rocserve.workers.responses import BatchedResponder
from rocserve.workers.worker_end import ReceivedBatch, ReceivedRequest, SharedWorkerEnd, error_text


class RequestExecutor:
    """Serves one instance until the server closes it. One thread, no hand-over."""

    def __init__(self, end: SharedWorkerEnd, model: RequestModel, back: BackChannel, log: logging.Logger) -> None:
        self._end = end
        self._model = model
        self._back = back
        self._log = log

    def run(self) -> None:
        """Until the server closes the connection, or `stop`. Raises: ServerGone."""
        for batch in self._end.batches():
            self._run_batch(batch)

    def stop(self, is_wanted: bool) -> None:
        """See WorkerEnd."""
        self._end.stop(is_wanted)

    def _run_batch(self, received: ReceivedBatch) -> None:
        input_end = output_start = received.taken_ns
        responders: list[BatchedResponder] = []
        try:
            requests = [self._request(each, responders) for each in received.requests]
            input_end = output_start = time.monotonic_ns()
            together = [[request] for request in requests] if received.is_grouped else [requests]
            answers = [answer for batch in together for answer in self._run(batch)]
            output_start = time.monotonic_ns()
            result = self._back.responses.result
            entries = [
                result(_settled(answer, request.requested_outputs, responder))
                for answer, request, responder in zip(answers, requests, responders, strict=True)
            ]
        except BaseException as error:
            for responder in responders:
                responder.claim()
            self._end.fail(received, (input_end, max(output_start, input_end)), self._serve_error(error))
            return
        self._end.finish(received, (input_end, output_start), entries, each=True)

    def _request(self, received: ReceivedRequest, responders: list[BatchedResponder]) -> ModelRequest:
        """A request on memory of its own, which may be kept and written to.

        What answers it is appended to `responders`, also where this fails.
        """
        responder = self._back.open_request(received.number)
        responders.append(responder)
        layout, heap = received.form.layout, self._end.inputs
        contents = request_inputs(received, heap)
        inputs = {
            head.name: Tensor(head.name, head.datatype, head.shape, bytearray(content))
            for head, content in zip(layout.inputs, contents, strict=True)
        }
        details = read_details(details_of(received, heap))
        return ModelRequest(
            inputs,
            layout.requested_outputs,
            responder,
            details.request_id,
            details.correlation_id,
            details.flags,
            layout.priority,
            layout.timeout_microseconds,
            layout.parameters,
            received.number,
            details.trace_context,
        )

    def _run(self, requests: Sequence[ModelRequest]) -> Sequence[Result | None]:
        """What the model gives, an error for each request where it raises."""
        token = begin_requests(tuple([request.id for request in requests]))
        try:
            answers = self._model.execute(requests)
            if len(answers) != len(requests):
                raise RuntimeError(f"the model gave {len(answers)} answers to {len(requests)} requests")
        except BaseException as error:
            # SystemExit as well: a model that calls sys.exit() fails its batch, it does not take the worker along.
            told = self._serve_error(error)
            return [told] * len(requests)
        finally:
            end_requests(token)
        return answers

    def _serve_error(self, error: BaseException) -> ServeError:
        if isinstance(error, ServeError):
            return error
        self._log.error("the model failed to run a batch", exc_info=error)
        return ServeError(StatusCode.INTERNAL, error_text(error))


def _settled(answer: Result | None, requested_outputs: tuple[str, ...], responder: BatchedResponder) -> Answer | None:
    """What goes with the batch: the answer, unless the request is answered beside it."""
    if answer is None:
        return None
    if isinstance(answer, Rescheduled):
        # Beside the batch, behind what the model may have said to the request there.
        responder.end_with(answer)
        return None
    if isinstance(answer, ModelResponse):
        outputs = [tensor for tensor in answer.outputs if tensor.name in requested_outputs]
        if len(outputs) < len(answer.outputs):
            answer = ModelResponse(outputs, answer.parameters)
    if responder.claim():
        return answer
    responder.end_with(answer)
    return None
