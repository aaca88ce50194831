"""Answers the requests of models that see each request separately, including decoupled ones: a request may have any
number of responses, and may end before or after its batch."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from rocserve.backends.request_model import Rescheduled, Result
from rocserve.core.errors import ServeError, internal
from rocserve.core.exchange import RUNNING
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest, Member
from rocserve.core.responses import LARGE_RESPONSE, Answer
from rocserve.core.statistics import Execution, ModelStatistics
from rocserve.core.tensors import heads_of
from rocserve.core.trace import Trace
from rocserve.links.details import write_details
from rocserve.plane.loop import PlaneLoop
from rocserve.scheduling.batch import BatchAnswers, FormedBatch, ResponseMaker, note_timing
from rocserve.workers.instance import Instance
from rocserve.workers.instance_requests import RequestInstance, RequestLost
from rocserve.workers.results import BatchOutcome


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request that an instance runs."""

    request: InferRequest
    batch: _InFlightBatch
    number: int = 0
    ended_ns: int = 0
    """0 = still in flight."""
    failed: bool = False
    is_apart: bool = False
    """A padding row, or a request that the scheduler answers: it does not count as one of the batch."""
    response_count: int = 0
    responded_ns: int = 0
    """time.monotonic_ns() of the last response. This and `response_count` are only kept for decoupled models."""
    trace: Trace | None = None
    """None once the batch has returned."""
    large_slot: weakref.ref[object] | None = None
    """The slot of a large response that is being sent."""
    held_back: list[tuple[Result | None, bool]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _InFlightBatch:
    """A batch whose requests an instance runs."""

    formed: FormedBatch
    instance: RequestInstance
    requests: list[_InFlight] = field(default_factory=list)
    """Emptied at the batch's end: a reference cycle would keep the clients' data until a garbage collection."""
    open_count: int = 0
    times: tuple[int, int, int] | None = None
    """When the inputs were ready, the engine ended, and the outputs were ready; None until the batch comes back."""


class InFlightRequests:
    """Numbers the requests of batches for workers, passes on their answers, and counts them. On the data plane's
    thread."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        plane: PlaneLoop,
        on_answered: Callable[[], None],
    ) -> None:
        """`on_answered`: called for each batch whose last request ends after `answer`."""
        self._decoupled = config.decoupled
        self._responses = ResponseMaker(config, version)
        self._statistics = statistics
        self._plane = plane
        self._on_answered = on_answered
        self._batches: dict[FormedBatch, _InFlightBatch] = {}

    # To the worker

    def members(self, batch: FormedBatch, instance: Instance) -> Sequence[Member]:
        """Return a batch's requests as an instance takes them; they are in flight from now on."""
        worker = cast(RequestInstance, instance)
        running = self._batches[batch] = _InFlightBatch(batch, worker)
        members: list[Member] = []
        for request in batch.requests:
            in_flight = _InFlight(request, running)
            number = worker.open_request(functools.partial(self._on_answer, in_flight), request.trace)
            in_flight.number = number
            running.requests.append(in_flight)
            if request.timing is not None:
                note_timing(request, batch, None)
            members.append((request.plan.form, request.data, number, write_details(request)))
            if request.trace is not None:
                # The requests may be answered before the batch comes back with its times.
                request.trace.keep_open()
                in_flight.trace = request.trace
        running.open_count = len(members)
        for in_flight in running.requests:
            exchange = in_flight.request.exchange
            if exchange.state is RUNNING:
                exchange.stop = functools.partial(worker.cancel, in_flight.number)
            else:
                # A padding row: the model's answers to it are dropped.
                in_flight.is_apart = True
                self._mark_ended(in_flight, True)
        return members

    def forget(self, batch: FormedBatch, begun: int = 0) -> None:
        """Forget the requests of a batch that the worker has not run: all after the first `begun`."""
        running = self._batches.get(batch)
        if running is not None:
            for in_flight in running.requests[begun:]:
                if not in_flight.ended_ns:
                    self._mark_ended(in_flight, True)
                self._end_trace(in_flight, None)
            del running.requests[begun:]
        if not begun:
            self._batches.pop(batch, None)

    # From the worker

    def take_back(self, batch: FormedBatch, request: InferRequest) -> bool:
        """Let the caller answer a request that was sent ahead. Returns whether the caller may still do so."""
        in_flight = self._batches[batch].requests[batch.requests.index(request)]
        if in_flight.ended_ns:
            return False
        in_flight.batch.instance.cancel(in_flight.number)
        in_flight.is_apart = True
        self._mark_ended(in_flight, True)
        return True

    def is_open(self, batch: FormedBatch) -> bool:
        """Return whether a request of a batch that has returned still runs."""
        return batch in self._batches

    def answer(self, batch: FormedBatch, outcome: BatchOutcome) -> None:
        """Answer the requests whose answers came with the batch."""
        running = self._batches[batch]
        running.times = (outcome.input_end_ns, outcome.output_start_ns, outcome.compute_end_ns)
        times = (batch.compute_start_ns, *running.times)
        now_ns = time.monotonic_ns()
        is_open = () if outcome.error is not None else outcome.open
        answers = BatchAnswers(self._responses, outcome)
        ended: list[int] = []
        for index, in_flight in enumerate(running.requests):
            request = in_flight.request
            if in_flight.trace is not None:
                self._end_trace(in_flight, times)
            if request.phases is not None:
                request.phases.add_run(times)
            if request.timing is not None:
                note_timing(request, batch, times)
            if in_flight.ended_ns or index in is_open:
                continue
            error = answers.add(request, index)
            if error is not None:
                self._statistics.note_failure(error.text)
            in_flight.failed = error is not None
            in_flight.ended_ns = now_ns
            request.exchange.stop = None
            ended.append(in_flight.number)
        running.open_count -= len(ended)
        running.instance.close_requests(ended)
        # Counted before sending, because a client that has its answer may ask for the statistics.
        self._count_if_done(running)
        answers.send()

    def _on_answer(self, in_flight: _InFlight, answer: Result | None, final: bool) -> None:
        """Take an answer that came separately from its batch, or the report that the worker has ended."""
        if in_flight.large_slot is not None:
            in_flight.held_back.append((answer, final))
            return
        running = in_flight.batch
        # If the worker ends before the batch is back, the scheduler answers or requeues the whole batch.
        if in_flight.ended_ns or (isinstance(answer, RequestLost) and running.times is None):
            return
        request = in_flight.request
        response: Answer
        answered_ns = time.monotonic_ns()
        if isinstance(answer, Rescheduled):
            response = internal("the model rescheduled its request, but does not have iterative sequences")
        elif answer is None or isinstance(answer, ServeError):
            response = answer
        else:
            data = [tensor.data for tensor in answer.outputs]
            is_large = sum(map(len, data)) > LARGE_RESPONSE
            heads = heads_of(answer.outputs)
            response = self._responses.make(request, heads, data, answer.parameters, is_large, answer.slot)
            if is_large and not isinstance(response, ServeError):
                go_on = functools.partial(self._resume, in_flight)
                in_flight.large_slot = weakref.ref(answer.slot, lambda _: self._plane.at_end_of_turn(go_on))
        if self._decoupled and not isinstance(answer, Rescheduled):
            self._count_response(in_flight, response, answered_ns)
        is_done = False
        if final:
            self._mark_ended(in_flight, isinstance(response, ServeError) and not isinstance(answer, Rescheduled))
            is_done = self._count_if_done(running)
        try:
            if final and isinstance(answer, Rescheduled) and request.on_reschedule is not None:
                request.on_reschedule(request)
            else:
                if isinstance(response, ServeError):
                    self._statistics.note_failure(response.text)
                request.exchange.send(response, final)
        finally:
            if is_done:
                self._on_answered()

    def _resume(self, in_flight: _InFlight) -> None:
        in_flight.large_slot = None
        while in_flight.held_back and in_flight.large_slot is None:
            self._on_answer(in_flight, *in_flight.held_back.pop(0))

    def _count_response(self, in_flight: _InFlight, response: Answer, answered_ns: int) -> None:
        statistics, index = self._statistics, in_flight.response_count
        begun_ns = in_flight.responded_ns or in_flight.batch.formed.compute_start_ns
        now_ns = time.monotonic_ns()
        if response is None:
            statistics.record_empty_response(index, begun_ns, answered_ns)
        else:
            statistics.record_response(index, begun_ns, answered_ns, now_ns, isinstance(response, ServeError))
            if not index:
                statistics.record_first_response(now_ns - in_flight.request.queue_start_ns)
        in_flight.response_count = index + 1
        in_flight.responded_ns = now_ns

    def _mark_ended(self, in_flight: _InFlight, failed: bool) -> None:
        in_flight.ended_ns = time.monotonic_ns()
        in_flight.failed = failed
        in_flight.request.exchange.stop = None
        in_flight.batch.open_count -= 1
        in_flight.batch.instance.close_requests((in_flight.number,))

    def _count_if_done(self, running: _InFlightBatch) -> bool:
        """Count and forget a batch that has returned, once all its requests have ended. Returns whether it did."""
        times = running.times
        if times is None or running.open_count:
            return False
        del self._batches[running.formed]
        requests, running.requests = running.requests, []
        good: list[_InFlight] = []
        for in_flight in requests:
            if in_flight.is_apart:
                continue
            if in_flight.failed:
                self._statistics.record_failure(in_flight.request.queue_start_ns, in_flight.ended_ns, by_backend=True)
            else:
                good.append(in_flight)
        if good:
            formed = running.formed
            # The requests may have ended at different times: the mean, times their number, gives the right sum.
            ended_ns = sum([in_flight.ended_ns for in_flight in good]) // len(good)
            rows = sum([one.request.plan.batch_size for one in (good[:1] if formed.is_grouped else requests)])
            queue_starts = [in_flight.request.queue_start_ns for in_flight in good]
            run = (formed.compute_start_ns, *times, queue_starts, ended_ns)
            self._statistics.record_batch(Execution(*run, rows, formed.is_grouped, formed.padding_rows))
        return True

    def _end_trace(self, in_flight: _InFlight, times: tuple[int, int, int, int] | None) -> None:
        """`times`: None if the request has not run."""
        trace, in_flight.trace = in_flight.trace, None
        if trace is None:
            return
        if times is not None:
            trace.note_run(in_flight.request.queue_start_ns, times)
        trace.end()
