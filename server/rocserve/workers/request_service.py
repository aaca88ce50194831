"""The service of a model that sees each request for itself: one instance, all of it on the worker's main thread.

Users' models may load what works only on the thread that loaded it, or on the main thread, so initialize, execute and
finalize all run there. A second thread waits for the end on the control socket, a third reads the back channel.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rocserve.backends.base import Batch, model_properties
from rocserve.backends.request_model import Answer, ModelRequest, RequestModel, RequestModelSource, Result
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_prefix import begin_requests, end_requests
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor
from rocserve.workers.back_channel import BackChannel, BatchedResponder
from rocserve.workers.batch_inputs import details_of, request_inputs, separate
from rocserve.workers.messages import Load, WarmUp
from rocserve.workers.request_details import NO_DETAILS, read_details
from rocserve.workers.tensor_service import model_source
from rocserve.workers.warmup import warm_up_batches
from rocserve.workers.worker_end import ReceivedBatch, ReceivedRequest, ServerGone, WorkerEnd, error_text


class RequestService:
    """Implements tensor_service.ModelService."""

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
        self._log = log
        self._model_folder = Path(load.model_folder)
        self._back = BackChannel(self._end, log)
        self._back.start()
        source = RequestModelSource(
            model_source(load, report), load.config_json, self._back, load.instance_name, send_metrics
        )
        self._model: RequestModel = importlib.import_module(load.engine).load(source)

    @property
    def signature(self) -> Signature:
        return self._model.signature

    @property
    def properties(self) -> Mapping[str, str]:
        """See ModelService."""
        return model_properties(self._model)

    @property
    def batches_at_once(self) -> int:
        """See Loaded."""
        return 1

    def warm_up(self, message: WarmUp) -> None:
        """See ModelService."""
        self._model.initialize(message.config, message.config_json)
        for batch in warm_up_batches(message.config, self._model_folder):
            for answer in self._run_sample(batch):
                if isinstance(answer, ServeError):
                    raise answer

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """See ModelService."""
        executor = RequestExecutor(self._end, self._model, self._back, self._log)
        is_wanted = True

        def stop() -> None:
            nonlocal is_wanted
            is_wanted = wait_for_end()
            self._end.stop(is_wanted)

        control = threading.Thread(target=stop, name="control", daemon=True)
        control.start()
        ready()
        try:
            executor.run()
        except ServerGone:
            pass
        except BaseException:
            # An instance that cannot go on must not look as if it could: the server restarts the worker.
            self._log.exception("an instance failed")
            os._exit(70)
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

    def close(self) -> None:
        self._model.close()

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


class RequestExecutor:
    """Takes the batches of one instance, has the model run them, and sends its answers."""

    def __init__(self, end: WorkerEnd, model: RequestModel, back: BackChannel, log: logging.Logger) -> None:
        self._end = end
        self._model = model
        self._back = back
        self._log = log

    def run(self) -> None:
        """Until the server closes the connection, or the end is stopped. Raises: ServerGone."""
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
            self._end.fail(received, (input_end, max(output_start, input_end)), self._serve_error(error))
            return
        self._end.finish(received, (input_end, output_start), results)

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
