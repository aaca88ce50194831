"""The service of a model that sees each request for itself: one instance, all of it on the worker's main thread.

Users' models may load what works only on the thread that loaded it, or on the main thread, so initialize, execute and
finalize all run there. A second thread waits for the end on the control socket, a third reads the back channel.
"""

from __future__ import annotations

import importlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rocserve.backends.base import Batch
from rocserve.backends.request_model import (
    Answer,
    ModelRequest,
    ModelResponse,
    RequestModel,
    RequestModelSource,
    Result,
)
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.device_references import References
from rocserve.core.errors import ServeError
from rocserve.core.request_prefix import begin_requests, end_requests
from rocserve.core.tensors import Tensor
from rocserve.workers.back_channel import BackChannel, BatchedResponder
from rocserve.workers.batch_inputs import details_of, request_inputs, separate
from rocserve.workers.messages import Load, WarmUp
from rocserve.workers.model_service import ModelService, model_source, serve_error
from rocserve.workers.request_details import NO_DETAILS, read_details
from rocserve.workers.warmup import warm_up_batches
from rocserve.workers.worker_end import ReceivedBatch, ReceivedRequest, WorkerEnd


class RequestService(ModelService):
    """One instance, which is the model."""

    def __init__(
        self,
        load: Load,
        connection: socket.socket,
        report: Callable[[str], None],
        send_metrics: Callable[[MetricChanges], None],
        log: logging.Logger,
    ) -> None:
        """`report`: see backends.base.ModelSource; `send_metrics`: see backends.request_model.RequestModelSource.

        Raises:
            ServeError or any exception: the model cannot be loaded.
        """
        self._end = WorkerEnd(connection)
        self._back = BackChannel(self._end, log)
        self._back.start()
        source = RequestModelSource(
            model_source(load, report), load.config_json, self._back, load.plan.instance_name, send_metrics
        )
        self._model: RequestModel = importlib.import_module(load.engine).load(source)
        super().__init__(self._model, load, log)

    def warm_up(self, message: WarmUp) -> None:
        """See ModelService."""
        self._model.initialize(message.config, message.config_json)
        for batch in warm_up_batches(message.config, self._model_folder):
            for answer in self._run_sample(batch):
                if isinstance(answer, ServeError):
                    raise answer

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """See ModelService."""
        is_wanted = True

        def stop() -> None:
            nonlocal is_wanted
            is_wanted = wait_for_end()
            self._end.stop(is_wanted)

        control = threading.Thread(target=stop, name="control", daemon=True)
        control.start()
        ready()
        self._run_instance(self._run_batches)
        # Where the server is gone, the connection may have told of it first.
        control.join()
        return is_wanted

    def renew(self, instances: Sequence[socket.socket]) -> None:
        """See ModelService."""
        self._back.stop()
        self._end.close()
        self._end = WorkerEnd(instances[0])
        self._back.renew(self._end)
        self._back.start()

    def _run_sample(self, batch: Batch) -> Iterator[Result | None]:
        """The last answer to each request of a sample; one that is wanted again has run for once."""
        responders = [_SampleResponder() for _ in batch.request_sizes]
        requests = [
            ModelRequest(inputs, batch.requested_outputs, responder)
            for inputs, responder in zip(separate(batch), responders, strict=True)
        ]
        answers = self._model.execute(requests)
        for answer, responder in zip(answers, responders, strict=True):
            yield answer if answer is not None else responder.wait()

    def _run_batches(self) -> None:
        for batch in self._end.batches():
            self._run_batch(batch)

    def _run_batch(self, received: ReceivedBatch) -> None:
        input_end = output_start = received.taken_ns
        responders: list[BatchedResponder] = []
        try:
            requests = [self._request(each, responders) for each in received.requests]
            input_end = output_start = time.monotonic_ns()
            together = [[request] for request in requests] if received.is_grouped else [requests]
            answers = [answer for batch in together for answer in self._run(batch)]
            output_start = time.monotonic_ns()
            settled = [responder.settle(answer) for answer, responder in zip(answers, responders, strict=True)]
            results = self._back.responses.results(settled)
        except BaseException as error:
            for responder in responders:
                responder.claim()
            self._end.fail(received, (input_end, max(output_start, input_end)), serve_error(error, self._log))
            return
        kept = [answer.slot for answer in settled if isinstance(answer, ModelResponse) and answer.slot is not None]
        self._end.finish(received, (input_end, output_start), results, kept)

    def _request(self, received: ReceivedRequest, responders: list[BatchedResponder]) -> ModelRequest:
        """A request on memory of its own, which may be kept and written to.

        What answers it is appended to `responders`, also where this fails.
        """
        responder = self._back.open_request(received.number)
        responders.append(responder)
        layout, heap = received.form.layout, self._end.inputs
        inputs = {
            head.name: Tensor(*head, bytearray(content))
            for head, content in zip(layout.inputs, request_inputs(received, heap), strict=True)
        }
        for head in layout.references:
            inputs[head.name] = Tensor(*head, References(inputs[head.name].data))
        details = read_details(details_of(received, heap)) if received.details_bytes else NO_DETAILS
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
            layout.may_stay,
        )

    def _run(self, requests: Sequence[ModelRequest]) -> Sequence[Result | None]:
        """What the model gives, an error for each request where it raises."""
        token = begin_requests(tuple([request.id for request in requests]))
        try:
            answers = self._model.execute(requests)
            if len(answers) != len(requests):
                raise RuntimeError(f"the model gave {len(answers)} answers to {len(requests)} requests")
        except BaseException as error:
            told = serve_error(error, self._log)
            return [told] * len(requests)
        finally:
            end_requests(token)
        return answers


class _SampleResponder:
    """Takes the answers to one request of a warm-up sample."""

    is_cancelled = False

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._answer: Answer | None = None

    def send(self, answer: Answer | None, final: bool) -> None:
        if self._ended.is_set():
            raise RuntimeError("the final response to this request has been sent before")
        # An error is what counts, wherever it stands among the responses.
        if not isinstance(self._answer, ServeError):
            self._answer = answer
        if final:
            self._ended.set()

    def wait(self) -> Answer | None:
        self._ended.wait()
        return self._answer
