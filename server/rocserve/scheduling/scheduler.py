"""Schedulers: what those of all models with workers have in common, and the one of models without sequences."""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rocserve.core.errors import ServeError, StatusCode, deadline_exceeded, internal, repeated, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.trace import QUEUE_START
from rocserve.core.validation import RequestValidator
from rocserve.plane.loop import PlaneLoop, TimerHandle
from rocserve.scheduling.batch import BatchAnswerer, FormedBatch
from rocserve.scheduling.batch_policy import NOTHING, Triage, batch_policy
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.in_flight_requests import InFlightRequests
from rocserve.scheduling.instances import InstancePool, LimitedInstancePool, RateLimiter
from rocserve.scheduling.queue import QueueFull, QueueLimits, RequestQueue
from rocserve.scheduling.response_sequencer import OrderedResponder, ResponseSequencer
from rocserve.scheduling.sequence.router import SequenceRouter
from rocserve.workers.instance import Instance, WorkerGone
from rocserve.workers.results import BatchOutcome

_WATCH_AFTER_SECONDS = 0.01
"""The client of a request that has been here this long is watched: one that is answered sooner costs nothing."""
_FEW = 256
"""Requests whose times are kept without asking which of them still wait."""

Refused = tuple[InferRequest, ServeError]
"""A request that is not to run, and why."""


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """What a scheduler is made of."""

    config: ModelConfig
    version: int
    statistics: ModelStatistics
    plane: PlaneLoop
    limits: QueueLimits
    log: logging.Logger
    answers_requests: bool = False
    """The model sees each request for itself, and requests may outlive their batch."""
    limiter: RateLimiter | None = None
    """Says which instances may run; None = each as it is free."""
    router: SequenceRouter = field(default_factory=SequenceRouter)
    """The versions of the model: sequences may go on in those that this one replaces."""
    initial_states: Mapping[str, bytes] = field(default_factory=dict)
    """By input name, the files that states of sequences begin with."""


class Scheduler(ABC):
    """Runs the requests of a model version on its instances. Lives on the data plane's thread.

    What comes in a turn of the loop changes the queues; at the turn's end all is started that can run now. Which
    requests run together, and where, is said by the kinds: `_start_work` is their strategy.
    """

    def __init__(self, parts: SchedulerParts, sends_ahead: bool) -> None:
        """`sends_ahead`: whether a busy instance may be sent more, which then can no longer be overtaken."""
        config = self._config = parts.config
        self.version = parts.version
        self.validator = RequestValidator(config, parts.answers_requests)
        self._statistics = parts.statistics
        self._log = parts.log
        self._plane = parts.plane
        self.work_off = parts.plane.work_off
        limiter = parts.limiter
        self._times = ComputeTimes()
        self._pool = (
            InstancePool(self._times, sends_ahead) if limiter is None else LimitedInstancePool(self._times, limiter)
        )
        self._answers_requests = parts.answers_requests
        self._answerer: BatchAnswerer | InFlightRequests
        if parts.answers_requests:
            self._answerer = InFlightRequests(config, parts.version, parts.statistics, parts.plane, self._batch_ended)
        else:
            self._answerer = BatchAnswerer(config, parts.version, parts.statistics)
        self._drain = Drain()
        self._outage: ServeError | None = None
        self._refused: list[Refused] = []
        """Requests that are not to run, and why; they are answered at the turn's end."""
        self._expiring: list[InferRequest] = []
        """Those that have come in this turn and have a time to expire at."""
        self._deadlines = Deadlines(parts.plane)
        self._delay = Alarm(parts.plane)
        self._is_marked = False
        self._watch: TimerHandle | None = None
        """Over the clients, while it is set."""

    # What the kinds say

    @abstractmethod
    def submit(self, request: InferRequest, responder: Responder) -> None:
        """Take a validated request. Raises: ServeError: the request cannot be taken, e.g. the queue is full or the
        model has no worker."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """How many requests are still to run. From any thread."""

    @abstractmethod
    def _waiting_requests(self) -> Iterable[InferRequest]:
        """All that do not run yet, as far as the server can know."""

    @abstractmethod
    def _has_queued(self) -> bool:
        """Whether any of them have not been handed to an instance."""

    @abstractmethod
    def _start_work(self) -> None:
        """Run (`_run`) all batches that can run now. After one that could not be handed over, which marks the
        scheduler, the rest waits for the next turn: all that wait may fail as well."""

    @abstractmethod
    def _leave(self, entry: InferRequest) -> None:
        """Nobody waits for a request any more. Where it is still to run it is taken out, and refused."""

    @abstractmethod
    def _time_out(self, entry: InferRequest, now: float) -> None:
        """The time of a request has passed. Where it is still to run it is taken out, and refused."""

    @abstractmethod
    def _freed(self, batch: FormedBatch) -> None:
        """A batch is not with an instance any more, for it could not be handed over."""

    @abstractmethod
    def _take_back(self, instance: Instance, batch: FormedBatch, gone: WorkerGone) -> None:
        """The worker is gone and nothing of the batch ran."""

    # Instances

    def attach(self, instance: Instance) -> None:
        """An instance is ready to run batches."""
        self._outage = None
        self._pool.attach(instance, self._granted)
        self._mark()

    @abstractmethod
    def detach(self, instance: Instance) -> None:
        """An instance's worker has ended."""

    def stop_sending_ahead(self) -> None:
        """The model calls other models. What it waits for may lead back to it, and must then not wait behind it in its
        worker while another instance is free."""
        self._pool.stop_sending_ahead()

    @abstractmethod
    def fail_queue(self, outage: ServeError) -> None:
        """No instance is left and none comes back soon: answer what waits, and what comes, with the reason."""

    def _granted(self) -> None:
        """An instance that had to wait for its turn may run."""
        self._pump()
        self._pool.return_unused()

    # The end

    def close(self, drained: Callable[[], None]) -> None:
        """Take no more requests; call back, once, when all that were taken are answered. Nobody finds the version any
        more when this is called."""
        self._drain.close(drained)
        self._mark()

    def _is_empty(self) -> bool:
        """Whether a version that is closed has nothing left to run, or to refuse."""
        return not self._has_queued() and not self._refused

    def _let_go(self) -> None:
        """Nothing is left to do. What knows the scheduler would keep it until the garbage collector comes by."""
        self._deadlines.alarm.cancel()
        self._delay.cancel()
        if self._watch is not None:
            self._watch.cancel()
        del self._answerer

    # Work

    def _mark(self) -> None:
        """Something has changed: start what can run at the turn's end."""
        if not self._is_marked:
            self._is_marked = True
            self._plane.at_end_of_turn(self._pump)

    def _pump(self) -> None:
        """Start all that can run, and refuse those that are not to run."""
        self._is_marked = False
        self._start_work()
        if self._expiring:
            # What runs by now is not stopped any more.
            expiring, self._expiring = self._expiring, []
            for entry in expiring:
                when = entry.expires_at
                if when is not None and self._may_expire(entry) and self._deadlines.add(when, entry, self._expire):
                    self._deadlines.keep_only(self._waiting_requests())
        if self._refused:
            refused = self._refused.copy()
            self._refused.clear()
            for entry, error in refused:
                refuse(entry, error, self._statistics)
        if self._drain.is_awaited and self._is_empty() and self._drain.report():
            self._let_go()
        if self._watch is None and self._has_queued():
            self._watch_soon()

    def _run(self, instance: Instance, batch: FormedBatch) -> None:
        self._drain.running += 1
        if self._watch is None and (batch.sent_ahead or batch.is_grouped or self._answers_requests):
            self._watch_soon()
        try:
            members = self._answerer.members(batch, instance)
            instance.execute(batch.is_grouped, members, functools.partial(self._finish, instance, batch))
        except WorkerGone as gone:
            self._lose(instance, batch, gone)
        except Exception as error:
            prefix = request_prefix([entry.id for entry in batch.undropped])
            self._log.exception("%sa batch of model '%s' could not be handed to its worker", prefix, self._config.name)
            failure = internal(f"the batch could not be handed to the worker: {error}")
            self._answerer.forget(batch)
            self._drain.running -= 1
            self._pool.end(instance, batch)
            self._refused += [(entry, failure) for entry in batch.undropped]
            self._freed(batch)
            self._mark()

    def _lose(self, instance: Instance, batch: FormedBatch, gone: WorkerGone) -> None:
        self._answerer.forget(batch)
        self._drain.running -= 1
        self._take_back(instance, batch, gone)
        self._mark()

    def _finish(self, instance: Instance, batch: FormedBatch, outcome: BatchOutcome) -> None:
        """The next batch is started before this one's answers are written."""
        if isinstance(outcome.error, WorkerGone):
            self._lose(instance, batch, outcome.error)
            return
        self._pool.end(instance, batch)
        if outcome.error is None:
            self._times.observe(batch, outcome)
        is_answered = True
        try:
            if self._has_queued() or self._refused:
                self._pump()
        finally:
            try:
                is_answered = self._answerer.answer(batch, outcome)
            finally:
                if is_answered:
                    self._batch_ended()

    def _batch_ended(self) -> None:
        """All requests of a batch have been answered."""
        self._drain.running -= 1
        if self._drain.is_awaited:
            self._mark()

    # Time, and clients that leave

    @abstractmethod
    def _may_expire(self, entry: InferRequest) -> bool:
        """Whether a request is still to run."""

    def _expire(self) -> None:
        now = time.monotonic()
        for entry in self._deadlines.pop_due(now, self._expire):
            self._time_out(entry, now)
        self._mark()

    def _delay_passed(self) -> None:
        self._delay.fired()
        self._mark()

    def _watch_soon(self) -> None:
        self._watch = self._plane.call_at(time.monotonic() + _WATCH_AFTER_SECONDS, self._watch_clients)

    def _watch_clients(self) -> None:
        """Watch the clients of requests that have been here for a while, so that what nobody wants is dropped."""
        oldest_ns = time.monotonic_ns() - int(_WATCH_AFTER_SECONDS * 1e9)
        open_requests = self._answerer.open_requests()
        unwatched = [entry for entry in itertools.chain(self._waiting_requests(), open_requests) if not entry.watched]
        for entry in unwatched:
            if entry.queue_start_ns <= oldest_ns:
                entry.watched = True
                entry.responder.watch_cancellation(functools.partial(self._client_left, entry))
        self._watch = None
        if unwatched or self._has_queued() or self._pool.has_waiting:
            self._watch_soon()

    def _client_left(self, entry: InferRequest) -> None:
        self._answerer.cancel(entry)
        self._leave(entry)
        self._mark()


class Drain:
    """Counts what was taken and is not answered yet; its owner says when there may be nothing left."""

    def __init__(self) -> None:
        self.running = 0
        self.is_awaited = False
        """Somebody waits for the end."""
        self._on_drained: Callable[[], None] | None = None

    def close(self, on_drained: Callable[[], None]) -> None:
        """`on_drained` is to be called, once, when nothing is left."""
        self._on_drained = on_drained
        self.is_awaited = True

    def report(self) -> bool:
        """Call back where nothing runs any more; whether that was done."""
        if self.running or self._on_drained is None:
            return False
        on_drained, self._on_drained = self._on_drained, None
        self.is_awaited = False
        on_drained()
        return True


class Alarm:
    """Fires at the earliest of the times that it was given. It knows whom it calls only while it is set."""

    def __init__(self, plane: PlaneLoop) -> None:
        self._plane = plane
        self._timer: tuple[float, TimerHandle] | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, when: float, on_fired: Callable[[], None]) -> None:
        """`when` is time.monotonic() seconds; `on_fired` begins with `fired`."""
        if self._timer is not None:
            if self._timer[0] <= when:
                return
            self._timer[1].cancel()
        self._timer = (when, self._plane.call_at(when, on_fired))

    def fired(self) -> None:
        """It may be set anew."""
        self._timer = None

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None


class Deadlines:
    """Keeps the times at which requests expire, and an alarm for the next.

    The time of a request that has begun or was answered stays until it comes, or until there are many like it; not the
    request, whose data may be large.
    """

    def __init__(self, plane: PlaneLoop) -> None:
        self.alarm = Alarm(plane)
        self._heap: list[tuple[float, int, weakref.ref[InferRequest]]] = []
        self._numbers = itertools.count()
        self._most = _FEW

    def add(self, when: float, entry: InferRequest, on_due: Callable[[], None]) -> bool:
        """A request, and when it expires; `on_due` begins with `pop_due`. True: there are many, and it is time to call
        `keep_only`."""
        heapq.heappush(self._heap, (when, next(self._numbers), weakref.ref(entry)))
        self.alarm.set(when, on_due)
        return len(self._heap) > self._most

    def keep_only(self, entries: Iterable[InferRequest]) -> None:
        """Forget all but these."""
        self._heap = [
            (entry.expires_at, next(self._numbers), weakref.ref(entry))
            for entry in entries
            if entry.expires_at is not None
        ]
        heapq.heapify(self._heap)
        self._most = max(_FEW, 2 * len(self._heap))

    def pop_due(self, now: float, on_due: Callable[[], None]) -> list[InferRequest]:
        """Those whose time has come, and the alarm is set for the next; `now` is time.monotonic()."""
        self.alarm.fired()
        due: list[InferRequest] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, reference = heapq.heappop(self._heap)
            entry = reference()
            # A request may have been given another time.
            if entry is not None and entry.expires_at == when:
                due.append(entry)
        if self._heap:
            self.alarm.set(self._heap[0][0], on_due)
        return due


def refuse(entry: InferRequest, error: ServeError, statistics: ModelStatistics) -> None:
    """Answer a request that has waited with the reason why it is not run."""
    now = time.monotonic_ns()
    if entry.trace is not None:
        entry.trace.note(QUEUE_START, entry.queue_start_ns)
    statistics.record_refusal(error, entry.queue_start_ns, now)
    responder = entry.responder
    if isinstance(responder, OrderedResponder):
        # It need not wait for the answers to others.
        responder = responder.out_of_order()
    responder.send(error)


def cancelled() -> ServeError:
    """Its client has gone."""
    return ServeError(StatusCode.CANCELLED, "the request was cancelled before it ran")


class ModelScheduler(Scheduler):
    """Of models whose requests are independent of each other: one queue before all instances; batches are formed as the
    model's batch policy says."""

    def __init__(self, parts: SchedulerParts) -> None:
        batching = parts.config.dynamic_batching
        self._queue = RequestQueue(batching, parts.limits)
        super().__init__(parts, sends_ahead=not self._queue.may_be_overtaken)
        self._policy = batch_policy(parts.config, self._times, parts.answers_requests)
        self._sequencer = ResponseSequencer() if batching is not None and batching.preserve_ordering else None
        self._triage = Triage(self._queue, self._policy, self._times, keeps_order=self._sequencer is not None)

    # Requests

    def submit(self, request: InferRequest, responder: Responder) -> None:
        if self._outage is not None:
            raise repeated(self._outage)
        request.responder = responder
        request.queue_start_ns = now_ns = time.monotonic_ns()
        queue = self._queue
        if request.deadline is not None or queue.may_be_overtaken or request.plan.timeout_microseconds:
            queue.admit(request, now_ns / 1e9)
        try:
            queue.push(request)
        except QueueFull:
            if not self._is_marked:
                raise
            # What has come in this turn and can run leaves the queue first.
            self._pump()
            queue.push(request)
        if request.expires_at is not None:
            self._expiring.append(request)
            if request.deadline is not None:
                self._triage.note(request)
        if not self._is_marked:
            self._is_marked = True
            self._plane.at_end_of_turn(self._pump)

    @property
    def waiting(self) -> int:
        return len(self._queue) + sum(1 for _ in self._pool.waiting())

    def _waiting_requests(self) -> Iterator[InferRequest]:
        yield from self._queue
        yield from self._pool.waiting()

    def _has_queued(self) -> bool:
        return self._queue.count > 0

    # Instances

    def detach(self, instance: Instance) -> None:
        """See Scheduler. What waits in the queue waits for another instance or for its successor."""
        self._pool.detach(instance)

    def fail_queue(self, outage: ServeError) -> None:
        self._outage = outage
        self._refused += [(entry, outage) for entry in self._queue.take(self._queue.count)]
        self._mark()

    # Work

    def _start_work(self) -> None:
        """See Scheduler. A busy instance is sent a batch ahead only when that could not grow by waiting; so is an idle
        one while another instance is about to be done."""
        queue, pool = self._queue, self._pool
        while queue.count and not self._is_marked:
            idle = pool.idle()
            instance = idle or pool.ahead()
            if instance is None:
                return
            now_ns = time.monotonic_ns()
            if queue.deadline_count:
                decision = self._triage.decide(now_ns, len(pool.in_hand[instance]))
                if self._triage.lost:
                    self._refused += [(entry, deadline_exceeded()) for entry in self._triage.lost]
                    self._triage.lost.clear()
            else:
                decision = self._policy.decide(queue, now_ns)
            if not decision.is_full:
                if idle is None:
                    return
                returns_by_ns = pool.returns_by_ns
                if now_ns < returns_by_ns:
                    self._delay.set(returns_by_ns / 1e9, self._delay_passed)
                    return
            if decision.request_count == 0:
                if decision is not NOTHING:
                    self._delay.set(decision.decide_again_at_ns / 1e9, self._delay_passed)
                return
            if not pool.claim(instance):
                return
            batch = FormedBatch(queue.take(decision.request_count), now_ns, decision.is_grouped)
            if self._sequencer is not None:
                for entry in batch.entries:
                    # One that is refused while it waits delays no other; one that comes back from a worker has its
                    # ticket.
                    if not isinstance(entry.responder, OrderedResponder):
                        entry.responder = OrderedResponder(entry.responder, self._sequencer.ticket(), self.work_off)
            pool.begin(instance, batch)
            self._run(instance, batch)

    def _freed(self, batch: FormedBatch) -> None:
        """See Scheduler. Nothing waits for that."""

    def _take_back(self, instance: Instance, batch: FormedBatch, gone: WorkerGone) -> None:
        """See Scheduler. The requests keep their place for another instance."""
        self._pool.detach(instance)
        if self._outage is not None:
            self._refused += [(entry, self._outage) for entry in batch.undropped]
            return
        self._queue.push_back(batch.undropped)
        for entry in batch.undropped:
            if entry.expires_at is not None:
                self._expiring.append(entry)
            if entry.deadline is not None:
                self._triage.note(entry)

    # Time, and clients that leave

    def _may_expire(self, entry: InferRequest) -> bool:
        return entry.waiting or self._pool.batch_ahead(entry) is not None

    def _leave(self, entry: InferRequest) -> None:
        # Clients leave at their deadlines too, of which they know before the server does.
        removed = self._queue.remove(entry) if entry.deadline is None else self._queue.lose(entry)
        if removed or self._drop_ahead(entry):
            self._refused.append((entry, cancelled()))

    def _time_out(self, entry: InferRequest, now: float) -> None:
        if entry.waiting:
            if not self._queue.expire(entry, now):
                if entry.expires_at is not None:
                    self._expiring.append(entry)
                return
        elif not self._drop_ahead(entry):
            return
        deadline = entry.deadline
        is_late = deadline is not None and deadline <= now
        self._refused.append((entry, deadline_exceeded() if is_late else unavailable("Request timeout expired")))

    def _drop_ahead(self, entry: InferRequest) -> bool:
        """Whether a request waits in a worker behind others; it is then the caller's to answer."""
        batch = self._pool.batch_ahead(entry)
        return batch is not None and self._answerer.drop(batch, entry)
