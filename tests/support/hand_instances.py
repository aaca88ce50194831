"""Instances of a model that a test answers by hand, and responders that record answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.parameters import Parameters
from rocserve.core.requests import Member
from rocserve.core.responses import Answer as Answered
from rocserve.core.responses import InferResponse
from rocserve.core.tensors import Tensor
from rocserve.workers.instance import WorkerGone
from rocserve.workers.results import Outputs
from support.hand_loop import Flag, HandLoop
from support.outputs import outputs_from


class Outcome:
    """What an instance reports about a batch."""

    is_large = False
    slot = None
    parameters: ClassVar[dict[int, Parameters]] = {}

    def __init__(
        self, batch: Execution, error: ServeError | None, failures: Mapping[int, ServeError], begun: int | None = None
    ) -> None:
        self.error = error
        self.begun = begun
        self.failures = failures
        self.input_end_ns = time.monotonic_ns()
        self.output_start_ns = self.compute_end_ns = self.input_end_ns + batch.engine_ns
        self._batch = batch

    def outputs_of(self, request_index: int) -> Outputs:
        return outputs_from(self._batch.outputs(request_index))


class Execution:
    """A batch that an instance has received. The model doubles its FP32 input, row by row."""

    engine_ns = 1000

    def __init__(self, loop: HandLoop, is_grouped: bool, members: Sequence[Member], on_outcome: Callable) -> None:
        self.is_grouped = is_grouped
        self._on_outcome = loop.turning(on_outcome)
        self.read(members)

    def read(self, members: Sequence[Member]) -> None:
        self.requests = [data for _, data, _, _ in members]
        self.request_sizes = tuple(form.layout.rows for form, _, _, _ in members)
        self.shape = (sum(self.request_sizes), *members[0][0].layout.inputs[0].shape[1:])

    def outputs(self, request_index: int) -> list[Tensor]:
        doubled = np.frombuffer(self.requests[request_index][0], np.float32) * 2
        rows = self.request_sizes[request_index]
        return [Tensor("OUT", DataType.FP32, (rows, doubled.size // rows), doubled.tobytes())]

    def finish(
        self,
        error: ServeError | None = None,
        failures: Mapping[int, ServeError] | None = None,
        begun: int | None = None,
    ) -> Outcome:
        outcome = Outcome(self, error, failures or {}, begun)
        self._on_outcome(outcome)
        return outcome


class HandInstance:
    """An instance whose batches the test finishes."""

    execution: type[Execution] = Execution
    device = None
    name = ""

    def __init__(self, loop: HandLoop) -> None:
        self.closed = False
        self.batches_at_once = 1
        self.executions: list[Any] = []
        """The batches that the instance has received, each as an object of the type `execution`."""
        self._loop = loop

    def execute(self, is_grouped, members, on_outcome) -> None:
        if self.closed:
            raise WorkerGone("gone")
        self.executions.append(self.execution(self._loop, is_grouped, members, on_outcome))


class Answer:
    """A responder that records its answer."""

    def __init__(self, loop: HandLoop, log: list[Answer] | None = None) -> None:
        self.response: InferResponse | None = None
        self.error: ServeError | None = None
        self.leave: Callable[[], None] | None = None
        self.done = Flag(loop)
        self._log = log
        self._loop = loop

    @property
    def number(self) -> float:
        """The first element of the FP32 answer, which must not be an error."""
        assert self.response is not None, self.error
        return float(np.frombuffer(self.response.outputs[0].data, np.float32)[0])

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


class Nobody:
    """A client that never looks at its answer."""

    def expect_many(self) -> None: ...

    def send(self, answer: Answered, final: bool = True) -> None: ...

    def watch_cancellation(self, callback: Callable[[], None]) -> None: ...
