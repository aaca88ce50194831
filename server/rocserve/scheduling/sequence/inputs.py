"""Adds a sequence's controls and states to its requests as inputs, and takes its states out of the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.exchange import Cancellable, Exchange, Hook, HookOrder
from rocserve.core.memo import Memo
from rocserve.core.model_config import (
    ControlKind,
    ModelConfig,
    SequenceBatching,
    SequenceControl,
    SequenceState,
    control_inputs,
)
from rocserve.core.requests import InputPlan, RequestPlan
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.sequences import SequenceId, SequenceTag
from rocserve.core.tensors import Buffer, Tensor, encode_bytes_elements
from rocserve.scheduling.sequence.slots import LiveSequence, SequenceInstance, SequenceRequest


def _initial(state: SequenceState, lead: tuple[int, ...], content: bytes | None) -> Tensor:
    """Return a state's initial value. A dimension of any size is 1 until the model returns the state."""
    dims = state.initial_states[0].dims if state.initial_states else state.dims
    shape = (*lead, *(1 if size == -1 else size for size in dims))
    if content is None:
        # A zero BYTES element is 4 bytes of length 0.
        content = bytes(math.prod(shape) * (state.datatype.itemsize or 4))
    return Tensor(state.output_name, state.datatype, shape, content)


class ControlTensors:
    """Makes the control inputs of requests; each has one value. A padding row is a row of no request."""

    def __init__(self, batching: SequenceBatching, batches: bool) -> None:
        shape = (1, 1) if batches else (1,)
        self.inputs = tuple(
            InputPlan(tensor.name, tensor.datatype, shape, 1, tensor.datatype.itemsize or -1)
            for tensor in control_inputs(batching)
        )
        self._controls = batching.controls
        self._flags = {
            (starts, ends): [_value(control, starts, ends) for control in self._controls]
            for starts in (False, True)
            for ends in (False, True)
        }
        self._identities = [
            (place, control.datatype)
            for place, control in enumerate(self._controls)
            if control.kind is ControlKind.CORRELATION_ID
        ]
        self.padding: Sequence[Buffer] = [
            bytes(control.datatype.itemsize or 4)
            if control.kind is ControlKind.CORRELATION_ID
            else np.array(control.no, control.datatype.numpy_dtype).tobytes()
            for control in self._controls
        ]
        """The data of the control inputs in a padding row."""

    @property
    def correlation_id(self) -> InputPlan | None:
        """The input for the sequence's id; None = the model has none."""
        return next((self.inputs[place] for place, _ in self._identities), None)

    def of(self, tag: SequenceTag) -> list[Buffer]:
        data: list[Buffer] = list(self._flags[tag.starts, tag.ends])
        for place, datatype in self._identities:
            data[place] = _identity(tag.id, datatype)
        return data


def _value(control: SequenceControl, starts: bool, ends: bool) -> Buffer:
    if control.kind is ControlKind.CORRELATION_ID:
        return b""
    is_set = {ControlKind.START: starts, ControlKind.END: ends, ControlKind.READY: True}[control.kind]
    return np.array(control.yes if is_set else control.no, control.datatype.numpy_dtype).tobytes()


def _identity(sequence: SequenceId, datatype: DataType) -> Buffer:
    if datatype is DataType.BYTES:
        return encode_bytes_elements([str(sequence)])
    assert isinstance(sequence, int), "checked when the request was taken"
    # As in Triton, a control narrower than 8 bytes gets the low bytes.
    return sequence.to_bytes(8, "little")[: datatype.itemsize]


class SequenceInputs:
    """Makes the model's inputs of requests and padding rows, and keeps the states of sequences."""

    def __init__(self, config: ModelConfig, batching: SequenceBatching, initial: Mapping[str, bytes]) -> None:
        """`initial`: input name -> content of the file with which the state begins."""
        self._lead = (1,) if config.max_batch_size > 0 else ()
        self.controls = ControlTensors(batching, config.max_batch_size > 0)
        self.states = batching.states
        self._initial = [_initial(state, self._lead, initial.get(state.input_name)) for state in self.states]
        self._places = {state.output_name: (place, state.datatype) for place, state in enumerate(self.states)}
        self._plans = Memo[tuple[RequestPlan, tuple[tuple[int, ...], ...]], RequestPlan]()
        self._zero_bytes = b""
        """Zeros that all inputs of padding rows share, as many as the largest needed."""
        self._no_exchange = Exchange(_Nobody())
        """Of all padding rows: it has ended, so nothing answers them."""
        Exchange.note_answered_elsewhere([self._no_exchange])

    def ready_requests(self, instance: SequenceInstance) -> Iterator[SequenceRequest]:
        """Yield the next requests of an instance's ready slots, with controls and states added."""
        for slot in instance.ready:
            assert slot.live is not None, "it has a request"
            request = slot.live.queue[0]
            if request.original is None:
                self._add_to(request, slot.live)
            yield request

    def _add_to(self, request: SequenceRequest, live: LiveSequence) -> None:
        """Add controls and states to a request; its sequence begins new states if it starts."""
        if request.tag.starts or live.states is None:
            live.states = list(self._initial)
        plan, shapes = request.plan, tuple([value.shape for value in live.states])
        request.original = (request.data, plan)
        request.data = [*request.data, *self.controls.of(request.tag), *[value.data for value in live.states]]
        request.sequence = request.tag
        full = self._plans.get((plan, shapes))
        if full is None:
            full = self._make(plan, shapes)
            if full.is_small:
                self._plans.keep((plan, shapes), full)
        request.plan = full

    def take_states(self, outputs: Sequence[Tensor], states: list[Tensor]) -> None:
        """Replace the states that are among the outputs; none if it raises ServeError (INTERNAL) for a wrong
        datatype."""
        found: list[tuple[int, Tensor]] = []
        for tensor in outputs:
            place, datatype = self._places.get(tensor.name, (-1, tensor.datatype))
            if place < 0:
                continue
            if tensor.datatype is not datatype:
                raise internal(
                    f"the model returned state '{tensor.name}' as {tensor.datatype.value}, expected"
                    f" {datatype.value} as in its configuration"
                )
            found.append((place, tensor.copied()))
        for place, value in found:
            states[place] = value

    def padding_row(self, model: SequenceRequest) -> SequenceRequest:
        """Make a padding row like `model`, a request of the same batch."""
        plan = model.plan
        own = plan.inputs[: len(plan.inputs) - len(self.controls.inputs) - len(self.states)]
        data = [self._zeros(entry) for entry in own]
        data += self.controls.padding
        data += [self._zeros(entry) for entry in plan.inputs[len(data) :]]
        request = SequenceRequest(model.head, "", data)
        request.plan, request.nbytes = plan, sum(map(len, data))
        request.exchange, request.queue_start_ns = self._no_exchange, model.queue_start_ns
        return request

    def _zeros(self, entry: InputPlan) -> Buffer:
        """Return the zeros of an input. A zero BYTES element is 4 bytes of length 0."""
        nbytes = entry.element_count * (entry.datatype.itemsize or 4)
        if nbytes > len(self._zero_bytes):
            self._zero_bytes = bytes(nbytes)
        return memoryview(self._zero_bytes)[:nbytes]

    def _make(self, plan: RequestPlan, shapes: tuple[tuple[int, ...], ...]) -> RequestPlan:
        states: list[InputPlan] = []
        for state, shape in zip(self.states, shapes, strict=True):
            count, itemsize = math.prod(shape), state.datatype.itemsize
            nbytes = count * itemsize if itemsize else -1
            states.append(InputPlan(state.input_name, state.datatype, shape, count, nbytes))
        kept = tuple(state.output_name for state in self.states if state.output_name not in plan.outputs)
        added = (*self.controls.inputs, *states)
        return replace(
            plan,
            inputs=(*plan.inputs, *added),
            batch_key=(
                *plan.batch_key,
                *((entry.name, entry.datatype, entry.shape[len(self._lead) :]) for entry in added),
            ),
            outputs=(*plan.outputs, *kept),
        )


class _Nobody(Cancellable):
    """The client of padding rows. Implements core.exchange.Responder."""

    def expect_many(self) -> None: ...

    def send(self, answer: Answer, final: bool = True) -> None: ...


class StatesHook(Hook):
    """Takes the states out of answers, and reports the last answer. For models with states or iterative sequences."""

    __slots__ = ("_inputs", "_on_ended", "request")

    order = HookOrder.STATES

    def __init__(
        self, request: SequenceRequest, inputs: SequenceInputs, on_ended: Callable[[SequenceRequest], None]
    ) -> None:
        """`on_ended`: called before the last answer is sent."""
        self.request = request
        """The request as it was last queued."""
        self._inputs = inputs
        self._on_ended = on_ended

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer:
        request = self.request
        if (
            request.live is not None
            and request.live.states is not None
            and request.original is not None
            and self._inputs.states
            and isinstance(answer, InferResponse)
        ):
            # Some outputs are only states: the client did not ask for them.
            try:
                self._inputs.take_states(answer.outputs, request.live.states)
            except ServeError as error:
                answer = error
            else:
                names = request.original[1].outputs
                wanted = [index for index, head in enumerate(answer.head.outputs) if head.name in names]
                heads = tuple(answer.head.outputs[index] for index in wanted)
                data = [answer.data[index] for index in wanted]
                answer = replace(answer, head=answer.head._replace(outputs=heads), data=data)
        if final:
            # This may refer to this hook: the cycle would keep the client's data until the next garbage collection.
            request.on_reschedule = None
            self._on_ended(request)
        return answer
