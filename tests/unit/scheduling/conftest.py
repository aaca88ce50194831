"""Stand-ins for what lies around a scheduler: the loop, instances that a test answers by hand, responders."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pytest
from support.hand_loop import Flag, HandLoop, Turned
from support.outputs import outputs_from

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import DynamicBatching, InputConfig, ModelConfig, OutputConfig
from rocserve.core.request_form import Member
from rocserve.core.requests import Answer as Answered
from rocserve.core.requests import InferRequest, InferResponse, InputHead, Parameters, RequestHead
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.scheduler import SchedulerParts
from rocserve.workers.instance import WorkerGone
from rocserve.workers.results import Outputs


class Outcome:
    """What an instance reports; doubles the FP32 input, row by row."""

    is_large = False
    slot = None
    parameters: ClassVar[dict[int, Parameters]] = {}

    def __init__(self, batch: Execution, error: ServeError | None, failures: Mapping[int, ServeError]) -> None:
        self.error = error
        self.failures = failures
        self.input_end_ns = time.monotonic_ns()
        self.output_start_ns = self.compute_end_ns = self.input_end_ns + batch.engine_ns
        self._batch = batch

    def outputs_of(self, request_index: int) -> Outputs:
        part = self._batch.requests[request_index][0]
        doubled = np.frombuffer(part, np.float32) * 2
        rows = self._batch.request_sizes[request_index]
        return outputs_from([Tensor("OUT", DataType.FP32, (rows, doubled.size // rows), doubled.tobytes())])


class Execution:
    """A batch that an instance was given."""

    def __init__(self, loop: HandLoop, is_grouped: bool, members: Sequence[Member], on_outcome: Callable) -> None:
        self.requests = [data for _, data, _, _ in members]
        self.request_sizes = tuple(form.layout.rows for form, _, _, _ in members)
        self.shape = (sum(self.request_sizes), *members[0][0].layout.inputs[0].shape[1:])
        self.is_grouped = is_grouped
        self.engine_ns = 1000
        self._on_outcome = loop.turning(on_outcome)

    def finish(self, error: ServeError | None = None, failures: Mapping[int, ServeError] | None = None) -> Outcome:
        outcome = Outcome(self, error, failures or {})
        self._on_outcome(outcome)
        return outcome


class HandInstance:
    """An instance whose batches the test finishes."""

    def __init__(self, loop: HandLoop) -> None:
        self.closed = False
        self.batches_at_once = 1
        self.executions: list[Execution] = []
        self._loop = loop

    def execute(self, is_grouped, members, on_outcome) -> None:
        if self.closed:
            raise WorkerGone("gone")
        self.executions.append(Execution(self._loop, is_grouped, members, on_outcome))


class Answer:
    """A responder that keeps what it was told."""

    def __init__(self, loop: HandLoop, log: list[Answer] | None = None) -> None:
        self.response: InferResponse | None = None
        self.error: ServeError | None = None
        self.leave: Callable[[], None] | None = None
        self.done = Flag(loop)
        self._log = log
        self._loop = loop

    def send(self, answer: Answered, final: bool = True) -> None:
        assert not self.done.is_set(), "answered twice"
        assert answer is not None, "the model is not decoupled"
        if isinstance(answer, ServeError):
            self.error = answer
        else:
            self.response = InferResponse(answer.head, answer.id, [bytes(data) for data in answer.data])
        if self._log is not None:
            self._log.append(self)
        self.done.set()

    def expect_many(self) -> None:
        raise AssertionError("the model is not decoupled")

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self.leave = self._loop.turning(callback)


def config(batching: DynamicBatching | None = None, max_batch_size: int = 8, width: int = -1) -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        inputs=(InputConfig("IN", DataType.FP32, (-1,)),),
        outputs=(OutputConfig("OUT", DataType.FP32, (width,)),),
        dynamic_batching=batching,
    )


class Bench:
    """A scheduler and the means to feed it."""

    def __init__(
        self,
        model: ModelConfig,
        loop: HandLoop,
        limits: QueueLimits,
        instances: int,
        limiter: RateLimiter | None = None,
    ) -> None:
        self.statistics = ModelStatistics()
        self.loop = loop
        log = logging.getLogger("test")
        parts = SchedulerParts(model, 1, self.statistics, loop, limits, log, limiter=limiter)
        self.scheduler = Turned(loop, ModelScheduler(parts))
        self.config = model
        self.validator = RequestValidator(model)
        self.instances = [self.new_instance() for _ in range(instances)]
        for instance in self.instances:
            self.scheduler.attach(instance)
        self.answered: list[Answer] = []
        self._heads: dict[tuple, RequestHead] = {}

    def submit(self, value: float, rows: int = 1, width: int = 2, **more) -> Answer:
        return self.loop.turning(self._submit)(value, rows, width, **more)

    def _submit(
        self, value: float, rows: int = 1, width: int = 2, deadline: float | None = None, **parameters
    ) -> Answer:
        key = (rows, width, tuple(parameters.items()))
        head = self._heads.setdefault(
            key, RequestHead("m", "", (InputHead("IN", "FP32", (rows, width)),), (), parameters)
        )
        data = np.full((rows, width), value, np.float32).tobytes()
        request = InferRequest(head, str(value), [data], deadline)
        answer = Answer(self.loop, self.answered)
        self.validator.validate(request)
        self.scheduler.inner.submit(request, answer)
        return answer

    def submit_in_one_turn(self, *values: float) -> None:
        """Single rows, before the loop's turn ends."""
        self.loop.turning(lambda: [self._submit(value) for value in values])()

    def new_instance(self) -> HandInstance:
        """One that the scheduler does not know yet."""
        return HandInstance(self.loop)

    @property
    def executions(self) -> list[Execution]:
        return self.instances[0].executions


@pytest.fixture
def loop() -> HandLoop:
    return HandLoop()


@pytest.fixture
def make_bench(loop: HandLoop):
    def make(
        batching: DynamicBatching | None = None,
        max_batch_size: int = 8,
        limits: QueueLimits | None = None,
        instances: int = 1,
        width: int = -1,
        limiter: RateLimiter | None = None,
    ) -> Bench:
        return Bench(config(batching, max_batch_size, width), loop, limits or QueueLimits(), instances, limiter)

    return make


@pytest.fixture
def wait_for(loop: HandLoop):
    """Wait until a condition holds."""
    return loop.wait_for
