"""The worker's end of an instance that computes on tensors: batches come in, the engine runs them, results go out."""

from __future__ import annotations

import logging
import time

from rocserve.backends.base import LoadedModel
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ModelConfig
from rocserve.workers.batch_inputs import BatchGatherer
from rocserve.workers.result_writer import NO_ROOM, ResultWriter
from rocserve.workers.worker_end import (
    OutgoingResult,
    ReceivedBatch,
    ReceivedRequest,
    WorkerEnd,
    error_result,
    error_text,
)


class TensorExecutor:
    """Serves one instance until the server closes it. One thread, no hand-over."""

    def __init__(self, end: WorkerEnd, model: LoadedModel, config: ModelConfig, log: logging.Logger) -> None:
        self._end = end
        self._model = model
        self._log = log
        self._gatherer = BatchGatherer(end.inputs, config)
        self._writer = ResultWriter(end, model.signature, config.max_batch_size > 0)

    def run(self) -> None:
        """Until the server closes the connection, or `stop`. Raises: ServerGone."""
        for batch in self._end.batches():
            if batch.is_grouped:
                self._run_each(batch)
            else:
                self._run_together(batch)

    def stop(self, is_wanted: bool) -> None:
        """See WorkerEnd."""
        self._end.stop(is_wanted)

    def close(self) -> None:
        self._end.close()

    def _run_together(self, received: ReceivedBatch) -> None:
        writer = self._writer
        input_end = output_start = received.taken_ns
        try:
            batch = self._gatherer.batch(received.requests)
            writer.make_room(batch)
            input_end = output_start = time.monotonic_ns()
            result = self._model.execute(batch)
            output_start = time.monotonic_ns()
            outgoing = writer.write(batch, result)
            place = writer.take_place()
            if place is None:
                self._end.finish(received, (input_end, output_start), [outgoing], each=False)
            else:
                self._end.finish_reserved(received, (input_end, output_start), outgoing, place)
        except BaseException as error:
            # SystemExit as well: a model that calls sys.exit() fails its batch, it does not take the worker along.
            self._end.fail(received, (input_end, max(output_start, input_end)), self._serve_error(error))
        finally:
            writer.give_up_room()

    def _run_each(self, received: ReceivedBatch) -> None:
        """Each request for itself: one that fails leaves the others alone."""
        results: list[OutgoingResult] = []
        for request in received.requests:
            try:
                results.append(self._run_one(request))
            except BaseException as error:
                results.append(error_result(self._serve_error(error)))
        self._end.finish(received, (received.taken_ns, time.monotonic_ns()), results, each=True)

    def _run_one(self, request: ReceivedRequest) -> OutgoingResult:
        batch = self._gatherer.batch([request])
        batch.room = NO_ROOM
        result = self._model.execute(batch)
        if result.failures:
            raise result.failures[0]
        return self._writer.write(batch, result)

    def _serve_error(self, error: BaseException) -> ServeError:
        if isinstance(error, ServeError):
            return error
        self._log.error("the engine failed to run a batch", exc_info=error)
        return ServeError(StatusCode.INTERNAL, error_text(error))
