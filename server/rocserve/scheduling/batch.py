"""Requests that run together: their layout, and their outcome taken apart."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rocserve.core.classification import classify
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_form import Member
from rocserve.core.requests import NO_PARAMETERS, Answer, InferRequest, InferResponse, Parameters, ResponseHead
from rocserve.core.serving import Responder
from rocserve.core.statistics import Execution, ModelStatistics
from rocserve.core.steps import Steps
from rocserve.core.tensors import Buffer, TensorHead
from rocserve.core.validation import RequestPlan, reshape_dims
from rocserve.plane.heap import Slot, copied
from rocserve.workers.instance import Instance
from rocserve.workers.results import BatchOutcome


def send_copied(response: InferResponse, final: bool, responder: Responder) -> Steps[None]:
    """Hand a large response to a responder, on memory of its own: some is copied at a step."""
    try:
        data = yield from copied(response.data)
    except ServeError as error:
        responder.send(error, final)
    else:
        responder.send(replace(response, data=data, slot=None), final)


class AnswerLink(Protocol):
    """Takes the answers to several requests of a batch as one message to another process."""

    def answer_together(self, head: ResponseHead, slot: Slot, nbytes: int, places: list[int]) -> bool:
        """The only answers to requests, all of one head. `slot`: of the outputs of their batch, `nbytes` in all.
        `places`: of each request its token, and where in the slot each of its outputs begins. Returns: False: the other
        process cannot read them there, and nothing was sent."""


class LinkedResponder:
    """What tells responders for clients of another process from others."""

    link: AnswerLink
    token: int
    """By which that process knows the request."""


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """What responses are made of outputs that are alike."""

    head: ResponseHead
    wanted: Sequence[int] | None
    """Which of the outputs; None: all of them."""
    is_linkable: bool
    """They are sent as they are, and their sizes follow from their shapes."""


class ResponseMaker:
    """Makes responses of one model version."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        self._name = config.name
        self._version = str(version)
        self._batching = config.max_batch_size > 0
        self._outputs = {output.name: output for output in config.outputs}
        self._forms = Memo[tuple[RequestPlan, tuple[TensorHead, ...]], _Form]()
        # Those of a batch are mostly the same.
        self._last_plan: RequestPlan | None = None
        self._last_heads: tuple[TensorHead, ...] | None = None
        self._last_form = _Form(ResponseHead(self._name, self._version, ()), None, False)

    def answer(self, entry: InferRequest, outcome: BatchOutcome, index: int) -> InferResponse | ServeError:
        """What the outcome of a batch holds for one of its requests."""
        failure = outcome.error or outcome.failures.get(index)
        if failure is not None:
            return failure
        parameters = outcome.parameters.get(index, NO_PARAMETERS)
        return self.make(entry, *outcome.outputs_of(index), parameters, outcome.is_large, outcome.slot)

    def make(
        self,
        entry: InferRequest,
        heads: tuple[TensorHead, ...],
        data: Sequence[Buffer],
        parameters: Parameters,
        is_large: bool,
        slot: object,
    ) -> InferResponse | ServeError:
        """The response to a request, of all outputs that it wants; an error where one is not what the configuration
        says of it."""
        plan = entry.plan
        try:
            form = self.form(plan, heads)
            if form.wanted is not None:
                data = [data[index] for index in form.wanted]
            response = InferResponse(form.head, entry.id, data, parameters)
            if plan.classifications:
                counts = plan.classifications
                outputs = [
                    classify(tensor, count, self._outputs[tensor.name].labels, self._batching)
                    if (count := counts.get(tensor.name, 0))
                    else tensor
                    for tensor in response.outputs
                ]
                response = InferResponse.of(self._name, self._version, entry.id, outputs, parameters)
        except ServeError as fault:
            return fault
        except Exception as error:
            # A worker may say anything of its outputs, and its client is to be answered all the same.
            return internal(f"the model's outputs make no response: {error!r}")
        response.is_large, response.slot = is_large, slot
        return response

    def form(self, plan: RequestPlan, heads: tuple[TensorHead, ...]) -> _Form:
        """Raises: ServeError: an output is not what the configuration says of it."""
        if heads is not self._last_heads or plan is not self._last_plan:
            form = self._forms.get((plan, heads))
            if form is None:
                wanted = [index for index, head in enumerate(heads) if head.name in plan.outputs]
                has_strings = any(head.datatype is DataType.BYTES for head in heads)
                form = _Form(
                    ResponseHead(self._name, self._version, tuple([self._reshaped(heads[index]) for index in wanted])),
                    wanted if len(wanted) < len(heads) else None,
                    not (has_strings or plan.classifications or plan.may_stay),
                )
                if plan.is_small:
                    self._forms.keep((plan, heads), form)
            self._last_form = form
            self._last_plan, self._last_heads = plan, heads
        return self._last_form

    def _reshaped(self, head: TensorHead) -> TensorHead:
        config = self._outputs.get(head.name)
        if config is None or config.reshape is None:
            return head
        lead = head.shape[:1] if self._batching else ()
        if len(head.shape) != len(config.reshape) + len(lead):
            raise internal(
                f"output '{head.name}' has the shape {list(head.shape)}, expected {len(config.reshape) + len(lead)}"
                f" dimensions, for the configuration reshapes it from {list(config.reshape)}"
            )
        return head._replace(shape=(*lead, *reshape_dims(head.shape[len(lead) :], config.reshape, config.dims)))


@dataclass(slots=True, eq=False)
class _Together:
    """Requests whose answers go by one link, and are alike."""

    link: AnswerLink
    form: _Form
    places: list[int]
    """See AnswerLink."""
    members: list[tuple[InferRequest, int]]
    """Each with its place in the batch."""


class BatchAnswers:
    """Answers the requests of a batch, those that are alike and go by one link together."""

    def __init__(self, responses: ResponseMaker, outcome: BatchOutcome) -> None:
        self._responses = responses
        self._outcome = outcome
        has_more = outcome.error or outcome.failures or outcome.parameters or outcome.is_large
        self._slot = None if has_more else outcome.slot
        """Of outputs that another process may read where they lie."""
        self._sends: list[_Together | tuple[InferRequest, Answer]] = []
        self._together: dict[tuple[AnswerLink, _Form], _Together] = {}
        """Those of `_sends` that may grow."""

    def add(self, entry: InferRequest, index: int) -> ServeError | None:
        """The next request, by its place in the batch. Returns: the error that it is answered with."""
        responder = entry.responder
        if self._slot is not None and isinstance(responder, LinkedResponder):
            start, (heads, slices) = self._outcome.parts[index]
            try:
                form = self._responses.form(entry.plan, heads)
                is_linkable = form.is_linkable
            except ServeError:  # It is told below.
                is_linkable = False
            if is_linkable:
                key = (responder.link, form)
                together = self._together.get(key)
                if together is None:
                    together = self._together[key] = _Together(*key, [], [])
                    self._sends.append(together)
                places = together.places
                places.append(responder.token)
                for each in slices if form.wanted is None else [slices[wanted] for wanted in form.wanted]:
                    places.append(start + each.start)
                together.members.append((entry, index))
                return None
        if self._together:
            # Those behind it may not overtake it.
            self._together = {}
        answer = self._responses.answer(entry, self._outcome, index)
        self._sends.append((entry, answer))
        return answer if isinstance(answer, ServeError) else None

    def send(self) -> None:
        """Send them all."""
        outcome, slot = self._outcome, self._slot
        for each in self._sends:
            if isinstance(each, tuple):
                entry, answer = each
                entry.responder.send(answer)
            elif slot is None or not each.link.answer_together(each.form.head, slot, outcome.nbytes, each.places):
                for entry, index in each.members:
                    entry.responder.send(self._responses.answer(entry, outcome, index))


@dataclass(slots=True, eq=False)
class FormedBatch:
    """Requests taken from the queue for one execution."""

    entries: list[InferRequest]
    compute_start_ns: int
    is_grouped: bool = False
    """They travel together, and the engine runs them one after the other."""
    sent_ahead: bool = False
    """It waits in its worker behind another."""
    is_first: bool = False
    """Of its instance, which may take far longer for it than for any other."""
    absent_rows: int = 0
    """Rows of no request; they are among the dropped."""
    dropped: set[InferRequest] | None = None
    """Those that have been answered since, because they waited in the worker for too long."""

    @property
    def undropped(self) -> list[InferRequest]:
        """The requests that are still to be answered."""
        if not self.dropped:
            return self.entries
        return [entry for entry in self.entries if entry not in self.dropped]

    def drop(self, entry: InferRequest) -> None:
        if self.dropped is None:
            self.dropped = set()
        self.dropped.add(entry)


class BatchAnswerer:
    """Lists the requests of a batch for its worker, sends each its answer, and counts."""

    def __init__(self, config: ModelConfig, version: int, statistics: ModelStatistics) -> None:
        self._responses = ResponseMaker(config, version)
        self._statistics = statistics

    def members(self, batch: FormedBatch, instance: Instance) -> Sequence[Member]:
        """A batch's requests as any instance takes them."""
        return [(entry.plan.form, entry.data, 0, b"") for entry in batch.entries]

    def forget(self, batch: FormedBatch) -> None:
        """Nothing of the batch ran."""

    def answer(self, batch: FormedBatch, outcome: BatchOutcome) -> bool:
        """Every request gets a response or an error, and the statistics their share; never raises. True: none is left
        open."""
        dropped = batch.dropped or ()
        times = (batch.compute_start_ns, outcome.input_end_ns, outcome.output_start_ns, outcome.compute_end_ns)
        answers = BatchAnswers(self._responses, outcome)
        queue_starts: list[int] = []
        rows = batch.absent_rows
        for index, entry in enumerate(batch.entries):
            if entry in dropped:
                continue
            rows += entry.plan.batch_size
            if entry.trace is not None:
                entry.trace.note_run(entry.queue_start_ns, times)
            if entry.phases is not None:
                entry.phases.add_run(times)
            error = answers.add(entry, index)
            if error is None:
                queue_starts.append(entry.queue_start_ns)
            else:
                self._statistics.record_failure(entry.queue_start_ns, time.monotonic_ns(), by_backend=True)
                self._statistics.note_failure(error.text)
        # Counted before they are sent: who has an answer and asks for the statistics finds it there.
        if queue_starts:
            if batch.is_grouped:
                rows = batch.entries[0].plan.batch_size
            now_ns, grouped = time.monotonic_ns(), batch.is_grouped
            self._statistics.record_batch(Execution(*times, queue_starts, now_ns, rows, grouped, batch.absent_rows))
        answers.send()
        return True

    def open_requests(self) -> Iterable[InferRequest]:
        """Those that workers have not answered, where each can be answered by itself: none."""
        return ()

    def cancel(self, request: InferRequest) -> None:
        """Nobody waits for the request any more: a batch that runs is not stopped."""

    def drop(self, batch: FormedBatch, entry: InferRequest) -> bool:
        """A request that was sent ahead is answered by the caller, whatever comes back; whether that may be."""
        batch.drop(entry)
        return True
