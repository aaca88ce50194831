"""Stand-ins for the surroundings of a scheduler: the loop, instances that a test answers by hand, responders."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
from support.hand_instances import Answer, Execution, HandInstance
from support.hand_loop import HandLoop, Turned

from rocserve.core.datatypes import DataType
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import DynamicBatching, InputConfig, ModelConfig, OutputConfig
from rocserve.core.padding import NO_PADDING, Padding
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.batch_policy import CALM_REQUESTS
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.scheduler import SchedulerParts


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
        padding: Padding = NO_PADDING,
    ) -> None:
        self.statistics = ModelStatistics()
        self.loop = loop
        log = logging.getLogger("test")
        parts = SchedulerParts(model, 1, self.statistics, loop, limits, log, limiter=limiter, padding=padding)
        self.scheduler = Turned(loop, ModelScheduler(parts))
        self.config = model
        self.validator = RequestValidator(model, padding=padding)
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
        self.scheduler.inner.submit(request, Exchange(answer))
        return answer

    def submit_in_one_turn(self, *values: float) -> None:
        """Submit single rows before the loop's turn ends."""
        self.loop.turning(lambda: [self._submit(value) for value in values])()

    def warm_up(self, rows: int, engine_ns: int = Execution.engine_ns) -> None:
        """Run requests one by one: the model must first prove that it is fast and ends no worker."""
        for _ in range(CALM_REQUESTS):
            self.submit(0.0, rows)
            self.executions[-1].engine_ns = engine_ns
            self.executions[-1].finish()

    def finish_all(self, engine_ns: int = Execution.engine_ns) -> list[tuple[int, ...]]:
        """Finish the first instance's batches until none is left. Returns the rows of the requests of each."""
        sizes = []
        for execution in self.executions:
            execution.engine_ns = engine_ns
            execution.finish()
            sizes.append(execution.request_sizes)
        return sizes

    def new_instance(self) -> HandInstance:
        """An instance that the scheduler does not know yet."""
        return HandInstance(self.loop)

    @property
    def executions(self) -> list[Execution]:
        return self.instances[0].executions


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of this process in nanoseconds, which passes only when the test moves it or waits."""
    now_ns = [100_000_000_000]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])
    monkeypatch.setattr(time, "monotonic", lambda: now_ns[0] / 1e9)
    return now_ns


@pytest.fixture
def loop(clock: list[int]) -> HandLoop:
    def sleep(seconds: float) -> None:
        clock[0] += int(seconds * 1e9)

    return HandLoop(sleep)


@pytest.fixture
def make_bench(loop: HandLoop):
    def make(
        batching: DynamicBatching | None = None,
        max_batch_size: int = 8,
        limits: QueueLimits | None = None,
        instances: int = 1,
        width: int = -1,
        limiter: RateLimiter | None = None,
        padding: Padding = NO_PADDING,
    ) -> Bench:
        model = config(batching, max_batch_size, width)
        return Bench(model, loop, limits or QueueLimits(), instances, limiter, padding)

    return make


@pytest.fixture
def wait_for(loop: HandLoop):
    """Wait until a condition holds."""
    return loop.wait_for
