"""The scheduler of a model version with instances: its queue, its batches, its instances' work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from rocserve.core.errors import ServeError, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder, VersionEnding
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestPlan
from rocserve.scheduling.alarm import Alarm
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.batch_policy import batch_policy
from rocserve.scheduling.batch_ways import batch_ways
from rocserve.scheduling.client_watch import ClientWatch
from rocserve.scheduling.deadlines import Deadlines
from rocserve.scheduling.drain import Drain
from rocserve.scheduling.entry import QueuedRequest
from rocserve.scheduling.instances import InstancePool
from rocserve.scheduling.limited_instances import instance_pool
from rocserve.scheduling.ordering import AnswerOrder, OrderedResponder
from rocserve.scheduling.queue import QueueLimits, RequestQueue
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.refusals import cancelled, deadline_exceeded, not_handed_over, refuse
from rocserve.scheduling.timers import Timers
from rocserve.scheduling.triage import NOTHING, Triage
from rocserve.scheduling.weak_calls import weakly
from rocserve.workers.batch_outcome import BatchOutcome
from rocserve.workers.channel import Channel, WorkerGone

_Work = tuple[Channel, FormedBatch]


class _Waiting:
    """Implements client_watch.Waiting."""

    def __init__(self, queue: RequestQueue, instances: InstancePool) -> None:
        self._queue = queue
        self._instances = instances

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self._queue
        yield from self._instances.waiting()

    def __bool__(self) -> bool:
        return bool(self._queue) or self._instances.has_waiting


class ModelScheduler:
    """Callable from any thread; one lock guards the queue and the instances' state, and is never held over I/O."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        timers: Timers,
        limits: QueueLimits,
        log: logging.Logger,
        answers_requests: bool = False,
        limiter: RateLimiter | None = None,
    ) -> None:
        """
        Args:
            answers_requests: the model sees each request for itself, and requests may outlive their batch.
            limiter: says which instances may run; None = each as it is free.
        """
        self._config = config
        self._statistics = statistics
        self._timers = timers
        self._log = log
        self._policy = batch_policy(config, answers_requests)
        ways = batch_ways(
            config, version, statistics, timers, answers_requests, weakly(self._batch_ended), weakly(self._client_left)
        )
        self._layouts, self._answerer = ways.layouts, ways.answerer
        batching = config.dynamic_batching
        self._order = AnswerOrder() if batching is not None and batching.preserve_ordering else None
        self._lock = threading.Lock()
        self._queue = RequestQueue(batching, limits)
        self._triage = Triage(self._queue, self._policy, keeps_order=self._order is not None)
        self._instances = instance_pool(limiter, weakly(self._granted), sends_ahead=not self._queue.may_be_overtaken)
        self._waiting = _Waiting(self._queue, self._instances)
        self._drain = Drain()
        self._outage: ServeError | None = None
        self._deadlines = Deadlines(timers, weakly(self._expire))
        self._delay = Alarm(timers, weakly(self._delay_passed))
        self._clients = ClientWatch(timers, self._lock, self._waiting, weakly(self._client_left))

    # Requests

    @property
    def waiting(self) -> int:
        """How many requests are still to run, in the queue or in a worker behind others."""
        with self._lock:
            return len(self._queue) + sum(1 for _ in self._instances.waiting())

    def submit(self, request: InferRequest, plan: RequestPlan, responder: Responder) -> None:
        """Take a validated request.

        Raises:
            VersionEnding: the version is being unloaded.
            ServeError: UNAVAILABLE, the queue is full or the model has no worker.
        """
        now_ns = time.monotonic_ns()
        entry = QueuedRequest(request, plan, responder, now_ns, nbytes=sum(map(len, request.data)))
        self._queue.admit(entry, now_ns / 1e9)
        work: _Work | None = None
        with self._lock:
            if self._drain.closed:
                raise VersionEnding
            if self._outage is not None:
                # A new one: an exception that is raised again and again collects its tracebacks.
                raise ServeError(self._outage.code, self._outage.text)
            channel = None
            collecting = self._timers.collecting
            if (
                not collecting
                and not self._queue
                and self._policy.starts_at_once
                and (request.deadline is None or not self._triage.is_hopeless(entry, now_ns / 1e9))
            ):
                channel = self._free_instance()
            if channel is not None:
                work = self._begin(channel, [entry], time.monotonic_ns())
            else:
                self._queue.push(entry)
                if request.deadline is not None:
                    self._triage.note(entry)
                if not collecting:
                    work = self._next_work()
                    if entry.waiting:
                        self._clients.start()
            if entry.expires_at is not None:
                self._note_deadline(entry)
        if work is not None:
            self._run(*work)
        elif collecting:
            self._timers.when_collected(self._pump)
        if self._triage.lost:
            self._refuse_lost()

    def _client_left(self, entry: QueuedRequest) -> None:
        with self._lock:
            # Clients leave at their deadlines too, of which they know before the server does.
            removed = self._queue.remove(entry) if entry.request.deadline is None else self._queue.lose(entry)
        if removed:
            self._refuse(entry, cancelled())
            self._report_drained()
        else:
            self._timers.call_soon(lambda: self._cancel_ahead(entry))

    def _cancel_ahead(self, entry: QueuedRequest) -> None:
        if self._drop_ahead(entry):
            self._refuse(entry, cancelled())

    def _drop_ahead(self, entry: QueuedRequest) -> bool:
        """On the completion thread, where answers come too: whether the request waits in a worker behind others, and is
        now the caller's to answer. It runs there all the same, which takes little where anything is sent ahead."""
        with self._lock:
            batch = self._instances.batch_ahead(entry)
        return batch is not None and self._answerer.drop(batch, entry)

    # Instances

    def attach(self, channel: Channel) -> None:
        """An instance is ready to run batches."""
        with self._lock:
            self._outage = None
            self._instances.attach(channel)
        self._pump()

    def detach(self, channel: Channel) -> None:
        """An instance's worker has ended; what waits in the queue waits for another or for its successor."""
        with self._lock:
            self._instances.detach(channel)

    def stop_sending_ahead(self) -> None:
        """The model calls other models. What it waits for may lead back to it, and must then not wait behind it in its
        worker while another instance is free."""
        with self._lock:
            self._instances.stop_sending_ahead()

    def fail_queue(self, outage: ServeError) -> None:
        """No instance is left and none comes back soon: answer what waits, and what comes, with the reason."""
        with self._lock:
            self._outage = outage
            entries = self._queue.clear()
        for entry in entries:
            self._refuse(entry, outage)
        self._report_drained()

    def _granted(self) -> None:
        """An instance that had to wait for its turn may run."""
        self._pump()
        with self._lock:
            self._instances.return_unused()

    # The end

    def close(self, drained: Callable[[], None]) -> None:
        """Take no more requests; call back, once and from any thread, when all that were taken are answered."""
        with self._lock:
            self._drain.close(drained)
        self._report_drained()

    def _report_drained(self) -> None:
        with self._lock:
            drained = None if self._queue or self._triage.lost else self._drain.finished()
        if drained is not None:
            drained()

    # Work

    def _next_work(self) -> _Work | None:
        """Under the lock: a batch and the instance to run it, or None.

        A busy instance is sent a batch ahead only when that could not grow by waiting.
        """
        if not self._queue:
            return None
        idle = self._instances.idle()
        channel = idle or self._instances.ahead()
        if channel is None:
            return None
        now_ns = time.monotonic_ns()
        if self._queue.deadline_count:
            decision = self._triage.decide(now_ns, 0 if idle else self._instances.count_in_hand(channel))
        else:
            decision = self._policy.decide(self._queue, now_ns)
        if idle is None and not decision.is_full:
            return None
        if decision.request_count == 0:
            if decision is not NOTHING:
                self._delay.set(decision.look_again_at_ns / 1e9)
            return None
        if self._instances.is_limited and not self._instances.claim(channel):
            return None
        return self._begin(channel, self._queue.take(decision.request_count), now_ns, decision.one_by_one)

    def _free_instance(self) -> Channel | None:
        """Under the lock: where a single request, which finds the queue empty, may run now."""
        channel = self._instances.idle()
        if channel is None:
            return self._instances.ahead() if self._policy.always_full else None
        return channel if not self._instances.is_limited or self._instances.claim(channel) else None

    def _begin(self, channel: Channel, entries: list[QueuedRequest], now_ns: int, one_by_one: bool = False) -> _Work:
        """Under the lock."""
        self._drain.running += 1
        batch = FormedBatch(entries, now_ns, one_by_one)
        if self._order is not None:
            self._take_turns(entries)
        if self._instances.begin(channel, batch):
            self._clients.start()
        return channel, batch

    def _take_turns(self, entries: list[QueuedRequest]) -> None:
        """What is refused while it waits keeps nobody waiting; a request that comes back from a worker has its turn."""
        assert self._order is not None
        for entry in entries:
            if not isinstance(entry.responder, OrderedResponder):
                entry.responder = OrderedResponder(entry.responder, self._order.take_turn())

    def _pump(self) -> None:
        """Start all that can run now."""
        while True:
            with self._lock:
                work = self._next_work()
                if work is None and self._queue:
                    self._clients.start()
            if self._triage.lost:
                self._refuse_lost()
            if work is None:
                return
            self._run(*work)

    def _run(self, channel: Channel, batch: FormedBatch) -> None:
        try:
            layout, requests = self._layouts.of(batch, channel)
            channel.execute(layout, requests, lambda outcome: self._finish(channel, batch, outcome))
        except WorkerGone:
            self._take_back(channel, batch)
        except Exception as error:
            failure = not_handed_over(batch, error, self._config.name, self._log)
            self._layouts.forget(batch)
            with self._lock:
                self._drain.running -= 1
                self._instances.end(channel, batch, 0)
            for entry in batch.undropped:
                self._refuse(entry, failure)
            self._report_drained()
            # Not in here: the next batch may fail as well, and so on for all that wait.
            self._timers.call_soon(self._pump)

    def _take_back(self, channel: Channel, batch: FormedBatch) -> None:
        """The worker is gone and nothing of the batch ran: its requests keep their place for another instance."""
        self._layouts.forget(batch)
        with self._lock:
            self._drain.running -= 1
            self._instances.detach(channel)
            outage = self._outage
            if outage is None:
                self._queue.push_back(batch.undropped)
                for entry in batch.undropped:
                    if entry.expires_at is not None:
                        self._note_deadline(entry)
                    if entry.request.deadline is not None:
                        self._triage.note(entry)
        if outage is not None:
            for entry in batch.undropped:
                self._refuse(entry, outage)
            self._report_drained()
        self._pump()

    def _finish(self, channel: Channel, batch: FormedBatch, outcome: BatchOutcome) -> None:
        """On the completion thread. The next batch is started before this one's answers are written."""
        if isinstance(outcome.error, WorkerGone):
            outcome.release()
            self._take_back(channel, batch)
            return
        with self._lock:
            engine_ns = outcome.output_start_ns - outcome.input_end_ns
            self._instances.end(channel, batch, engine_ns)
            if outcome.error is None:
                self._policy.observe(engine_ns, len(batch.entries))
                self._triage.times.observe(batch, outcome)
            work = self._next_work()
        if work is not None:
            self._run(*work)
        if self._triage.lost:
            self._refuse_lost()
        is_answered = True
        try:
            is_answered = self._answerer.answer(batch, outcome)
        finally:
            outcome.release()
            if is_answered:
                self._batch_ended()

    def _refuse_lost(self) -> None:
        """Answer what could not have been answered in time."""
        with self._lock:
            lost, self._triage.lost = self._triage.lost, []
        for entry in lost:
            self._refuse(entry, deadline_exceeded())
        self._report_drained()

    def _batch_ended(self) -> None:
        """All requests of a batch have been answered."""
        with self._lock:
            self._drain.running -= 1
        if self._drain.awaited:
            self._report_drained()

    def _refuse(self, entry: QueuedRequest, error: ServeError) -> None:
        refuse(entry, error, self._statistics)

    # Timers

    def _note_deadline(self, entry: QueuedRequest) -> None:
        """Under the lock."""
        if (entry.waiting or self._instances.batch_ahead(entry) is not None) and self._deadlines.add(entry):
            self._deadlines.keep_only(self._waiting)

    def _delay_passed(self) -> None:
        with self._lock:
            self._delay.rung()
        self._pump()

    def _expire(self) -> None:
        """On the completion thread."""
        now = time.monotonic()
        expired: list[QueuedRequest] = []
        elsewhere: list[QueuedRequest] = []
        with self._lock:
            due = self._deadlines.pop_due(now)
            for entry in due:
                if not entry.waiting:
                    elsewhere.append(entry)
                elif self._queue.expire(entry, now):
                    expired.append(entry)
                elif entry.expires_at is not None:
                    self._deadlines.add(entry)
        expired += [entry for entry in elsewhere if self._drop_ahead(entry)]
        for entry in expired:
            deadline = entry.request.deadline
            if deadline is not None and deadline <= now:
                self._refuse(entry, deadline_exceeded())
            else:
                self._refuse(entry, unavailable("Request timeout expired"))
        if due:
            # One that is gone, or comes later now, may have been in the way of a batch.
            self._pump()
        if expired:
            self._report_drained()
