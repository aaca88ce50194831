"""Serves a model in a worker: loads it, warms it up and runs its batches (the worker's loop)."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path

from rocserve.backends.base import (
    Batch,
    Execution,
    LoadedModel,
    ModelSource,
    model_executions,
    model_load_check,
    model_preparation,
    model_reads_files,
)
from rocserve.backends.parameters import load_check_mode
from rocserve.backends.refusals import report_on_refused_zeros
from rocserve.backends.request_model import (
    ModelRequest,
    ModelResponse,
    RequestModel,
    RequestModelSource,
    Result,
    reads_in_place,
)
from rocserve.backends.warmup import as_served, warm_up_samples
from rocserve.backends.written_sizes import SIZES, VALUES
from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.device_references import References
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import NOT_CHECKED, LoadCheckMode, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_prefix import begin_requests, end_requests
from rocserve.core.tensors import Buffer, Tensor
from rocserve.links.details import NO_DETAILS, read_details
from rocserve.plane.freed_memory import FreedMemory
from rocserve.plane.guarded_mapping import FaultGuard
from rocserve.workers.back_channel import BackChannel, BatchedResponder
from rocserve.workers.batch_inputs import BatchGatherer, request_inputs, split_sample
from rocserve.workers.messages import Load, WarmUp
from rocserve.workers.recorded_answers import TrialResponder
from rocserve.workers.result_writer import NO_ROOM, ResultWriter, answer_results
from rocserve.workers.worker_end import (
    OutgoingResult,
    ReceivedBatch,
    ReceivedRequest,
    ServerGone,
    WorkerEnd,
    error_result,
    error_text,
)


@dataclass(eq=False)
class ModelService(ABC):
    """Loads a model and serves it. All calls come on the session's thread."""

    _load: Load
    _instances: Sequence[socket.socket]
    _report: Callable[[str], None]
    _report_check: Callable[[str], None]
    """See ModelSource."""
    _log: logging.Logger
    _guard: FaultGuard
    _send_metrics: Callable[[MetricChanges], None]
    """See RequestModelSource."""
    batches_at_once: int = field(default=1, init=False)
    """See Loaded."""
    model: LoadedModel | RequestModel = field(init=False)

    @abstractmethod
    def __post_init__(self) -> None:
        """Load the model. Raises ServeError or any exception if it cannot be loaded."""

    @abstractmethod
    def warm_up(self, message: WarmUp) -> LoadCheckReport:
        """Warm the model up, and return what that shows. Raises ServeError or any exception if the model cannot be
        served."""

    @abstractmethod
    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> None:
        """Call `ready` when batches are taken, and serve until `wait_for_end` returns. Then end the batches in flight,
        or drop them if it returned False."""

    def _source(self) -> ModelSource:
        load = self._load
        return ModelSource(
            name=load.model_name,
            version=load.version,
            model_folder=Path(load.model_folder),
            version_folder=Path(load.version_folder),
            model_file=Path(load.model_file),
            config=load.config,
            instance_kind=load.plan.kind,
            device=load.plan.device,
            instance_count=load.plan.instance_count,
            memory_bytes=load.memory_bytes,
            shares_process=load.shares_process,
            settings=load.settings,
            report=self._report,
            report_check=self._report_check,
        )

    def _samples(self, message: WarmUp) -> list[tuple[str, Batch]]:
        return list(warm_up_samples(message.config, Path(self._load.model_folder)))

    @contextmanager
    def _running_instance(self) -> Iterator[None]:
        """Let ServerGone, raised if the server has left, end the instance. Any other exception ends the process."""
        try:
            yield
        except ServerGone:
            pass
        except BaseException:
            # A failed instance must not look healthy: the process ends, and the server restarts it.
            self._log.exception("an instance failed")
            os._exit(70)


def _kept_memory() -> FreedMemory:
    """Keep the memory that a batch frees for the next batch. Otherwise a batch of 64 images pays for 2,400 page faults
    when it becomes one array: 110 of 180 us of CPU time per image."""
    freed = FreedMemory()
    # No batch needs the memory that loading has freed.
    deque(freed.give_back(), 0)
    return freed


def batch_error(error: BaseException, log: logging.Logger) -> ServeError:
    """Return the error of a failed batch. If a model calls sys.exit(), only its batch fails, not the worker."""
    if isinstance(error, ServeError):
        return error
    log.error("the model failed to run a batch", exc_info=error)
    return ServeError(StatusCode.INTERNAL, error_text(error))


class TensorService(ModelService):
    """Serves a model that computes on tensors. Each instance has a thread, and all share the model."""

    model: LoadedModel

    def __post_init__(self) -> None:
        self.model = importlib.import_module(self._load.engine).load(self._source())
        self._config = self._load.config
        written = [name for name in (SIZES, VALUES) if self._config.parameters.get(name, "").strip()]
        if written and not self.model.signature.padding.dimensions:
            self._log.warning(
                "model '%s': parameter '%s' has no effect: %s",
                self._load.model_name,
                written[0],
                "its engine does not pad requests" if written[0] == SIZES else f"it needs parameter '{SIZES}'",
            )
        self.batches_at_once = len(model_executions(self.model))

    def warm_up(self, message: WarmUp) -> LoadCheckReport:
        samples = self._samples(message)
        with _naming_samples(name for name, _ in samples):
            padding = self.model.signature.padding
            refusal = self.model.warm_up([as_served(batch, message.config, padding) for _, batch in samples])
        self._config, settings = message.config, self._load.settings
        # A load check that has run says itself if nothing runs.
        is_off = load_check_mode(message.config, settings) is LoadCheckMode.OFF
        if refusal is None or is_off or model_load_check(self.model).parts:
            return NOT_CHECKED
        return report_on_refused_zeros(self.model, message.config, refusal, settings.load_check_seconds)

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> None:
        is_alone, freed_memory = len(self._instances) == 1 and not self._load.shares_process, _kept_memory()
        ends = [WorkerEnd(connection, self._guard, is_alone, freed_memory) for connection in self._instances]
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

    def _execute(self, end: WorkerEnd) -> None:
        with self._running_instance():
            TensorExecutor(end, self.model, self._config, self._log).run()
        end.close()


class TensorExecutor:
    """Runs the batches of one instance on the engine and sends the results. On one thread."""

    def __init__(self, end: WorkerEnd, model: LoadedModel, config: ModelConfig, log: logging.Logger) -> None:
        self._end = end
        self._log = log
        self._free = deque(BatchLane(end, model, config, execution, log) for execution in model_executions(model))
        self._running: deque[BatchLane] = deque()
        """In the order in which their batches began and are answered."""
        self._engine_free_ns = 0
        """time.monotonic_ns() when the engine ended its last batch."""
        self._prepare_more = model_preparation(model)
        self._is_prepared = False
        self._prepared_ns = time.monotonic_ns()
        """The time of the last preparation, or of the beginning."""

    def run(self) -> None:
        """Run batches until the server closes the connection or the link's `stop`. Raises ServerGone."""
        try:
            # With one lane, each batch is finished right after its start.
            run_started = self._finish_done_batches if len(self._free) > 1 else None
            for batch in self._end.batches(run_started, self._prepare):
                # A model that always has batches prepares once a second: a part takes a tenth of it.
                if not self._is_prepared and batch.taken_ns - self._prepared_ns > 1_000_000_000:
                    while self._running:
                        self._finish_first()
                    self._prepare()
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
            # The engine uses the lanes' memory until its batches end.
            for lane in self._running:
                lane.drop()

    def _finish_done_batches(self) -> bool:
        while self._running:
            if not self._running[0].is_done:
                return True
            self._finish_first()
        return False

    def _prepare(self) -> bool:
        """Prepare more while no batch runs. Returns whether more is left."""
        if not self._is_prepared:
            self._is_prepared, self._prepared_ns = not self._prepare_more(), time.monotonic_ns()
        return not self._is_prepared

    def _finish_first(self) -> None:
        lane = self._running.popleft()
        self._free.append(lane)
        self._engine_free_ns = lane.finish(self._engine_free_ns)

    def _run_each(self, received: ReceivedBatch) -> None:
        """Run each request separately, so that a failure affects only one."""
        results: list[OutgoingResult] = []
        kept: list[object] = []
        for request in self._end.one_by_one(received, received.requests):
            try:
                kept += self._free[0].run_one(request, results)
            except BaseException as error:
                results.append(error_result(batch_error(error, self._log)))
        self._end.finish(received, (received.taken_ns, time.monotonic_ns()), results, kept)


@dataclass(eq=False, repr=False)
class BatchLane:
    """Runs batches from their inputs to their results, one after the other, next to the instance's other lanes."""

    _end: WorkerEnd
    model: InitVar[LoadedModel]
    config: InitVar[ModelConfig]
    _execution: Execution
    _log: logging.Logger

    def __post_init__(self, model: LoadedModel, config: ModelConfig) -> None:
        reads_files = model_reads_files(model)
        memory, padding = self._execution.input_memory, model.signature.padding
        self._gatherer = BatchGatherer(self._end, config, memory, reads_files, padding)
        self._writer = ResultWriter(self._end, model.signature, config.max_batch_size > 0)
        self._received: ReceivedBatch
        self._batch: Batch | None = None
        self._input_end = 0
        self._error: BaseException | None = None

    def start(self, received: ReceivedBatch) -> None:
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
        """Whether `finish` would return without waiting."""
        return self._error is not None or self._execution.is_done

    def finish(self, engine_free_ns: int) -> int:
        """Wait for the batch and send its result. Returns time.monotonic_ns() when the engine ended this batch;
        `engine_free_ns`: when it ended the previous batch."""
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
            end.fail(self._received, (input_end, output_start), batch_error(error, self._log))
        finally:
            writer.give_up_room()
            self._batch = self._error = None
        return output_start

    def run_one(self, request: ReceivedRequest, results: list[OutgoingResult]) -> Sequence[object]:
        """Run one request of a group and add its result. Returns the objects to keep (see BatchResult)."""
        batch = self._gatherer.batch([request])
        batch.room = NO_ROOM
        self._execution.start(batch)
        result = self._execution.result()
        count, begin = len(results), len(results[-1].contents) if results else 0
        self._writer.write(results, batch, result)
        # The next request uses the same memory for its inputs, and the engine may use the same for its outputs.
        contents = results[-1].contents
        begin = begin if len(results) == count else 0
        contents[begin:] = map(bytes, contents[begin:])
        return result.kept

    def drop(self) -> None:
        with suppress(Exception):
            self._execution.result()
        self._writer.give_up_room()


class RequestService(ModelService):
    """Serves a model that sees each request separately: one instance, on the worker's main thread. Users' models may
    use libraries that work only on the thread that loaded them, or only on the main thread, so initialize, execute
    and finalize all run there. A second thread waits for the end on the control socket, and a third reads the back
    channel."""

    model: RequestModel

    def __post_init__(self) -> None:
        load = self._load
        self._end = WorkerEnd(self._instances[0], self._guard)
        self._back = BackChannel(self._end, self._log)
        self._back.start()
        source = RequestModelSource(
            self._source(), load.config_json, self._back, load.plan.instance_name, self._send_metrics
        )
        self.model = importlib.import_module(load.engine).load(source)
        self._own_memory: Callable[[memoryview], Buffer] = memoryview if reads_in_place(self.model) else bytearray

    def warm_up(self, message: WarmUp) -> LoadCheckReport:
        self.model.initialize(message.config, message.config_json)
        for name, batch in self._samples(message):
            responders = [TrialResponder() for _ in batch.request_sizes]
            requests = [
                ModelRequest(inputs, batch.requested_outputs, responder)
                for inputs, responder in zip(split_sample(batch), responders, strict=True)
            ]
            with _naming_samples([name]):
                # A sample fails if its answer, or any of its responses, is an error. RESCHEDULED is a success, because
                # it has run.
                for answer, responder in zip(self.model.execute(requests), responders, strict=True):
                    last = answer if answer is not None else responder.ended.result()
                    if isinstance(last, ServeError):
                        raise last
        return NOT_CHECKED

    def serve(self, ready: Callable[[], None], wait_for_end: Callable[[], bool]) -> None:
        def stop() -> None:
            self._end.stop(wait_for_end())

        control = threading.Thread(target=stop, name="control", daemon=True)
        control.start()
        self._end.freed_memory = _kept_memory()
        ready()
        with self._running_instance():
            for batch in self._end.batches():
                self._run_batch(batch)
        # If the server is gone, this connection may close before the control socket.
        control.join()

    def _run_batch(self, received: ReceivedBatch) -> None:
        input_end = output_start = received.taken_ns
        responders: list[BatchedResponder] = []
        try:
            requests = [self._request(request, responders) for request in received.requests]
            input_end = output_start = time.monotonic_ns()
            answers = (
                [*map(self._run_grouped, self._end.one_by_one(received, requests))]
                if received.is_grouped
                else self._run(requests)
            )
            output_start = time.monotonic_ns()
            settled = [responder.batch_answer(answer) for answer, responder in zip(answers, responders, strict=True)]
            results = answer_results(self._end.sender, settled)
        except BaseException as error:
            for responder in responders:
                responder.abandon()
            self._end.fail(received, (input_end, max(output_start, input_end)), batch_error(error, self._log))
            return
        kept = [answer.slot for answer in settled if isinstance(answer, ModelResponse) and answer.slot is not None]
        self._end.finish(received, (input_end, output_start), results, kept)

    def _request(self, received: ReceivedRequest, responders: list[BatchedResponder]) -> ModelRequest:
        """Return a request whose memory the model may keep and change, unless it reads in place. Always appends its
        responder."""
        responder = self._back.open_request(received.number)
        responders.append(responder)
        layout, heap = received.form.layout, self._end.inputs
        inputs = {
            head.name: Tensor(*head, self._own_memory(content))
            for head, content in zip(layout.inputs, request_inputs(received, self._end.files), strict=True)
        }
        for head in layout.references:
            inputs[head.name] = Tensor(*head, References(inputs[head.name].data))
        details = NO_DETAILS
        if received.details_bytes:
            details = read_details(bytes(heap.view(received.details_place, received.details_bytes)))
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
            layout.reference_outputs,
        )

    def _run_grouped(self, request: ModelRequest) -> Result | None:
        """Run one request of a group, and copy its answer: the model may reuse the memory for the next request."""
        (answer,) = self._run([request])
        if isinstance(answer, ModelResponse):
            return replace(answer, outputs=[tensor.copied() for tensor in answer.outputs])
        return answer

    def _run(self, requests: Sequence[ModelRequest]) -> Sequence[Result | None]:
        """Return the model's answers; if it raises, an error for each request."""
        token = begin_requests(tuple([request.id for request in requests]))
        try:
            answers = self.model.execute(requests)
            if len(answers) != len(requests):
                raise RuntimeError(f"expected {len(requests)} answers, one per request, got {len(answers)}")
        except BaseException as error:
            return [batch_error(error, self._log)] * len(requests)
        finally:
            end_requests(token)
        return answers


@contextmanager
def _naming_samples(names: Iterable[str]) -> Iterator[None]:
    """Name these warm-up samples in errors raised inside. Without names, errors stay unchanged."""
    try:
        yield
    except Exception as error:
        which = " or ".join(f"'{name}'" for name in dict.fromkeys(names))
        # The error of a missing file already names the file.
        if not which or isinstance(error, OSError):
            raise
        fault = error if isinstance(error, ServeError) else ServeError(StatusCode.INTERNAL, error_text(error))
        cause = error.__cause__ if fault is error else error
        raise fault.with_text(f"failed to run warmup sample {which}: {fault.text}") from cause
