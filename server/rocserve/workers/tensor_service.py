"""The service of models that compute on tensors, and their executions."""

from __future__ import annotations

import importlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context

from rocserve.backends.base import Batch, Execution, LoadedModel, model_executions
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature
from rocserve.workers.batch_inputs import BatchGatherer
from rocserve.workers.messages import Load, WarmUp
from rocserve.workers.model_service import ModelService, model_source, serve_error
from rocserve.workers.result_writer import NO_ROOM, ResultWriter
from rocserve.workers.warmup import warm_up_batches, with_ragged_shapes
from rocserve.workers.worker_end import (
    OutgoingResult,
    ReceivedBatch,
    ReceivedRequest,
    WorkerEnd,
    error_result,
)


class TensorService(ModelService):
    """Each instance has a thread; they share the model."""

    def __init__(
        self, load: Load, instances: Sequence[socket.socket], report: Callable[[str], None], log: logging.Logger
    ) -> None:
        """`report`: see backends.base.ModelSource.

        Raises:
            ServeError or any exception: the model cannot be loaded.
        """
        self._instances = instances
        self._model: LoadedModel = importlib.import_module(load.engine).load(model_source(load, report))
        super().__init__(self._model, load, log)
        self._config = load.config
        self._is_alone = len(instances) == 1 and not load.shares_process
        self.batches_at_once = len(model_executions(self._model))

    def warm_up(self, message: WarmUp) -> None:
        """See ModelService."""
        samples = warm_up_batches(message.config, self._model_folder)
        self._model.warm_up([with_ragged_shapes(sample, message.config) for sample in samples])
        self._config = message.config

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """See ModelService."""
        ends = [WorkerEnd(connection, self._is_alone) for connection in self._instances]
        threads = [
            threading.Thread(
                target=copy_context().run, args=(self._execute, end), name=f"instance {index}", daemon=True
            )
            for index, end in enumerate(ends)
        ]
        for thread in threads:
            thread.start()
        ready()
        is_wanted = wait_for_end()
        for end in ends:
            end.stop(is_wanted)
        for thread in threads:
            thread.join()
        return is_wanted

    def renew(self, instances: Sequence[socket.socket]) -> None:
        """See ModelService."""
        self._instances = instances

    def _execute(self, end: WorkerEnd) -> None:
        self._run_instance(lambda: TensorExecutor(end, self._model, self._config, self._log).run())
        end.close()


class TensorExecutor:
    """Takes the batches of one instance, has the engine run them, and sends the results. One thread."""

    def __init__(self, end: WorkerEnd, model: LoadedModel, config: ModelConfig, log: logging.Logger) -> None:
        self._end = end
        self._log = log
        self._free = deque(
            BatchLane(end, model.signature, config, execution, log) for execution in model_executions(model)
        )
        self._running: deque[BatchLane] = deque()
        """In the order of their batches, in which these are answered."""
        self._engine_free_ns = 0
        """When the engine ended its last batch."""

    def run(self) -> None:
        """Until the server closes the connection, or `stop`. Raises: ServerGone."""
        try:
            # What is done when it has been started is answered before the next is asked for.
            work_on = self._work_on if len(self._free) > 1 else None
            for batch in self._end.batches(work_on):
                if batch.is_grouped:
                    while self._running:
                        self._finish_first()
                    self._run_each(batch)
                    continue
                lane = self._free.popleft()
                self._running.append(lane)
                lane.start(batch)
                while not self._free:
                    self._finish_first()
        finally:
            # What is in memory is the engine's until then.
            for lane in self._running:
                lane.drop()

    def _work_on(self) -> bool:
        """See WorkerEnd.batches."""
        while self._running:
            if not self._running[0].is_done:
                return True
            self._finish_first()
        return False

    def _finish_first(self) -> None:
        lane = self._running.popleft()
        self._free.append(lane)
        self._engine_free_ns = lane.finish(self._engine_free_ns)

    def _run_each(self, received: ReceivedBatch) -> None:
        """Each request for itself: one that fails leaves the others alone."""
        results: list[OutgoingResult] = []
        kept: list[object] = []
        for request in received.requests:
            try:
                kept += self._free[0].run_one(request, results)
            except BaseException as error:
                results.append(error_result(serve_error(error, self._log)))
        self._end.finish(received, (received.taken_ns, time.monotonic_ns()), results, kept)


class BatchLane:
    """Takes one batch after the other from its inputs to its result, beside other lanes of the instance."""

    def __init__(
        self,
        end: WorkerEnd,
        signature: Signature,
        config: ModelConfig,
        execution: Execution,
        log: logging.Logger,
    ) -> None:
        self._end = end
        self._execution = execution
        self._gatherer = BatchGatherer(end.inputs, config, execution.input_memory)
        self._writer = ResultWriter(end, signature, config.max_batch_size > 0)
        self._log = log
        self._received: ReceivedBatch
        self._batch: Batch | None = None
        self._input_end = 0
        self._error: BaseException | None = None

    def start(self, received: ReceivedBatch) -> None:
        """Have the engine begin with a batch."""
        self._received, self._error = received, None
        self._input_end = received.taken_ns
        try:
            batch = self._batch = self._gatherer.batch(received.requests)
            self._writer.make_room(batch)
            self._input_end = time.monotonic_ns()
            self._execution.start(batch)
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._error is not None or self._execution.is_done

    def finish(self, engine_free_ns: int) -> int:
        """Wait for the batch and send its result; when the engine ended it, by time.monotonic_ns().

        Args:
            engine_free_ns: when it ended the one before.
        """
        writer, end = self._writer, self._end
        input_end = output_start = max(self._input_end, engine_free_ns)
        try:
            if self._error is not None:
                raise self._error
            assert self._batch is not None
            result = self._execution.result()
            output_start = time.monotonic_ns()
            results: list[OutgoingResult] = []
            writer.write(results, self._batch, result)
            end.finish(self._received, (input_end, output_start), results, result.kept)
        except BaseException as error:
            end.fail(self._received, (input_end, output_start), serve_error(error, self._log))
        finally:
            writer.give_up_room()
            self._batch = self._error = None
        return output_start

    def run_one(self, request: ReceivedRequest, results: list[OutgoingResult]) -> Sequence[object]:
        """Add the result of a request of a group; what it keeps (see BatchResult)."""
        batch = self._gatherer.batch([request])
        batch.room = NO_ROOM
        self._execution.start(batch)
        result = self._execution.result()
        self._writer.write(results, batch, result)
        return result.kept

    def drop(self) -> None:
        """Wait for the batch; its result is nobody's."""
        with suppress(Exception):
            self._execution.result()
        self._writer.give_up_room()
