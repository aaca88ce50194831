"""Batches of a model that sees each request for itself: its requests may outlive their batch, each to its own end."""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rocserve.backends.request_model import Rescheduled, Result
from rocserve.core.errors import ServeError, internal
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_form import Member
from rocserve.core.requests import LARGE_RESPONSE, NO_PARAMETERS, InferRequest, InferResponse
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import heads_of
from rocserve.core.trace import Trace
from rocserve.plane.loop import PlaneLoop
from rocserve.scheduling.batch import FormedBatch, ResponseMaker
from rocserve.workers.instance import Instance
from rocserve.workers.instance_requests import InstanceRequests, RequestLost
from rocserve.workers.request_details import write_details
from rocserve.workers.results import BatchOutcome

LOOK_SECONDS = 0.01
"""The client of a request that has run this long is asked after: whoever is served sooner never pays for the asking."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request in a worker."""

    entry: InferRequest
    batch: _RunningBatch
    number: int = 0
    ended_ns: int = 0
    """0 while it is open."""
    failed: bool = False
    response_count: int = 0
    responded_ns: int = 0
    """When the last of them came. Both only of decoupled models."""
    trace: Trace | None = None
    """Until the batch has come back."""
    dropped: bool = False
    """The scheduler has answered it, and counted it."""
    large: weakref.ref[object] | None = None
    """The slot of a large response that is being sent."""
    behind: list[tuple[Result | None, bool]] = field(default_factory=list)
    """What has come meanwhile."""


@dataclass(slots=True, eq=False)
class _RunningBatch:
    formed: FormedBatch
    instance: InstanceRequests
    started_at: float
    requests: list[_Running] = field(default_factory=list)
    """Emptied when the batch is over: a ring of references would keep the clients' data until the next collection."""
    open_count: int = 0
    times: tuple[int, int, int] | None = None
    """When the inputs were there, the engine ended, the outputs were there; None until it has come back."""


class RequestBatches:
    """Lays out the batches of one model version, answers their requests as their answers come, and counts. On the data
    plane's thread."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        timers: PlaneLoop,
        on_answered: Callable[[], None],
        on_left: Callable[[InferRequest], None],
    ) -> None:
        """
        Args:
            on_answered: called for each batch whose last request ended after `answer`.
            on_left: called for a request in a worker whose client has gone.
        """
        self._decoupled = config.decoupled
        self._responses = ResponseMaker(config, version)
        self._statistics = statistics
        self._timers = timers
        self._on_answered = on_answered
        self._on_left = on_left
        self._batches: dict[FormedBatch, _RunningBatch] = {}
        self._unwatched: deque[_RunningBatch] = deque()
        self._looking = False

    # On its way in

    def members(self, batch: FormedBatch, instance: Instance) -> Sequence[Member]:
        """A batch's requests as an instance is told of them; they are open from now on."""
        open_requests = instance.requests
        assert open_requests is not None, "its model sees each request for itself"
        running = self._batches[batch] = _RunningBatch(batch, open_requests, time.monotonic())
        members: list[Member] = []
        for entry in batch.entries:
            single = _Running(entry, running)
            single.number = open_requests.open_request(functools.partial(self._said, single))
            running.requests.append(single)
            members.append((entry.plan.form, entry.data, single.number, write_details(entry)))
            if entry.trace is not None:
                self._begin_trace(single, entry.trace)
        running.open_count = len(members)
        if batch.dropped:
            self._end_absent(running, batch.dropped)
        self._watch(running)
        return members

    def _end_absent(self, running: _RunningBatch, absent: set[InferRequest]) -> None:
        """Rows that are of no request: whatever the model says to them, nobody hears it."""
        for single in running.requests:
            if single.entry in absent:
                single.dropped = True
                self._mark_ended(single, True, time.monotonic_ns())

    def forget(self, batch: FormedBatch) -> None:
        """Nothing of the batch ran, and nothing of it is open."""
        running = self._batches.pop(batch, None)
        if running is not None:
            for single in running.requests:
                if not single.ended_ns:
                    self._mark_ended(single, True, time.monotonic_ns())
                self._end_trace(single, None)
            running.requests = []

    # On its way out

    def drop(self, batch: FormedBatch, entry: InferRequest) -> bool:
        """A request that was sent ahead is answered by the caller, whatever comes back; whether that may be."""
        running = self._batches.get(batch)
        for single in running.requests if running is not None else ():
            if single.entry is entry and not single.ended_ns:
                single.batch.instance.cancel(single.number)
                single.dropped = True
                self._mark_ended(single, True, time.monotonic_ns())
                batch.drop(entry)
                return True
        return False

    def answer(self, batch: FormedBatch, outcome: BatchOutcome) -> bool:
        """Answer the requests whose answers have come with the batch; whether none is left open."""
        running = self._batches[batch]
        running.times = (outcome.input_end_ns, outcome.output_start_ns, outcome.compute_end_ns)
        times = (batch.compute_start_ns, *running.times)
        now_ns = time.monotonic_ns()
        failures, is_open = outcome.failures, () if outcome.error is not None else outcome.open
        answers: list[tuple[InferRequest, InferResponse | ServeError]] = []
        ended: list[int] = []
        for index, single in enumerate(running.requests):
            entry = single.entry
            if single.trace is not None:
                self._end_trace(single, times)
            if entry.phases is not None:
                entry.phases.add_run(times)
            if single.ended_ns or index in is_open:
                continue
            failure = outcome.error or (failures.get(index) if failures else None)
            if failure is None:
                try:
                    parameters = outcome.parameters.get(index, NO_PARAMETERS)
                    response = self._responses.make(entry, *outcome.outputs_of(index), parameters)
                    response.is_large, response.slot = outcome.is_large, outcome.slot
                    answers.append((entry, response))
                except ServeError as error:
                    failure = error
            if failure is not None:
                answers.append((entry, failure))
                single.failed = True
            single.ended_ns = now_ns
            ended.append(single.number)
        running.open_count -= len(ended)
        running.instance.close_requests(ended)
        # Counted before they are sent: who has an answer and asks for the statistics finds it there.
        is_done = self._count_if_done(running)
        for entry, answer in answers:
            if isinstance(answer, ServeError):
                self._tell(entry, answer, True)
            else:
                entry.responder.send(answer)
        return is_done

    def _said(self, single: _Running, answer: Result | None, final: bool) -> None:
        """The model has answered beside its batch, or its worker has ended."""
        if single.large is not None:
            single.behind.append((answer, final))
            return
        running = single.batch
        # What has not come back when the worker ends is answered, or queued again, as a batch.
        if single.ended_ns or (isinstance(answer, RequestLost) and running.times is None):
            return
        if isinstance(answer, Rescheduled):
            self._again(single)
            return
        told: InferResponse | ServeError | None
        said_ns = time.monotonic_ns()
        if answer is None or isinstance(answer, ServeError):
            told = answer
        else:
            try:
                data = [tensor.data for tensor in answer.outputs]
                told = self._responses.make(single.entry, heads_of(answer.outputs), data, answer.parameters)
                told.is_large, told.slot = sum(map(len, data)) > LARGE_RESPONSE, answer.slot
                if told.is_large:
                    go_on = functools.partial(self._go_on, single)
                    single.large = weakref.ref(answer.slot, lambda _: self._timers.at_end_of_turn(go_on))
            except ServeError as error:
                told = error
        if self._decoupled:
            self._count_response(single, told, said_ns)
        if not final:
            self._tell(single.entry, told, final)
            return
        self._mark_ended(single, isinstance(told, ServeError), time.monotonic_ns())
        is_done = self._count_if_done(running)
        try:
            self._tell(single.entry, told, final)
        finally:
            if is_done:
                self._on_answered()

    def _go_on(self, single: _Running) -> None:
        """A large response has been sent."""
        single.large = None
        while single.behind and single.large is None:
            self._said(single, *single.behind.pop(0))

    def _again(self, single: _Running) -> None:
        """The model wants the request once more."""
        entry = single.entry
        self._mark_ended(single, False, time.monotonic_ns())
        is_done = self._count_if_done(single.batch)
        try:
            if entry.on_again is not None:
                entry.on_again(entry)
            else:
                self._tell(entry, internal("the model wants its request again, but has no iterative sequences"), True)
        finally:
            if is_done:
                self._on_answered()

    def _count_response(self, single: _Running, told: InferResponse | ServeError | None, said_ns: int) -> None:
        """One of the many that a decoupled model may give."""
        statistics, index = self._statistics, single.response_count
        begun_ns = single.responded_ns or single.batch.formed.compute_start_ns
        now_ns = time.monotonic_ns()
        if told is None:
            statistics.record_empty_response(index, begun_ns, said_ns)
        else:
            statistics.record_response(index, begun_ns, said_ns, now_ns, isinstance(told, ServeError))
            if not index:
                statistics.record_first_response(now_ns - single.entry.queue_start_ns)
        single.response_count = index + 1
        single.responded_ns = now_ns

    def _tell(self, entry: InferRequest, told: InferResponse | ServeError | None, final: bool) -> None:
        if told is None:
            entry.responder.end()
        elif isinstance(told, ServeError):
            self._statistics.note_failure(told.text)
            entry.responder.fail(told, final)
        else:
            entry.responder.send(told, final)

    def _mark_ended(self, single: _Running, failed: bool, now_ns: int) -> None:
        single.ended_ns = now_ns
        single.failed = failed
        single.batch.open_count -= 1
        single.batch.instance.close_requests((single.number,))

    def _count_if_done(self, running: _RunningBatch) -> bool:
        """Whether the batch has come back and all its requests have ended; then it is counted, and let go."""
        times = running.times
        if times is None or running.open_count:
            return False
        del self._batches[running.formed]
        requests, running.requests = running.requests, []
        good: list[_Running] = []
        for single in requests:
            if single.dropped:
                continue
            if single.failed:
                self._statistics.record_failure(single.entry.queue_start_ns, single.ended_ns, by_backend=True)
            else:
                good.append(single)
        start = running.formed.compute_start_ns
        if good:
            # They may have ended at different times; what is counted is the sum.
            ended_ns = sum([single.ended_ns for single in good]) // len(good)
            grouped = running.formed.is_grouped
            counted = good[:1] if grouped else requests
            rows = sum([single.entry.plan.batch_size for single in counted])
            queue_starts = [single.entry.queue_start_ns for single in good]
            start = running.formed.compute_start_ns
            self._statistics.record_batch(start, *times, queue_starts, ended_ns, rows, grouped)
            if running.formed.absent_rows:
                self._statistics.leave_out(running.formed.absent_rows)
        return True

    # Traces

    def _begin_trace(self, single: _Running, trace: Trace) -> None:
        """Its requests may be answered before the batch comes back, with which the times come."""
        trace.keep_open()
        single.trace = trace
        single.batch.instance.traces[single.number] = trace

    def _end_trace(self, single: _Running, times: tuple[int, int, int, int] | None) -> None:
        """None: it has not run."""
        trace, single.trace = single.trace, None
        if trace is None:
            return
        if times is not None:
            trace.note_run(single.entry.queue_start_ns, times)
        trace.end()

    # Clients that leave

    def _watch(self, running: _RunningBatch) -> None:
        self._unwatched.append(running)
        if not self._looking:
            self._looking = True
            self._timers.call_at(time.monotonic() + LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Ask after the clients of requests that have run for a while, so that the model can be told when they go."""
        oldest = time.monotonic() - LOOK_SECONDS
        while self._unwatched and (not self._unwatched[0].open_count or self._unwatched[0].started_at <= oldest):
            for single in self._unwatched.popleft().requests:
                if not single.ended_ns:
                    single.entry.watched = True
                    single.entry.responder.watch_cancellation(functools.partial(self._left, single))
        self._looking = bool(self._unwatched)
        if self._looking:
            self._timers.call_at(time.monotonic() + LOOK_SECONDS, self._look)

    def _left(self, single: _Running) -> None:
        single.batch.instance.cancel(single.number)
        self._on_left(single.entry)
