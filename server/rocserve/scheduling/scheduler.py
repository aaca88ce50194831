"""Schedules requests of model versions on instances: the common part for models with and without sequences."""

from __future__ import annotations

import functools
import itertools
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rocserve.core.errors import ServeError, StatusCode, deadline_exceeded, internal
from rocserve.core.exchange import ANSWERED, QUEUED, Exchange
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import NO_PADDING, Padding
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestValidator
from rocserve.plane.loop import Alarm, PlaneLoop
from rocserve.scheduling.batch import BatchAnswerer, FormedBatch
from rocserve.scheduling.call_cycles import LimitedInstance, LimitedModel
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.deadlines import Deadlines
from rocserve.scheduling.in_flight_requests import InFlightRequests
from rocserve.scheduling.instances import InstancePool
from rocserve.scheduling.queue import QueueLimits, Refused
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.sequence.router import SequenceRouter
from rocserve.workers.instance import Instance, WorkerGone
from rocserve.workers.results import BatchOutcome

_WATCH_AFTER_SECONDS = 0.01
"""Age from which a request's client is watched; a request that is answered sooner costs nothing."""


class WaitingRequests(Protocol):
    """The requests that were not handed to an instance."""

    count: int

    def __iter__(self) -> Iterator[InferRequest]: ...


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """What a version's scheduler is built from."""

    config: ModelConfig
    version: int
    statistics: ModelStatistics
    plane: PlaneLoop
    limits: QueueLimits
    log: logging.Logger
    answers_requests: bool = False
    """The model sees each request separately, and requests may outlive their batch."""
    limiter: RateLimiter | None = None
    """Decides which instances may run; None = each free one."""
    router: SequenceRouter = field(default_factory=SequenceRouter)
    """The versions of the model, because sequences may continue in the versions that this one replaces."""
    initial_states: Mapping[str, bytes] = field(default_factory=dict)
    """Input name -> content of the file with which the state of each sequence begins."""
    padding: Padding = NO_PADDING
    """The signature's."""


class Scheduler(ABC):
    """Runs the requests of a model version on its instances. Used on the data plane's thread. The events of a turn of
    the loop change the queues; at the turn's end all batches start that can run. A subclass decides by its
    `_start_work` which requests run together, and where."""

    _queue: WaitingRequests
    """Set by the subclass."""

    def __init__(self, parts: SchedulerParts, sends_ahead: bool) -> None:
        """`sends_ahead`: a busy instance may be sent further batches, which can then no longer be overtaken."""
        config = self._config = parts.config
        self.validator = RequestValidator(config, parts.answers_requests, parts.padding)
        self._statistics = parts.statistics
        self._log = parts.log
        self._plane = parts.plane
        self.work_off = parts.plane.work_off
        self._times = ComputeTimes()
        self._pool = InstancePool(self._times, sends_ahead, parts.limiter, LimitedModel.of(config))
        self._answers_requests = parts.answers_requests
        self._answerer: BatchAnswerer | InFlightRequests
        if parts.answers_requests:
            self._answerer = InFlightRequests(config, parts.version, parts.statistics, parts.plane, self._batch_ended)
        else:
            self._answerer = BatchAnswerer(config, parts.version, parts.statistics)
        self._running = 0
        """Batches that have not ended. A batch ends with its last request."""
        self._on_drained: Callable[[], None] | None = None
        """Set when the version is closed, until it has been called."""
        self._outage: ServeError | None = None
        self._refused: list[Refused] = []
        """Requests to answer with an error at the turn's end; they are ANSWERED already, so that nothing else answers
        them."""
        self._deadlines = Deadlines(parts.plane)
        self._delay = Alarm(parts.plane)
        self._is_pump_scheduled = False
        self._arrived: list[InferRequest] = []
        """Requests of this turn: new ones, and those that came back from a worker."""
        self._unwatched: deque[weakref.ref[InferRequest]] = deque()
        """Requests that were not answered in their turn, in the order of their arrival, until `_watch_clients`."""
        self._watch = Alarm(parts.plane)

    # Defined by subclasses

    @abstractmethod
    def submit(self, request: InferRequest, exchange: Exchange) -> None:
        """Take a validated request. Raises ServeError, for example if the queue is full or there is no worker."""

    @abstractmethod
    def _start_work(self) -> None:
        """Run (`_run`) all batches that can run now. Stop if a batch could not be handed over: the rest waits for the
        next turn, because all of it may fail."""

    @abstractmethod
    def _take_out(self, request: InferRequest, error: ServeError) -> None:
        """Refuse a request of the queue with `error`."""

    @abstractmethod
    def _time_out(self, request: InferRequest) -> ServeError | None:
        """Return the error for a request whose timeout has passed; None if it still runs, but later."""

    @abstractmethod
    def _requeue(self, instance: Instance, batch: FormedBatch, gone: WorkerGone) -> None:
        """Requeue or refuse the requests of a batch that did not run, because the worker is gone."""

    # Requests that have not begun to run

    @property
    def waiting(self) -> int:
        """How many requests, to the server's knowledge, have not begun to run. From any thread."""
        return self._queue.count + sum(1 for _ in self._pool.waiting())

    @property
    def in_flight(self) -> int:
        """How many requests wait in the queue or are about to be refused, plus batches that have not ended. From any
        thread."""
        return self._queue.count + len(self._refused) + self._running

    def follow(self, request: InferRequest, exchange: Exchange) -> None:
        """Let the rate limiter follow a call by another model."""
        self._pool.follow(request, exchange)

    def _refuse(self, request: InferRequest, error: ServeError) -> None:
        """Refuse a request, unless it has begun to run."""
        if request.exchange.state is QUEUED:
            self._take_out(request, error)
        elif (batch := self._pool.batch_ahead(request)) is not None and self._answerer.take_back(batch, request):
            self._give_up(request, error)

    def _give_up(self, request: InferRequest, error: ServeError) -> None:
        """Answer a request that is in no queue with an error, at the turn's end."""
        request.exchange.enter(ANSWERED)
        self._refused.append((request, error))

    # Instances

    def attach(self, instance: Instance) -> None:
        self._outage = None
        self._pool.attach(instance, self._granted)
        self._schedule_pump()

    def detach(self, instance: Instance) -> None:
        """Remove an instance whose worker has ended. Queued requests wait for another instance."""
        self._pool.detach(instance)

    def caller(self, instance: Instance) -> LimitedInstance | None:
        """Return the `caller` of requests that the instance's model makes; None without a rate limiter."""
        return self._pool.caller(instance)

    def stop_sending_ahead(self) -> None:
        """Stop sending batches ahead: the model calls models, and a call that leads back to it must not wait in the
        caller's worker while another instance is free."""
        self._pool.sends_ahead = False

    def fail_queue(self, outage: ServeError) -> None:
        """Refuse all waiting and later requests with `outage`, because no instance is left and none comes back soon."""
        self._outage = outage
        for request in tuple(self._queue):
            self._refuse(request, outage)
        self._schedule_pump()

    def _granted(self) -> None:
        """Use an instance to which the rate limiter has just granted its resources."""
        self._pump()
        self._pool.give_back(also_wanted=False)

    # The end

    def close(self, drained: Callable[[], None]) -> None:
        """Take no more requests, and call `drained` once when all earlier ones are answered. The caller has already
        removed the version from the serving table."""
        self._on_drained = drained
        self._schedule_pump()

    def _is_empty(self) -> bool:
        return not self._queue.count and not self._refused

    def _break_cycles(self) -> None:
        """Break the reference cycles that would keep a drained scheduler until the next garbage collection."""
        self._deadlines.alarm.cancel()
        self._delay.cancel()
        self._watch.cancel()
        del self._answerer

    # Work

    def _schedule_pump(self) -> None:
        """Schedule `_pump` for the end of the turn, because something has changed."""
        if not self._is_pump_scheduled:  # `submit` checks before it calls, because every request passes there.
            self._is_pump_scheduled = True
            self._plane.at_end_of_turn(self._pump)

    def _pump(self) -> None:
        """Start all batches that can run, and answer the refused requests."""
        self._is_pump_scheduled = False
        self._start_work()
        if self._pool.limiter is not None and not self._queue.count:
            self._pool.give_back(also_wanted=True)
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            if request.expires_at is not None and self._has_not_begun(request):
                self._watch_time(request)
        if self._refused:
            refused = self._refused.copy()
            self._refused.clear()
            for request, error in refused:
                if request.trace is not None:
                    request.trace.note("QUEUE_START", request.queue_start_ns)
                self._statistics.record_refusal(error, request.queue_start_ns, time.monotonic_ns())
                request.exchange.refuse(error)
        if (on_drained := self._on_drained) is not None and not self._running and self._is_empty():
            self._on_drained = None
            on_drained()
            self._break_cycles()
        if self._queue.count:
            self._watch_soon()
        if self._watch.is_set:
            # Otherwise they all run in engines that cannot stop them.
            self._unwatched += map(weakref.ref, arrived)

    def _run(self, instance: Instance, batch: FormedBatch) -> bool:
        """Hand over a batch. Returns False if that failed: its requests will be refused, or run again."""
        self._running += 1
        if batch.sent_ahead or batch.is_grouped or self._answers_requests:
            self._watch_soon()
        try:
            members = self._answerer.members(batch, instance)
            instance.execute(batch.is_grouped, members, functools.partial(self._finish, instance, batch))
            return True
        except WorkerGone as gone:
            self._worker_gone(instance, batch, gone)
        except Exception as error:
            prefix = request_prefix([request.id for request in batch.running])
            self._log.exception("%sa batch of model '%s' could not be handed to its worker", prefix, self._config.name)
            failure = internal(f"the batch could not be handed to the worker: {error}")
            self._answerer.forget(batch)
            self._running -= 1
            self._pool.end(instance, batch)
            for request in batch.running:
                self._give_up(request, failure)
            self._schedule_pump()
        return False

    def _requeue_rest(self, instance: Instance, batch: FormedBatch, begun: int, error: ServeError) -> None:
        """Requeue the requests of a group that had not begun to run when the worker ended."""
        rest = FormedBatch(batch.requests[begun:], batch.compute_start_ns)
        if rest.requests:
            self._answerer.forget(batch, begun)
            del batch.requests[begun:]
            self._requeue(instance, rest, WorkerGone(error.text))
            self._schedule_pump()

    def _worker_gone(self, instance: Instance, batch: FormedBatch, gone: WorkerGone) -> None:
        self._answerer.forget(batch)
        self._running -= 1
        self._requeue(instance, batch, gone)
        self._schedule_pump()

    def _finish(self, instance: Instance, batch: FormedBatch, outcome: BatchOutcome) -> None:
        """Take a batch's outcome. The next batch starts before this one's answers are written."""
        error = outcome.error
        if isinstance(error, WorkerGone):
            self._worker_gone(instance, batch, error)
            return
        if error is not None and outcome.begun is not None:
            self._times.note_end()
            if batch.is_grouped:
                if not outcome.begun:
                    self._worker_gone(instance, batch, WorkerGone(error.text))
                    return
                self._requeue_rest(instance, batch, outcome.begun, error)
        self._pool.end(instance, batch)
        if outcome.error is None:
            self._times.observe(batch, outcome)
        try:
            if self._queue.count or self._refused:
                self._pump()
        finally:
            try:
                self._answerer.answer(batch, outcome)
            finally:
                if not self._answerer.is_open(batch):
                    self._batch_ended()

    def _batch_ended(self) -> None:
        self._running -= 1
        if self._on_drained is not None:
            self._schedule_pump()

    # Time, and clients that leave

    def _expire(self) -> None:
        now = time.monotonic()
        for request in self._deadlines.pop_due(now, self._expire):
            error = self._expiry(request, now)
            if error is not None:
                self._refuse(request, error)
        self._schedule_pump()

    def _expiry(self, request: InferRequest, now: float) -> ServeError | None:
        """Return the error for a request whose time has passed by `now`; None if it may still run."""
        if request.expires_at is None or request.expires_at > now:
            return None
        is_late = request.deadline is not None and request.deadline <= now
        return deadline_exceeded() if is_late else self._time_out(request)

    def _has_not_begun(self, request: InferRequest) -> bool:
        """Return whether a request can still be refused. Its time does not stop one that has begun."""
        return request.exchange.state is QUEUED or self._pool.batch_ahead(request) is not None

    def _watch_time(self, request: InferRequest) -> None:
        """Call `_expire` when the request's time is over."""
        when = request.expires_at
        if when is not None and self._deadlines.add(when, request, self._expire):
            self._deadlines.keep_only(itertools.chain(self._queue, self._pool.waiting()))

    def _watch_soon(self) -> None:
        if not self._watch.is_set:
            self._watch.set(time.monotonic() + _WATCH_AFTER_SECONDS, self._watch_clients)

    def _watch_clients(self) -> None:
        """Watch the clients of the requests that have reached the age and can still be stopped. Each request is looked
        at once, however many wait."""
        oldest_ns = time.monotonic_ns() - int(_WATCH_AFTER_SECONDS * 1e9)
        unwatched, ahead = self._unwatched, set(self._pool.waiting())
        while unwatched:
            request = unwatched[0]()
            if request is not None and (exchange := request.exchange).on_left is None:
                if request.queue_start_ns > oldest_ns:
                    break
                if exchange.state is QUEUED or exchange.stop is not None or request in ahead:
                    exchange.watch_cancellation(functools.partial(self._client_left, request))
            unwatched.popleft()
        if unwatched:
            self._watch_soon()

    def _client_left(self, request: InferRequest) -> None:
        if (stop := request.exchange.stop) is not None:
            stop()
        self._refuse(request, cancelled())
        self._schedule_pump()


def cancelled() -> ServeError:
    return ServeError(StatusCode.CANCELLED, "the request was cancelled before it ran")
