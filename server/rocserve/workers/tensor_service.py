"""What a worker does with its model, once it is told to load it: the service of models that compute on tensors."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rocserve.backends.base import Batch, Execution, LoadedModel, ModelSource, model_executions, model_properties
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature
from rocserve.workers.batch_inputs import BatchGatherer
from rocserve.workers.messages import Load, WarmUp
from rocserve.workers.result_writer import NO_ROOM, ResultWriter
from rocserve.workers.warmup import warm_up_batches, with_ragged_shapes
from rocserve.workers.worker_end import (
    OutgoingResult,
    ReceivedBatch,
    ReceivedRequest,
    ServerGone,
    WorkerEnd,
    error_result,
    error_text,
)


class ModelService(Protocol):
    """A loaded model and what serves it. All calls come on the worker's main thread."""

    @property
    def signature(self) -> Signature: ...
    @property
    def properties(self) -> Mapping[str, str]:
        """See backends.base.model_properties; read from any thread."""

    @property
    def batches_at_once(self) -> int:
        """See Loaded."""

    def warm_up(self, message: WarmUp) -> None:
        """Raises: ServeError or any exception: the model cannot be served."""

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """Say `ready` once batches are taken, and take them until `wait_for_end` returns; then end those in hand, or,
        where it returns False, drop them. Returns what it returned."""

    def renew(self, instances: Sequence[socket.socket]) -> None:
        """Serve on other sockets from now on; before `serve`."""

    def close(self) -> None: ...


class TensorService:
    """Each instance has a thread; they share the model."""

    def __init__(
        self, load: Load, instances: Sequence[socket.socket], report: Callable[[str], None], log: logging.Logger
    ) -> None:
        """`report`: see backends.base.ModelSource.

        Raises:
            ServeError or any exception: the model cannot be loaded.
        """
        self._instances = instances
        self._log = log
        self._model_folder = Path(load.model_folder)
        self._model: LoadedModel = importlib.import_module(load.engine).load(model_source(load, report))
        self._config = load.config

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
        return len(model_executions(self._model))

    def warm_up(self, message: WarmUp) -> None:
        """See ModelService."""
        samples = warm_up_batches(message.config, self._model_folder)
        self._model.warm_up([with_ragged_shapes(sample, message.config) for sample in samples])
        self._config = message.config

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> bool:
        """See ModelService."""
        threads = self._start_executors()
        ready()
        is_wanted = wait_for_end()
        for executor, _ in threads:
            executor.stop(is_wanted)
        for _, thread in threads:
            thread.join()
        return is_wanted

    def renew(self, instances: Sequence[socket.socket]) -> None:
        """See ModelService."""
        self._instances = instances

    def close(self) -> None:
        self._model.close()

    def _start_executors(self) -> list[tuple[TensorExecutor, threading.Thread]]:
        started = []
        for index, connection in enumerate(self._instances):
            executor = TensorExecutor(
                WorkerEnd(connection, len(self._instances) == 1), self._model, self._config, self._log
            )
            thread = threading.Thread(target=self._execute, args=(executor,), name=f"instance {index}", daemon=True)
            thread.start()
            started.append((executor, thread))
        return started

    def _execute(self, executor: TensorExecutor) -> None:
        try:
            executor.run()
        except ServerGone:
            pass
        except BaseException:
            # An instance that cannot go on must not look as if it could: the server restarts the worker.
            self._log.exception("an instance failed")
            os._exit(70)
        finally:
            executor.close()


class TensorExecutor:
    """Takes the batches of one instance, has the engine run them, and sends the results. One thread."""

    def __init__(self, end: WorkerEnd, model: LoadedModel, config: ModelConfig, log: logging.Logger) -> None:
        self._end = end
        self._log = log
        self._free = deque(
            BatchLane(end, model.signature, config, execution, self._serve_error)
            for execution in model_executions(model)
        )
        self._running: deque[BatchLane] = deque()
        """In the order of their batches, in which these are answered."""
        self._engine_free_ns = 0
        """When the engine ended its last batch."""

    def run(self) -> None:
        """Until the server closes the connection, or `stop`. Raises: ServerGone."""
        try:
            for batch in self._end.batches(self._work_on):
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

    def stop(self, is_wanted: bool) -> None:
        """See WorkerEnd."""
        self._end.stop(is_wanted)

    def close(self) -> None:
        self._end.close()

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
        for request in received.requests:
            try:
                self._free[0].run_one(request, results)
            except BaseException as error:
                results.append(error_result(self._serve_error(error)))
        self._end.finish(received, (received.taken_ns, time.monotonic_ns()), results)

    def _serve_error(self, error: BaseException) -> ServeError:
        if isinstance(error, ServeError):
            return error
        self._log.error("the engine failed to run a batch", exc_info=error)
        return ServeError(StatusCode.INTERNAL, error_text(error))


class BatchLane:
    """Takes one batch after the other from its inputs to its result, beside other lanes of the instance."""

    def __init__(
        self,
        end: WorkerEnd,
        signature: Signature,
        config: ModelConfig,
        execution: Execution,
        serve_error: Callable[[BaseException], ServeError],
    ) -> None:
        self._end = end
        self._execution = execution
        self._gatherer = BatchGatherer(end.inputs, config, execution.input_memory)
        self._writer = ResultWriter(end, signature, config.max_batch_size > 0)
        self._serve_error = serve_error
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
            # SystemExit as well: a model that calls sys.exit() fails its batch, it does not take the worker along.
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
            end.finish(self._received, (input_end, output_start), results)
        except BaseException as error:
            end.fail(self._received, (input_end, output_start), self._serve_error(error))
        finally:
            writer.give_up_room()
            self._batch = self._error = None
        return output_start

    def run_one(self, request: ReceivedRequest, results: list[OutgoingResult]) -> None:
        """Add the result of a request of a group."""
        batch = self._gatherer.batch([request])
        batch.room = NO_ROOM
        self._execution.start(batch)
        self._writer.write(results, batch, self._execution.result())

    def drop(self) -> None:
        """Wait for the batch; its result is nobody's."""
        with suppress(Exception):
            self._execution.result()
        self._writer.give_up_room()


def model_source(load: Load, report: Callable[[str], None]) -> ModelSource:
    """What an engine is told of the model that it is to load."""
    return ModelSource(
        name=load.model_name,
        version=load.version,
        model_folder=Path(load.model_folder),
        version_folder=Path(load.version_folder),
        model_file=Path(load.model_file),
        config=load.config,
        instance_kind=load.instance_kind,
        device=load.device,
        instance_count=load.instance_count,
        memory_bytes=load.memory_bytes,
        settings=load.settings,
        report=report,
    )
