"""The scheduler of an ensemble: runs its members' steps as their tensors come to be.

By tensor name, as Triton does: a step runs when all the tensors that it reads exist, independent steps run at once,
only steps that a wanted output needs run, and a tensor is let go at its last reader. Members are looked up by name for
each request, so a member that was replaced serves the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from rocserve.core.classification import classify
from rocserve.core.dispatch import dispatch
from rocserve.core.errors import ServeError, internal, unimplemented
from rocserve.core.model_config import EnsembleStep, ModelConfig, OutputConfig
from rocserve.core.requests import InferRequest, InferResponse, Parameters
from rocserve.core.serving import Responder, ServingTableHolder, VersionEnding
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.core.validation import RequestPlan, RequestValidator
from rocserve.scheduling.cached_answers import CachedAnswers
from rocserve.scheduling.ensemble_graph import EnsembleGraph, EnsemblePlan, StepHeads


class EnsembleVersion:
    """Implements core.serving.ServedVersion for an ensemble."""

    def __init__(
        self,
        config: ModelConfig,
        config_message: bytes,
        version: int,
        statistics: ModelStatistics,
        tables: ServingTableHolder,
        answers: CachedAnswers | None = None,
    ) -> None:
        """`answers`: those that may be given again; None = each request is run."""
        self.name = config.name
        self.version = version
        self.config = config
        self.config_message = config_message
        self.statistics = statistics
        self.tables = tables
        self.answers = answers
        self.graph = EnsembleGraph(config)
        self.heads = StepHeads()
        self.outputs = {output.name: output for output in config.outputs}
        self._validator = RequestValidator(config)
        self._lock = threading.Lock()
        self._running = 0
        self._drained: Callable[[], None] | None = None
        self._closed = False

    def infer(self, request: InferRequest, responder: Responder) -> None:
        """See core.serving.ServedVersion."""
        started_ns = time.monotonic_ns()
        try:
            plan = self._validator.validate(request)
        except ServeError as error:
            self.statistics.record_failure(started_ns, time.monotonic_ns())
            responder.fail(error)
            return
        with self._lock:
            if self._closed:
                raise VersionEnding
            self._running += 1
        if self.answers is not None:
            keeper = self.answers.look_up(request, plan, responder)
            if keeper is None:
                self.run_ended()
                return
            responder = keeper
        EnsembleRun(self, request, plan, responder, started_ns).start()

    def close(self, drained: Callable[[], None]) -> None:
        """Take no more requests; call back, once and from any thread, when all that were taken are answered."""
        with self._lock:
            self._closed = True
            self._drained = drained
        self._report_drained()

    def run_ended(self) -> None:
        with self._lock:
            self._running -= 1
        if self._drained is not None:
            self._report_drained()

    def _report_drained(self) -> None:
        with self._lock:
            if self._drained is None or self._running:
                return
            drained, self._drained = self._drained, None
        drained()

    def labels_of(self, output: OutputConfig) -> tuple[str, ...]:
        """The labels of an output: the ensemble's own, or those of the member's output that it comes from."""
        if output.labels:
            return output.labels
        for step in self.config.ensemble_steps:
            for member_output, tensor in step.output_map.items():
                if tensor != output.name:
                    continue
                member = self.tables.table.models.get(step.model_name)
                if member is not None and member.latest is not None:
                    return _labels(member.latest.config, member_output)
        return ()


class EnsembleRun:
    """One request in an ensemble. Its lock guards the tensors and counts; steps are answered on several threads."""

    def __init__(
        self, ensemble: EnsembleVersion, request: InferRequest, plan: RequestPlan, responder: Responder, started_ns: int
    ) -> None:
        self._ensemble = ensemble
        self._config = ensemble.config
        self._request = request
        self._plan = plan
        self._responder = responder
        self._started_ns = started_ns
        self._graph: EnsemblePlan = ensemble.graph.plan(plan.outputs)
        self._lock = threading.Lock()
        self._tensors: dict[str, Tensor] = {}
        self._readers_left = dict(self._graph.reader_counts)
        self._waits = {index: set(tensors) for index, tensors in self._graph.reads.items()}
        self._steps_running = 0
        self._ended = False
        self._cancelled = False
        self._on_cancel: list[Callable[[], None]] | None = None

    def start(self) -> None:
        given = [
            Tensor(entry.name, entry.datatype, head.shape, data)
            for entry, head, data in zip(self._plan.inputs, self._request.head.inputs, self._request.data, strict=True)
        ]
        self._advance(given)

    def step_sent(self, step: EnsembleStep, response: InferResponse) -> None:
        """A member's answer; its tensors are copied, for their memory is the worker's."""
        made = [
            Tensor(step.output_map[tensor.name], tensor.datatype, tensor.shape, bytes(tensor.data))
            for tensor in response.outputs
            if tensor.name in step.output_map
        ]
        self._advance(made, finished_steps=1)

    def step_failed(self, error: ServeError) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._ensemble.statistics.record_failure(self._started_ns, time.monotonic_ns())
        self._responder.fail(ServeError(error.code, f"in ensemble '{self._config.name}', {error.text}"))
        self._ensemble.run_ended()

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Several steps may ask; whoever waits for the ensemble is asked once."""
        with self._lock:
            cancelled, first = self._cancelled, self._on_cancel is None
            if self._on_cancel is None:
                self._on_cancel = []
            self._on_cancel.append(callback)
        if cancelled:
            callback()
        elif first:
            self._responder.watch_cancellation(self._cancel)

    def _cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            callbacks = list(self._on_cancel or ())
        for callback in callbacks:
            callback()

    def _advance(self, made: list[Tensor], finished_steps: int = 0) -> None:
        """Take new tensors in, start the steps that waited for nothing else, answer when all wanted ones are there."""
        is_stuck = False
        runnable: list[tuple[EnsembleStep, InferRequest]] = []
        missing: list[str] = []
        try:
            with self._lock:
                if self._ended:
                    return
                for tensor in made:
                    if self._readers_left.get(tensor.name):
                        self._tensors[tensor.name] = tensor
                for tensor in made:
                    for index in self._graph.readers.get(tensor.name, ()):
                        self._waits[index].discard(tensor.name)
                        if not self._waits[index]:
                            step = self._config.ensemble_steps[index]
                            runnable.append((step, self._step_request(index, step)))
                self._steps_running += len(runnable) - finished_steps
                missing = [name for name in self._plan.outputs if name not in self._tensors]
                is_stuck = not self._steps_running
                if not missing:
                    self._ended = True
        except ServeError as error:
            self.step_failed(error)
            return
        if not missing:
            self._answer()
            return
        if is_stuck:
            self.step_failed(internal(f"no step gave the output(s) {', '.join(missing)}"))
            return
        for step, request in runnable:
            dispatch(self._ensemble.tables, request, _StepResponder(self, step))

    def _step_request(self, index: int, step: EnsembleStep) -> InferRequest:
        """Under the lock: the request to the step's member; the tensors that it read last are let go."""
        version = "" if step.model_version < 0 else str(step.model_version)
        member = self._ensemble.tables.table.find(step.model_name, version).config
        tensors = [self._tensors[name] for name in step.input_map.values()]
        inputs = tuple(
            (name, tensor.datatype.value, _member_shape(tensor.shape, member, name))
            for name, tensor in zip(step.input_map, tensors, strict=True)
        )
        head = self._ensemble.heads.head(
            step.model_name, version, inputs, self._graph.wanted_from[index], self._request.head.parameters
        )
        for name in self._graph.reads[index]:
            self._release(name)
        request = self._request
        return InferRequest(
            head, request.id, [tensor.data for tensor in tensors], request.deadline, sequence=request.sequence
        )

    def _release(self, name: str) -> None:
        self._readers_left[name] -= 1
        if not self._readers_left[name]:
            del self._tensors[name]

    def _answer(self) -> None:
        now = time.monotonic_ns()
        try:
            outputs = [self._output(name) for name in self._plan.outputs]
        except ServeError as error:
            self._ensemble.statistics.record_failure(self._started_ns, now)
            self._responder.fail(error)
        else:
            self._ensemble.statistics.record_ensemble(self._started_ns, now, self._plan.batch_size)
            parameters = _sequence_parameters(self._request.head.parameters)
            response = InferResponse(
                self._config.name, str(self._ensemble.version), self._request.id, outputs, parameters
            )
            self._responder.send(response)
        self._ensemble.run_ended()

    def _output(self, name: str) -> Tensor:
        tensor, config = self._tensors[name], self._ensemble.outputs[name]
        batching = self._config.max_batch_size > 0
        rank = len(config.dims) + (1 if batching else 0)
        shape = tensor.shape
        if len(shape) == rank - 1:
            shape = (1, *shape)
        elif len(shape) == rank + 1 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != rank:
            raise internal(
                f"in ensemble '{self._config.name}', output '{name}' has shape {list(tensor.shape)}, but the ensemble"
                f" declares {len(config.dims)} dimensions{' behind the batch' if batching else ''}"
            )
        whole = Tensor(name, tensor.datatype, shape, tensor.data)
        count = self._plan.classifications.get(name, 0)
        return classify(whole, count, self._ensemble.labels_of(config), batching) if count else whole


class _StepResponder:
    """Leads a member's answer back into the run."""

    __slots__ = ("_run", "_step")

    def __init__(self, run: EnsembleRun, step: EnsembleStep) -> None:
        self._run = run
        self._step = step

    def expect_many(self) -> None:
        raise unimplemented(
            f"model '{self._step.model_name}' is decoupled; a step of an ensemble must be answered exactly once"
        )

    def send(self, response: InferResponse, final: bool = True) -> None:
        self._run.step_sent(self._step, response)

    def end(self) -> None:
        self._run.step_failed(internal(f"model '{self._step.model_name}' sent no response"))

    def fail(self, error: ServeError, final: bool = True) -> None:
        self._run.step_failed(error)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._run.watch_cancellation(callback)


def _member_shape(shape: tuple[int, ...], member: ModelConfig, input_name: str) -> tuple[int, ...]:
    """A tensor's shape as the member expects it: a batch dimension of 1 is added, or dropped, where they differ."""
    dims: Mapping[str, int] = {entry.name: len(entry.dims) for entry in member.inputs}
    rank = dims.get(input_name)
    if rank is None:
        return shape
    if member.max_batch_size > 0 and len(shape) == rank:
        return (1, *shape)
    if member.max_batch_size == 0 and len(shape) == rank + 1 and shape[0] == 1:
        return shape[1:]
    return shape


def _sequence_parameters(asked: Parameters) -> Parameters:
    """Triton says in the answer of every ensemble which sequence the request was of; 0: of none."""
    return {
        "sequence_id": asked.get("sequence_id", 0),
        "sequence_start": bool(asked.get("sequence_start", False)),
        "sequence_end": bool(asked.get("sequence_end", False)),
    }


def _labels(config: ModelConfig, output_name: str) -> tuple[str, ...]:
    for output in config.outputs:
        if output.name == output_name:
            return output.labels
    return ()
