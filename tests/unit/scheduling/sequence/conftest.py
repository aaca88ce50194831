"""A sequence scheduler on instances that a test answers by hand."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support import hand_instances
from support.hand_loop import HandLoop, Turned
from support.waiting import PATIENCE_SECONDS

from rocserve.core.datatypes import DataType
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import (
    ControlKind,
    InputConfig,
    InstanceRateLimiter,
    ModelConfig,
    OutputConfig,
    SequenceBatching,
    SequenceControl,
    SequenceState,
)
from rocserve.core.requests import InferRequest, InputHead, Member, RequestHead
from rocserve.core.sequences import SequenceTag
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import Tensor
from rocserve.core.validation import RequestValidator
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.scheduler import SchedulerParts
from rocserve.scheduling.sequence.router import SequenceRouter
from rocserve.scheduling.sequence.scheduler import SequenceScheduler

CONTROLS = (
    SequenceControl("START", ControlKind.START, DataType.INT32),
    SequenceControl("END", ControlKind.END, DataType.INT32),
    SequenceControl("READY", ControlKind.READY, DataType.INT32),
    SequenceControl("ID", ControlKind.CORRELATION_ID, DataType.INT64),
)
STATE = SequenceState("STATE_IN", "STATE_OUT", DataType.INT32, (-1,))


@dataclass
class Row:
    """What the model sees of one row."""

    value: int
    start: int
    end: int
    ready: int
    sequence: int
    state: list[int] | None = None


def read_row(member: Member) -> Row:
    form, data = member[:2]
    given = dict(zip([head.name for head in form.layout.inputs], data, strict=True))
    state = np.frombuffer(given["STATE_IN"], np.int32).tolist() if "STATE_IN" in given else None
    numbers = [int.from_bytes(given[name], "little") for name in ("IN", "START", "END", "READY", "ID") if name in given]
    return Row(*numbers, state=state)


class Execution(hand_instances.Execution):
    """A batch of a model whose OUT is the value, and whose STATE_OUT is STATE_IN followed by the value."""

    engine_ns = 0

    def read(self, members: Sequence[Member]) -> None:
        self.rows = [read_row(member) for member in members]

    def outputs(self, request_index: int) -> list[Tensor]:
        row = self.rows[request_index]
        outputs = [Tensor("OUT", DataType.INT32, (1, 1), np.int32(row.value).tobytes())]
        if row.state is not None:
            state = np.array([*row.state, row.value], np.int32)
            outputs.append(Tensor("STATE_OUT", DataType.INT32, (1, state.size), state.tobytes()))
        return outputs


class HandInstance(hand_instances.HandInstance):
    execution = Execution
    rate_limiter: InstanceRateLimiter | None = None

    @property
    def last(self) -> Execution:
        return self.executions[-1]


class Answer(hand_instances.Answer):
    """An answer with its one value."""

    @property
    def value(self) -> int | None:
        return None if self.response is None else int.from_bytes(self.response.outputs[0].data, "little")

    @property
    def names(self) -> list[str]:
        return [] if self.response is None else [tensor.name for tensor in self.response.outputs]

    @property
    def text(self) -> str:
        """The text of the error, now or later."""
        assert self.done.wait(PATIENCE_SECONDS)
        assert self.error is not None
        return self.error.text


def config(batching: SequenceBatching, max_batch_size: int) -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        inputs=(InputConfig("IN", DataType.INT32, (1,)),),
        outputs=(OutputConfig("OUT", DataType.INT32, (1,)),),
        sequence_batching=batching,
    )


class Bench:
    """A scheduler and the means to feed it."""

    def __init__(
        self,
        loop: HandLoop,
        batching: SequenceBatching,
        instances: int = 1,
        limits: QueueLimits | None = None,
        router: SequenceRouter | None = None,
        initial: Mapping[str, bytes] | None = None,
        limiter: RateLimiter | None = None,
        limits_of_instances: InstanceRateLimiter | None = None,
        make_instance: Callable[[HandLoop], Any] = HandInstance,
        max_batch_size: int = 4,
        answers_requests: bool = False,
    ) -> None:
        model = config(batching, max_batch_size)
        self.statistics = ModelStatistics()
        self.loop = loop
        parts = SchedulerParts(
            model,
            1,
            self.statistics,
            loop,
            limits or QueueLimits(),
            logging.getLogger("test"),
            answers_requests,
            limiter=limiter,
            router=router or SequenceRouter(),
            initial_states=initial or {},
        )
        self.scheduler = Turned(loop, SequenceScheduler(parts))
        self.validator = RequestValidator(model)
        self.head = RequestHead("m", "", (InputHead("IN", "INT32", (1, 1)),))
        self.instances = [make_instance(loop) for _ in range(instances)]
        for instance in self.instances:
            instance.rate_limiter = limits_of_instances
            self.scheduler.attach(instance)

    def ask(self, sequence: int | str, value: int = 0, **more) -> Answer:
        return self.loop.turning(self.ask_in_turn)(sequence, value, **more)

    def ask_in_turn(
        self,
        sequence: int | str,
        value: int = 0,
        start: bool = False,
        end: bool = False,
        deadline: float | None = None,
        timeout: int = 0,
    ) -> Answer:
        head = self.head
        if timeout:
            head = RequestHead("m", "", head.inputs, (), {"timeout": timeout})
        tag = SequenceTag(sequence, start, end)
        request = InferRequest(head, "r", [np.int32(value).tobytes()], deadline, sequence=tag)
        answer = Answer(self.loop)
        self.validator.validate(request)
        self.scheduler.inner.submit(request, Exchange(answer))
        return answer

    @property
    def instance(self) -> HandInstance:
        return self.instances[0]

    @property
    def rows(self) -> list[Row]:
        """The rows of the last batch."""
        return self.instance.last.rows


@pytest.fixture
def make_bench(loop: HandLoop):
    def make(**settings) -> Bench:
        own = inspect.signature(Bench).parameters
        of_bench = {name: settings.pop(name) for name in own if name in settings}
        batching = {"max_sequence_idle_microseconds": 10_000_000, "controls": CONTROLS, **settings}
        return Bench(loop, SequenceBatching(**batching), **of_bench)

    return make
