"""Adds the inputs of sequences, controls and states, to their requests: from there on they are like all others."""

from __future__ import annotations

import math
from dataclasses import replace

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import InferResponse
from rocserve.core.tensors import Buffer
from rocserve.core.validation import InputPlan, RequestPlan
from rocserve.scheduling.sequence.controls import ControlTensors
from rocserve.scheduling.sequence.slots import SequenceRequest, Slot
from rocserve.scheduling.sequence.states import StateKeeper

_REMEMBERED_PLANS = 1024


class SequenceInputs:
    """What the model gets of each request, and in the rows of no request."""

    def __init__(self, controls: ControlTensors, keeper: StateKeeper, batches: bool) -> None:
        self._controls = controls
        self._keeper = keeper
        self._lead = 1 if batches else 0
        self._plans: dict[tuple[RequestPlan, tuple[tuple[int, ...], ...]], RequestPlan] = {}
        self._zero_bytes = b""
        """As many as the largest input of a row of no request had."""

    def begin(self, request: SequenceRequest, slot: Slot) -> None:
        """The request is the slot's next: it changes the states that are there now, or begins them."""
        if request.tag.starts or slot.states is None:
            slot.states = self._keeper.begin()
        request.slot = slot
        request.states = slot.states

    def plan(self, request: SequenceRequest) -> RequestPlan:
        """The plan of a request that `begin` was called for, with all that the model gets."""
        assert request.states is not None
        shapes = request.states.shapes
        plan = self._plans.get((request.plan, shapes))
        if plan is None:
            plan = self._make(request.plan, shapes)
            if len(self._plans) >= _REMEMBERED_PLANS:
                self._plans.clear()
            self._plans[request.plan, shapes] = plan
        return plan

    def add_to(self, request: SequenceRequest) -> None:
        """Make it the request that the model gets. `begin` was called for it."""
        assert request.states is not None
        plan = self.plan(request)
        request.bare = (request.data, request.plan)
        states = [value.data for value in request.states.values]
        request.data = [*request.data, *self._controls.of(request.tag), *states]
        request.sequence = request.tag
        request.plan = plan

    def absent(self, model: SequenceRequest) -> SequenceRequest:
        """What stands in the place of a request that is not there, in a batch with `model`, one that has them."""
        plan = model.plan
        own = plan.inputs[: len(plan.inputs) - len(self._controls.inputs) - len(self._keeper.states)]
        data = [self._zeros(entry) for entry in own]
        data += self._controls.absent
        data += [self._zeros(entry) for entry in plan.inputs[len(data) :]]
        request = SequenceRequest(model.head, "", data)
        request.taken(plan, NOBODY, model.queue_start_ns)
        return request

    def _zeros(self, entry: InputPlan) -> Buffer:
        """A BYTES element of zeros is an empty one, behind the 4 bytes of its length."""
        nbytes = entry.element_count * (entry.datatype.itemsize or 4)
        if nbytes > len(self._zero_bytes):
            self._zero_bytes = bytes(nbytes)
        return memoryview(self._zero_bytes)[:nbytes]

    def _make(self, plan: RequestPlan, shapes: tuple[tuple[int, ...], ...]) -> RequestPlan:
        states = tuple(
            _state_plan(state.input_name, state.datatype, shape)
            for state, shape in zip(self._keeper.states, shapes, strict=True)
        )
        kept = tuple(state.output_name for state in self._keeper.states if state.output_name not in plan.outputs)
        added = (*self._controls.inputs, *states)
        return replace(
            plan,
            inputs=(*plan.inputs, *added),
            batch_key=(*plan.batch_key, *((entry.name, entry.datatype, entry.shape[self._lead :]) for entry in added)),
            outputs=(*plan.outputs, *kept),
        )


def _state_plan(name: str, datatype: DataType, shape: tuple[int, ...]) -> InputPlan:
    count = math.prod(shape)
    return InputPlan(name, datatype, shape, count, count * datatype.itemsize if datatype.itemsize else -1)


class _Nobody:
    """The responder of a row that is of no request."""

    def expect_many(self) -> None: ...

    def send(self, response: InferResponse, final: bool = True) -> None: ...

    def end(self) -> None: ...

    def fail(self, error: ServeError, final: bool = True) -> None: ...

    def watch_cancellation(self, callback: object) -> None: ...


NOBODY = _Nobody()
