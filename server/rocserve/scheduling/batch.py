"""Keeps the requests that run together, and makes responses from their outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.exchange import RUNNING, Exchange, Responder
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig
from rocserve.core.parameters import NO_PARAMETERS, Parameters
from rocserve.core.requests import InferRequest, Member, RequestPlan
from rocserve.core.responses import Answer, InferResponse, ResponseHead
from rocserve.core.statistics import Execution, ModelStatistics
from rocserve.core.steps import Steps
from rocserve.core.tensors import Buffer, TensorHead, classify
from rocserve.core.validation import reshape_dims
from rocserve.plane.heap import Slot, copied
from rocserve.workers.instance import Instance
from rocserve.workers.results import BatchOutcome


def copied_answer(response: InferResponse) -> Steps[InferResponse | ServeError]:
    """Copy a large response step by step. Returns the copy, or the error if there is no memory for it."""
    try:
        data = yield from copied(response.data)
    except ServeError as error:
        return error
    return replace(response, data=data, slot=None)


def send_copied(response: InferResponse, final: bool, responder: Responder) -> Steps[None]:
    """Copy a large response step by step, then send the copy to a responder."""
    responder.send((yield from copied_answer(response)), final)


class AnswerLink(Protocol):
    """Sends the answers to several requests of a batch to another process, as one message."""

    def answer_together(self, head: ResponseHead, slot: Slot, nbytes: int, places: list[int]) -> bool:
        """Send requests their only answers, which share one head. `slot`: has their batch's outputs, `nbytes` in all.
        `places`: per request its token, then the begin of each output in the slot. Returns False, with nothing sent, if
        the other process cannot read the slot."""


class LinkedResponder:
    """The base of responders for clients of another process."""

    link: AnswerLink
    token: int
    """Names the request in the other process."""


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """The part of a response that is equal for requests with the same plan and the same output heads."""

    head: ResponseHead
    wanted: Sequence[int] | None
    """Indices of the outputs that the client wants; None = all."""
    is_linkable: bool
    """The outputs are sent unchanged, and their sizes follow from their shapes."""


class ResponseMaker:
    def __init__(self, config: ModelConfig, version: int) -> None:
        self._name = config.name
        self._version = str(version)
        self._batching = config.max_batch_size > 0
        self._outputs = {output.name: output for output in config.outputs}
        self._forms = Memo[tuple[RequestPlan, tuple[TensorHead, ...]], _Form]()
        # The requests of a batch mostly have the same plan and output heads.
        self._last_plan: RequestPlan | None = None
        self._last_heads: tuple[TensorHead, ...] | None = None
        self._last_form = _Form(ResponseHead(self._name, self._version, ()), None, False)

    def answer(self, request: InferRequest, outcome: BatchOutcome, index: int) -> InferResponse | ServeError:
        """Return the response or error that a batch's outcome has for its request at `index`."""
        failure = outcome.error or outcome.failures.get(index)
        if failure is not None:
            return failure
        parameters = outcome.parameters.get(index, NO_PARAMETERS)
        return self.make(request, *outcome.outputs_of(index), parameters, outcome.is_large, outcome.slot)

    def make(
        self,
        request: InferRequest,
        heads: tuple[TensorHead, ...],
        data: Sequence[Buffer],
        parameters: Parameters,
        is_large: bool,
        slot: object,
    ) -> InferResponse | ServeError:
        """Return the response with all wanted outputs, or an error if an output contradicts the configuration."""
        plan = request.plan
        try:
            form = self.form(plan, heads)
            if form.wanted is not None:
                data = [data[index] for index in form.wanted]
            response = InferResponse(form.head, request.id, data, parameters, is_large, slot)
            if plan.classifications:
                counts = plan.classifications
                outputs = [
                    classify(tensor, count, self._outputs[tensor.name].labels, self._batching)
                    if (count := counts.get(tensor.name, 0))
                    else tensor
                    for tensor in response.outputs
                ]
                response = InferResponse.of(self._name, self._version, request.id, outputs, parameters)
                response.is_large, response.slot = is_large, slot
        except ServeError as fault:
            return fault
        except Exception as error:
            # A worker may send any outputs, and the client must still get an answer.
            return internal(f"cannot make a response of the model's outputs: {error!r}")
        return response

    def form(self, plan: RequestPlan, heads: tuple[TensorHead, ...]) -> _Form:
        """Raises ServeError if an output contradicts the configuration."""
        if heads is not self._last_heads or plan is not self._last_plan:
            form = self._forms.get((plan, heads))
            if form is None:
                wanted = [index for index, head in enumerate(heads) if head.name in plan.outputs]
                has_strings = any(head.datatype is DataType.BYTES for head in heads)
                form = _Form(
                    ResponseHead(self._name, self._version, tuple([self._reshaped(heads[index]) for index in wanted])),
                    wanted if len(wanted) < len(heads) else None,
                    not (has_strings or plan.classifications or plan.reference_outputs),
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
        own = head.shape[len(lead) :]
        if not config.reshape and own and (own == tuple(config.dims) or not self._batching):
            # The file declares a scalar, or one for each row, and the engine computes what clients get: some exporters
            # (CatBoost's of a regressor) declare it wrongly.
            return head
        if len(head.shape) != len(config.reshape) + len(lead):
            raise internal(
                f"output '{head.name}' has the shape {list(head.shape)}, expected {len(config.reshape) + len(lead)}"
                f" dimensions, because the configuration reshapes it from {list(config.reshape)}"
            )
        return head._replace(shape=(*lead, *reshape_dims(own, config.reshape, config.dims)))


@dataclass(slots=True, eq=False)
class _Together:
    """Requests whose answers go through one link as one message."""

    link: AnswerLink
    form: _Form
    places: list[int]
    members: list[tuple[InferRequest, int]]


class BatchAnswers:
    """Answers the requests of a batch. Answers of one form and one link go out as one message."""

    def __init__(self, responses: ResponseMaker, outcome: BatchOutcome) -> None:
        self._responses = responses
        self._outcome = outcome
        self._has_only_outputs = not (outcome.error or outcome.failures or outcome.parameters or outcome.is_large)
        self._slot = outcome.slot if self._has_only_outputs else None
        """The outputs, if another process may read them in place; else None."""
        self._sends = deque[_Together | tuple[Exchange, Answer]]()
        self._together: dict[tuple[AnswerLink, _Form], _Together] = {}
        """The messages among `_sends` that may still grow."""

    def add(self, request: InferRequest, index: int) -> ServeError | None:
        """Add the next request, with its index in the batch. Returns its answer if that is an error."""
        exchange = request.exchange
        client = exchange.client
        if self._slot is not None and isinstance(client, LinkedResponder) and not exchange.hooks:
            start, (heads, slices) = self._outcome.parts[index]
            try:
                form = self._responses.form(request.plan, heads)
                is_linkable = form.is_linkable
            except ServeError:  # `answer` returns the error below.
                is_linkable = False
            if is_linkable:
                key = (client.link, form)
                together = self._together.get(key)
                if together is None:
                    together = self._together[key] = _Together(*key, [], [])
                    self._sends.append(together)
                places = together.places
                places.append(client.token)
                for one in slices if form.wanted is None else [slices[wanted] for wanted in form.wanted]:
                    places.append(start + one.start)
                together.members.append((request, index))
                return None
        if self._together:
            # Answers to later requests may not overtake this one.
            self._together = {}
        if self._has_only_outputs:
            outcome = self._outcome
            heads, data = outcome.outputs_of(index)
            answer = self._responses.make(request, heads, data, NO_PARAMETERS, False, outcome.slot)
        else:
            answer = self._responses.answer(request, self._outcome, index)
        self._sends.append((exchange, answer))
        return answer if isinstance(answer, ServeError) else None

    def send(self) -> None:
        outcome, slot, sends = self._outcome, self._slot, self._sends
        try:
            while sends:
                send = sends.popleft()
                if isinstance(send, tuple):
                    exchange, answer = send
                    exchange.send(answer)
                elif slot is None or not send.link.answer_together(send.form.head, slot, outcome.nbytes, send.places):
                    answers = self._responses.answer
                    sends.extendleft(
                        [(one.exchange, answers(one, outcome, index)) for one, index in reversed(send.members)]
                    )
                else:
                    Exchange.note_answered_elsewhere([request.exchange for request, _ in send.members])
        finally:
            if sends:
                # A fault of one answer holds back no other.
                self.send()


@dataclass(slots=True, eq=False)
class FormedBatch:
    """Requests taken from the queue for one execution."""

    requests: list[InferRequest]
    compute_start_ns: int
    is_grouped: bool = False
    """The requests go to the worker in one message, and the engine runs them one after another."""
    sent_ahead: bool = False
    """Its instance had another batch before it, and mostly runs that first."""
    is_first: bool = False
    """The first batch of its instance, which may take far longer than any later one."""
    instance: Instance | None = None
    """The instance that runs the batch; None = not chosen yet."""
    padding_rows: int = 0
    """Number of padding rows, which keep each sequence's row at its slot's position. Their exchanges have ended."""

    @property
    def running(self) -> list[InferRequest]:
        """Return the requests that still need an answer: no padding rows, and none that was answered separately."""
        return [request for request in self.requests if request.exchange.state is RUNNING]

    @property
    def rows(self) -> int:
        """Return the rows that run together: those of all requests, and padding rows."""
        return sum([request.plan.batch_size for request in self.requests])

    def elements(self) -> tuple[int, int]:
        """See `padded_elements`; of the requests that still need an answer."""
        return padded_elements([request.plan for request in self.running], self.is_grouped, self.padding_rows)


def note_timing(request: InferRequest, batch: FormedBatch, times: tuple[int, int, int, int] | None) -> None:
    """Note the execution of a request whose client asks for the times. `times`: None if it has not ended."""
    timing, instance = request.timing, batch.instance
    assert timing is not None and instance is not None, "the request is timed, and its batch has an instance"
    rows = request.plan.batch_size if batch.is_grouped else batch.rows
    timing.note_start(request.queue_start_ns, batch.compute_start_ns, instance.name, rows)
    if times is not None:
        timing.note_run(times)


def padded_elements(plans: Sequence[RequestPlan], is_grouped: bool = False, padding_rows: int = 0) -> tuple[int, int]:
    """Return the elements of the inputs that are padded in one execution of requests: the clients' elements, and the
    added ones."""
    filled = [plan.bucket.row_elements for plan in plans if plan.bucket is not None]
    if not is_grouped:
        filled = [max(filled, default=0)] * len(plans)
    real = sum([plan.real_elements for plan in plans])
    total = sum([plan.batch_size * own for plan, own in zip(plans, filled, strict=True)])
    return real, total + padding_rows * max(filled, default=0) - real


class BatchAnswerer:
    """Lists the requests of a batch for its worker, answers them, and counts them in the statistics."""

    def __init__(self, config: ModelConfig, version: int, statistics: ModelStatistics) -> None:
        self._responses = ResponseMaker(config, version)
        self._statistics = statistics

    def members(self, batch: FormedBatch, instance: Instance) -> Sequence[Member]:
        """Return a batch's requests as instances take them."""
        return [(request.plan.form, request.data, 0, b"") for request in batch.requests]

    def forget(self, batch: FormedBatch, begun: int = 0) -> None:
        """Do nothing: no state of a batch is kept."""

    def is_open(self, batch: FormedBatch) -> bool:
        """Return False: the answer to each request came with the batch."""
        return False

    def answer(self, batch: FormedBatch, outcome: BatchOutcome) -> None:
        """Count each request, then send its response or error."""
        times = (batch.compute_start_ns, outcome.input_end_ns, outcome.output_start_ns, outcome.compute_end_ns)
        answers = BatchAnswers(self._responses, outcome)
        queue_starts: list[int] = []
        timed: list[InferRequest] = []
        rows = batch.padding_rows
        for index, request in enumerate(batch.requests):
            if request.exchange.state is not RUNNING:
                continue
            rows += request.plan.batch_size
            if request.trace is not None:
                request.trace.note_run(request.queue_start_ns, times)
            if request.phases is not None:
                request.phases.add_run(times)
            if request.timing is not None:
                timed.append(request)
            error = answers.add(request, index)
            if error is None:
                queue_starts.append(request.queue_start_ns)
            else:
                self._statistics.record_failure(request.queue_start_ns, time.monotonic_ns(), by_backend=True)
                self._statistics.note_failure(error.text)
        # Counted before sending, because a client that has its answer may ask for the statistics.
        if queue_starts:
            if batch.is_grouped:
                rows = batch.requests[0].plan.batch_size
            now_ns, grouped = time.monotonic_ns(), batch.is_grouped
            elements = batch.elements() if batch.requests[0].plan.bucket is not None else (0, 0)
            self._statistics.record_batch(
                Execution(*times, queue_starts, now_ns, rows, grouped, batch.padding_rows, *elements)
            )
        for request in timed:
            note_timing(request, batch, times)
        answers.send()

    def take_back(self, batch: FormedBatch, request: InferRequest) -> bool:
        """Let the caller answer a request that was sent ahead. Returns True: the caller may do so."""
        return True
