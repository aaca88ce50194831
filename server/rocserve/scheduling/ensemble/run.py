"""Runs one request to an ensemble: starts the members' steps as their tensors are made.

As in Triton, a step runs when all tensors that it reads exist, independent steps run at the same time, and only steps
that a wanted output needs run. A tensor is released after its last reader. All steps run on the members that were
served when the request began (members.py).

A decoupled member answers any number of times. Each answer opens an iteration: the steps after the member run once for
each iteration, on its tensors. The ensemble answers once for each iteration, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rocserve.core.datatypes import DataType
from rocserve.core.device_references import References, device_of, join_references, referable_outputs
from rocserve.core.dispatch import dispatch_caused
from rocserve.core.errors import ServeError, StatusCode, internal, unavailable, unimplemented
from rocserve.core.exchange import ANSWERED, Exchange
from rocserve.core.model_config import EnsembleStep, ModelConfig
from rocserve.core.request_memory import Holding
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.sequences import NO_SEQUENCE, SEQUENCE_PARAMETERS, SequenceTag, take_sequence
from rocserve.core.serving import ServedVersion
from rocserve.core.statistics import PhaseTotals
from rocserve.core.tensors import Tensor, TensorHead
from rocserve.core.timing import RequestTiming
from rocserve.plane.heap import Slot
from rocserve.scheduling.batch import send_copied
from rocserve.scheduling.ensemble.graph import EnsemblePlan
from rocserve.scheduling.ensemble.members import EnsembleMembers
from rocserve.scheduling.ensemble.parts import EnsembleParts
from rocserve.scheduling.ensemble.step_tensors import may_be_kept, placed, stays
from rocserve.scheduling.scheduler import cancelled


@dataclass(slots=True, eq=False)
class StepRequest:
    """A request to a member, and the client that takes the answers back into the run."""

    _run: EnsembleRun
    index: int
    step: EnsembleStep
    iteration: int
    request: InferRequest
    """Deleted when it is sent, because the request's exchange then refers to this client."""
    last_read_bytes: int
    """Bytes counted for the tensors that only this step still reads; they are released when it has answered."""
    reference_outputs: frozenset[str]
    """The outputs that may be References."""
    is_batched: bool
    """Each element of a References output is a row."""
    sequence: SequenceTag | None
    slot: object = None
    """The slot of the last answer with References."""
    is_decoupled: bool = False
    timing: RequestTiming | None = None
    """None = the client does not ask for times."""

    def begin(self) -> None:
        """Send the request, unless the run has ended meanwhile."""
        if self._run.ended:
            self._end_limit()
        else:
            self._run.dispatch(self)

    def expect_many(self) -> None:
        if not self._run.parts.config.decoupled:
            raise unimplemented(
                f"model '{self.step.model_name}' is now decoupled, but was not when the ensemble was loaded; try again"
            )
        self.is_decoupled = True

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, InferResponse):
            if self.reference_outputs:
                self.slot = answer.slot or self.slot
            if answer.is_large and answer.slot is not None and not stays(answer):
                self._run.parts.dispatcher.work_off(send_copied(answer, final, self))
                return
        if final:
            if self.timing is not None:
                self.timing.ended_ns = time.monotonic_ns()
            if self._run.watchers:
                self._run.watchers.pop(self, None)
            self._end_limit()
        if isinstance(answer, InferResponse):
            self._run.step_answered(self, answer, final)
        elif answer is None and self.is_decoupled:
            self._run.step_over(self)
        else:
            self._run.step_failed(answer or internal(f"model '{self.step.model_name}' sent no response"))

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._run.watch_cancellation(self, callback)

    def _end_limit(self) -> None:
        limits = self._run.parts.limits
        if limits:
            limits[self.index].end()


@dataclass(slots=True, eq=False)
class _HeldTensor:
    """A tensor of a running ensemble, kept for the steps that read it."""

    tensor: Tensor | None
    """None = the client, or the member, did not send it."""
    sequence: SequenceTag | None
    """The sequence of the requests that read the tensor."""
    counted_bytes: int = 0
    """Bytes counted in the memory for requests; 0 for the ensemble's own inputs."""
    slot: object = None
    """While the slot is kept, the data and the memory that References refer to stay unchanged."""
    readers_left: int = 0


_Place = tuple[str, int]


class EnsembleRun:
    """Holds the tensors of one request between its steps, and its answers until their turn."""

    def __init__(
        self,
        parts: EnsembleParts,
        request: InferRequest,
        exchange: Exchange,
        started_ns: int,
        members: EnsembleMembers,
        steps: Sequence[ServedVersion],
        on_end: Callable[[EnsembleMembers], None],
    ) -> None:
        """`steps`: the members that the ensemble's own steps run; empty = each step finds its member by name."""
        self.parts = parts
        self._config = parts.config
        self._request = request
        self._plan = plan = request.plan
        self._exchange = exchange
        self._started_ns = self._begun_ns = started_ns
        self._members = members
        self._step_versions = steps
        self._on_end = on_end
        self._graph: EnsemblePlan = parts.graph.plan(plan.outputs)
        self._tensors: dict[_Place, _HeldTensor] = {}
        self._iterations: dict[int, int] = {}
        """Decoupled step -> number of its answers so far."""
        self._holding = Holding()
        """The memory of members' answers until their readers, and the ensemble, have answered."""
        self._phases = PhaseTotals()
        self._steps_running = 0
        self.ended = False
        """Later answers of steps are dropped."""
        self._answers: dict[int, tuple[InferResponse, int]] = {}
        """Iteration -> the ensemble's answer, which waits for earlier iterations, and the bytes counted for it."""
        self._answer_count = 0
        """Answers that were sent."""
        self._error: ServeError | None = None
        self._is_sending = False
        self.watchers: dict[StepRequest, Callable[[], None]] = {}
        """Step that has not ended -> callback for when the client leaves."""

    def start(self) -> None:
        self._begun_ns = time.monotonic_ns()
        sequence = self._request.sequence
        inputs = {
            entry.name: _HeldTensor(Tensor(entry.name, entry.datatype, entry.shape, data), sequence)
            for entry, data in zip(self._plan.inputs, self._request.data, strict=True)
        }
        for entry in self._config.inputs:
            if entry.optional:
                inputs.setdefault(entry.name, _HeldTensor(None, sequence))
        self.advance(0, inputs, is_step_over=False)

    # Called by the steps

    def dispatch(self, step: StepRequest) -> None:
        request = step.request
        del step.request
        dispatch_caused(self.parts.dispatcher, request, step, self._request.trace)

    def step_answered(self, request: StepRequest, response: InferResponse, is_last: bool) -> None:
        """Take a member's answer. Tensors stay in the worker's memory if it has room, else they are copied."""
        if self.ended:
            return
        iteration = request.iteration
        if request.is_decoupled:
            iteration = self._iterations.get(request.index, 0)
            self._iterations[request.index] = iteration + 1
        wanted = self._graph.steps[request.index].wanted
        made = zip(response.head.outputs, response.data, strict=True)
        outputs = [(head, data) for head, data in made if head.name in wanted]
        new_tensors: dict[str, _HeldTensor] = {}
        try:
            # In one call: if other requests could take the memory of the tensors that the step has read, many requests
            # might fail together.
            more = sum([len(data) for _, data in outputs]) - (request.last_read_bytes if is_last else 0)
            if more > 0:
                self.parts.memory.steps.admit(self._holding, more)
            elif more < 0:
                self.parts.memory.steps.release(self._holding, -more)
            sequence = request.sequence
            if not SEQUENCE_PARAMETERS.isdisjoint(response.parameters):
                # A model may give the steps after it a separate sequence.
                sequence, _ = take_sequence(response.parameters)
            for (output, datatype, shape), data in outputs:
                name, slot = wanted[output], response.slot
                tensor = Tensor(name, datatype, shape, data)
                if slot is not None and not (isinstance(slot, Slot) and may_be_kept(tensor, slot)):
                    tensor.data, slot = bytes(tensor.data), None
                if output in request.reference_outputs and datatype is DataType.BYTES:
                    tensor, slot = join_references(tensor, request.is_batched), request.slot
                new_tensors[name] = _HeldTensor(tensor, sequence, len(data), slot)
        except ServeError as error:
            # The memory is full, or the outputs are invalid.
            self.step_failed(error)
            return
        if len(new_tensors) < len(wanted):
            for name in wanted.values():
                new_tensors.setdefault(name, _HeldTensor(None, sequence))
        self.advance(iteration, new_tensors, is_step_over=is_last)

    def step_over(self, request: StepRequest) -> None:
        """Note that no further answer comes from a decoupled member."""
        self.parts.memory.steps.release(self._holding, request.last_read_bytes)
        self.advance(0, {}, is_step_over=True)

    def step_failed(self, error: ServeError) -> None:
        if self.ended:
            return
        self.ended = True
        self._error = error.with_text(f"in ensemble '{self._config.name}', {error.text}")
        self._answers.clear()
        self._send_answers()

    def watch_cancellation(self, step: StepRequest, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves."""
        if self._exchange.state >= ANSWERED:
            return
        if self._exchange.has_left:
            callback()
            return
        self.watchers[step] = callback
        self._exchange.watch_cancellation(self._cancel)

    def _cancel(self) -> None:
        for callback in tuple(self.watchers.values()):
            callback()

    # Tensors

    def advance(self, iteration: int, new_tensors: Mapping[str, _HeldTensor], is_step_over: bool) -> None:
        """Store new tensors, start the steps that waited only for them, and send the answers that are complete."""
        if self.ended:
            return
        if self._exchange.has_left:
            self.step_failed(cancelled())
            return
        try:
            for name, held in new_tensors.items():
                if readers := self._graph.reader_counts.get(name, 0):
                    held.readers_left = readers
                    self._tensors[name, iteration] = held
            requests = [self._step_request(index, iteration) for index in self._ready(iteration, new_tensors)]
            self._steps_running += len(requests) - is_step_over
            answer = self._answer(iteration, new_tensors)
        except ServeError as error:
            self.step_failed(error)
            return
        self.ended = not self._steps_running or isinstance(answer, ServeError)
        if isinstance(answer, ServeError):
            self._error = answer
        elif answer is not None:
            self._answers[iteration] = answer
        self._send_answers()
        limits = self.parts.limits
        for request in requests:
            if not limits:
                request.begin()
            elif not limits[request.index].begin(request.begin, may_wait=self._request.caller is None):
                self.watch_cancellation(request, lambda: self.step_failed(cancelled()))

    def _ready(self, iteration: int, new_tensors: Iterable[str]) -> list[int]:
        """Return the steps that waited only for the new tensors."""
        ready: list[int] = []
        for name in new_tensors:
            for index in self._graph.readers.get(name, ()):
                if index not in ready and self._has_all(self._graph.steps[index].reads, iteration):
                    ready.append(index)
        return ready

    def _has_all(self, names: Iterable[str], iteration: int) -> bool:
        tensors = self._tensors
        # Not all(), because each answer of a step comes here several times.
        for name in names:  # noqa: SIM110
            if (name, iteration) not in tensors:
                return False
        return True

    def _step_request(self, index: int, iteration: int) -> StepRequest:
        """Make the request to a step's member, and release the tensors of which it is the last reader."""
        step, planned = self._config.ensemble_steps[index], self._graph.steps[index]
        served, is_kept = self._member(index), bool(self._step_versions)
        member, device = served.config, device_of(served)
        sequence = self._request.sequence
        inputs: list[TensorHead] = []
        data = []
        references: set[str] = set()
        slots: dict[int, object] = {}
        for name, source in planned.inputs:
            held = self._tensors[source, iteration]
            sequence = held.sequence
            tensor = held.tensor
            if tensor is not None:
                inputs.append(TensorHead(name, tensor.datatype, tensor.shape))
                data.append(tensor.data)
                if type(tensor.data) is References:
                    if not device:
                        raise unavailable(
                            f"model '{step.member}' has just left the GPU on which tensor '{source}' lies"
                        )
                    references.add(name)
                if held.slot is not None:
                    slots[len(data) - 1] = held.slot
        reference_outputs = self._may_stay(index, member, device) if device else frozenset()
        read = frozenset(references)
        head, places = planned.head((self._request.head, member, inputs, read, reference_outputs))
        last_read_bytes = sum([self._release((source, iteration)) for source in planned.reads])
        request = InferRequest(
            head,
            self._request.id,
            placed(data, places, slots) if slots and not references else data,
            self._request.deadline,
            self._request.in_turn,
            phases=self._phases,
            sequence=sequence,
            data_owner=(self._request.data_owner, slots) if slots else self._request.data_owner,
            caller=self._request.caller,
            members=self._members if is_kept else None,
            member=served if is_kept else None,
        )
        if self._request.timing is not None:
            request.timing = self._request.timing.begin_step(step.model_name)
        return StepRequest(
            self,
            index,
            step,
            iteration,
            request,
            last_read_bytes,
            reference_outputs,
            is_batched=member.max_batch_size > 0,
            sequence=request.sequence,
            timing=request.timing,
        )

    def _member(self, index: int) -> ServedVersion:
        """Return the version that a step runs now. Raises ServeError if there is none."""
        if self._step_versions and not (kept := self._step_versions[index]).is_cold:
            return kept
        planned = self._graph.steps[index]
        return self.parts.dispatcher.table.find(planned.member, planned.version)

    def _may_stay(self, index: int, member: ModelConfig, device: str) -> frozenset[str]:
        """Return the outputs of a step that only members on the same GPU read."""
        steps = self._graph.steps
        possible = referable_outputs(member)
        staying: set[str] = set()
        for output, tensor in steps[index].wanted.items():
            readers = self._graph.readers.get(tensor, ())
            if output not in possible or tensor in self._plan.outputs or not readers:
                continue
            if all(device_of(self._member(reader)) == device for reader in readers):
                staying.add(output)
        return frozenset(staying)

    def _release(self, place: _Place) -> int:
        """Count down a tensor's readers. Returns its counted bytes if no reader is left, else 0."""
        held = self._tensors[place]
        held.readers_left -= 1
        if held.readers_left:
            return 0
        del self._tensors[place]
        return held.counted_bytes

    # The answer

    def _answer(
        self, iteration: int, new_tensors: Mapping[str, _HeldTensor]
    ) -> tuple[InferResponse, int] | ServeError | None:
        """Return the answer of an iteration, and the bytes counted for it, if its last tensor is among the new ones."""
        wanted = self._plan.outputs
        if new_tensors.keys().isdisjoint(wanted) or not self._has_all(wanted, iteration):
            return None
        held = {name: self._tensors[name, iteration] for name in wanted}
        counted_bytes = sum([self._release((name, iteration)) for name in wanted])
        given = [entry.tensor for entry in held.values() if entry.tensor is not None]
        sequence = next(iter(held.values())).sequence or NO_SEQUENCE
        answer = self.parts.response(self._request, given, sequence, self._members, self._step_versions)
        if isinstance(answer, ServeError):
            return answer
        # The answer may contain the request's own inputs.
        slots = [entry.slot for entry in held.values() if entry.slot is not None]
        answer.slot = (self._request.data_owner, slots) if slots else self._request.data_owner
        return answer, counted_bytes

    def _send_answers(self) -> None:
        """Send the answers whose turn it is, in the order of iterations, and then the end."""
        if self._is_sending or not (self.ended or self._answers):
            return
        self._is_sending = True
        while self._exchange.state < ANSWERED and (self.ended or self._answer_count in self._answers):
            if self._answer_count not in self._answers:
                self._send_end()
                break
            response, counted_bytes = self._answers.pop(self._answer_count)
            self._note_response()
            self._answer_count += 1
            is_last = self.ended and not self._answers
            if is_last:
                self._end(failed=False)
            else:
                # From now on its bytes count as those of a sent answer.
                self.parts.memory.steps.release(self._holding, counted_bytes)
                # A large answer takes long to send, and the next would overtake it.
                response.is_large = False
            self._exchange.send(response, is_last)
        self._is_sending = False

    def _send_end(self) -> None:
        """Send the error, or the empty last response, after all answers."""
        error = self._error
        if error is None and not self._answer_count and not self._config.decoupled:
            error = ServeError(
                StatusCode.INVALID_ARGUMENT,
                f"in ensemble '{self._config.name}', {request_prefix([self._request.id])}unexpected deadlock, at least"
                " one output is not set while no more ensemble steps can be made",
            )
        self._end(failed=error is not None)
        if error is not None:
            self._note_response()
            self.parts.statistics.note_failure(error.text)
        self._exchange.send(error)

    def _note_response(self) -> None:
        """Record the first response of a decoupled ensemble; `_end` records the only one of the others."""
        if self._config.decoupled and not self._answer_count:
            self.parts.statistics.record_first_response(time.monotonic_ns() - self._started_ns)

    def _end(self, failed: bool) -> None:
        """End the run before the last answer is sent, because its client may then ask for the statistics."""
        now = time.monotonic_ns()
        if self._holding.held_bytes:
            self.parts.memory.steps.release(self._holding)
        # The callbacks refer to the steps' requests, which refer to this run.
        self.watchers.clear()
        if failed:
            self.parts.statistics.record_failure(self._started_ns, now)
        else:
            self.parts.statistics.record_ensemble(
                self._started_ns, self._begun_ns, now, self._plan.batch_size, self._phases
            )
        if self._request.phases is not None:
            self._request.phases.add_all(self._phases)
        self._on_end(self._members)
