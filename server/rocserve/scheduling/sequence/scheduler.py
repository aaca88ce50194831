"""The scheduler of a model version whose requests belong to sequences."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId
from rocserve.core.serving import Responder, VersionEnding
from rocserve.core.statistics import ModelStatistics
from rocserve.core.validation import RequestPlan, RequestValidator
from rocserve.scheduling.alarm import Alarm
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.batch_ways import batch_ways
from rocserve.scheduling.client_watch import ClientWatch
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.deadlines import Deadlines
from rocserve.scheduling.drain import Drain
from rocserve.scheduling.entry import QueuedRequest
from rocserve.scheduling.limited_instances import instance_pool
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.refusals import not_handed_over, refuse
from rocserve.scheduling.sequence.admission import Admission
from rocserve.scheduling.sequence.book import SequenceBook
from rocserve.scheduling.sequence.controls import ControlTensors
from rocserve.scheduling.sequence.dressing import Dressing
from rocserve.scheduling.sequence.homes import SequenceHomes
from rocserve.scheduling.sequence.idle import IdleWatch
from rocserve.scheduling.sequence.instances import SequenceInstances, once_more
from rocserve.scheduling.sequence.places import SequenceInstance, SequenceRequest, Slot
from rocserve.scheduling.sequence.responder import SequenceResponder
from rocserve.scheduling.sequence.states import StateKeeper
from rocserve.scheduling.sequence.strategies import strategy_of
from rocserve.scheduling.timers import Timers
from rocserve.scheduling.weak_calls import weakly
from rocserve.workers.batch_outcome import BatchOutcome
from rocserve.workers.channel import Channel, WorkerGone

_WORKER_ENDED = "the worker has ended"


class SequenceScheduler:
    """Implements scheduler.Scheduler. One lock guards the sequences and the instances, and is never held over I/O."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        timers: Timers,
        limits: QueueLimits,
        log: logging.Logger,
        homes: SequenceHomes,
        initial_states: Mapping[str, bytes],
        answers_requests: bool = False,
        limiter: RateLimiter | None = None,
    ) -> None:
        """
        Args:
            homes: the versions of the model; sequences may go on in those that this one replaces.
            initial_states: by input name, the content of those states that begin with a file.
            answers_requests: the model sees each request for itself, and requests may outlive their batch.
            limiter: says which instances may run; None = each as it is free.
        """
        batching = config.sequence_batching
        assert batching is not None, "a model without sequences"
        self._config = config
        self.version = version
        self._statistics = statistics
        self._timers = timers
        self._log = log
        self._homes = homes
        self._validator = RequestValidator(config)
        controls = ControlTensors(batching, config.max_batch_size > 0)
        self._admission = Admission(config, controls.correlation_id)
        self._keeper = StateKeeper(config, initial_states)
        self._times = ComputeTimes()
        self._book = SequenceBook(config.name, limits, self._times, max(config.max_batch_size, 1))
        dressing = Dressing(controls, self._keeper, config.max_batch_size > 0)
        oldest = batching.oldest
        self._instances = SequenceInstances(
            instance_pool(limiter, weakly(self._granted), sends_ahead=False),
            self._book,
            strategy_of(config, batching, self._book, dressing),
            keeps_order=oldest is not None and oldest.preserve_ordering,
        )
        self._iterative = batching.iterative
        self._waits_for_answers = bool(batching.states) or batching.iterative
        """The next request of a sequence cannot run before the answer to the one before is there."""
        ways = batch_ways(
            config, version, statistics, timers, answers_requests, weakly(self._batch_ended), weakly(self._client_left)
        )
        self._layouts, self._answerer = ways.layouts, ways.answerer
        self._lock = threading.Lock()
        self._is_open = False
        self._drain = Drain()
        self._outage: ServeError | None = None
        self._deadlines = Deadlines(timers, weakly(self._expire))
        self._clients = ClientWatch(timers, self._lock, self._instances.waiting, weakly(self._client_left))
        self._delay = Alarm(timers, weakly(self._delay_passed))
        self._idle = IdleWatch(batching, self._book, timers, weakly(self._reap))

    # Requests

    @property
    def waiting(self) -> int:
        """See Scheduler."""
        with self._lock:
            return sum(1 for _ in self._instances.waiting)

    def submit(self, request: InferRequest, plan: RequestPlan, responder: Responder) -> None:
        """See Scheduler."""
        tag = self._admission.tag(request, plan)
        now_ns = time.monotonic_ns()
        entry = SequenceRequest(request, plan, responder, now_ns, nbytes=sum(map(len, request.data)), tag=tag)
        entry.expires_at = request.deadline
        if self._waits_for_answers:
            entry.responder = entry.answers = SequenceResponder(responder, entry, self._keeper, self._ended)
        if self._iterative:
            entry.on_again = self._again
        if not self._place(entry):
            home = self._homes.find(tag.id, request.head.model_version, self)
            if home is None:
                raise self._book.loss(tag.id) or self._admission.unknown(tag.id)
            home.adopt(request, responder)

    def adopt(self, request: InferRequest, responder: Responder) -> None:
        """See homes.SequenceHome."""
        plan = self._validator.validate(request)
        if self._config.decoupled:
            responder.expect_many()
        self.submit(request, plan, responder)

    def knows(self, sequence: SequenceId) -> bool:
        """See homes.SequenceHome."""
        with self._lock:
            return sequence in self._book

    def _place(self, entry: SequenceRequest) -> bool:
        """Take a request in; False: its sequence is not known here, and does not start with it.

        Raises: as `submit`.
        """
        tag, now = entry.tag, entry.queue_start_ns / 1e9
        with self._lock:
            is_known = tag.id in self._book
            if self._drain.closed and (tag.starts or not is_known):
                raise VersionEnding
            if not is_known and not tag.starts:
                return False
            if self._outage is not None:
                raise ServeError(self._outage.code, self._outage.text)
            slot = self._book.place(entry, now)
            self._note_wait(entry, slot, now)
            work = None
            collecting = self._timers.collecting
            if slot is not None:
                self._instances.feed_slot(slot, now)
                if not collecting:
                    work = self._next_work(slot.instance)
            self._idle.start()
        if is_known and tag.starts:
            self._log.warning("%s", self._admission.conflict(tag.id, entry.request.id))
        self._carry_on(work)
        if collecting:
            self._timers.when_collected(self._pump)
        return True

    def _note_wait(self, entry: SequenceRequest, slot: Slot | None, now: float) -> None:
        """Under the lock."""
        timeout = entry.plan.timeout_microseconds
        if slot is None and timeout:
            limit = now + timeout / 1e6
            entry.expires_at = limit if entry.expires_at is None else min(limit, entry.expires_at)
        if entry.expires_at is not None and self._deadlines.add(entry):
            self._deadlines.keep_only(self._instances.waiting)
        self._clients.start()

    # Instances

    def attach(self, channel: Channel) -> None:
        """See Scheduler."""
        with self._lock:
            self._outage = None
            self._instances.attach(channel, time.monotonic())
            self._idle.start()
            is_first, self._is_open = not self._is_open, True
        if is_first:
            self._homes.opened(self)
        self._pump()

    def detach(self, channel: Channel) -> None:
        """See Scheduler. Its sequences are lost: what the model knew of them, the worker knew."""
        with self._lock:
            self._instances.lose(channel, _WORKER_ENDED)
        self._carry_on(None)
        self._report_drained()

    def stop_sending_ahead(self) -> None:
        """Nothing is ever sent ahead: the next request of a sequence waits for the one before."""

    def fail_queue(self, outage: ServeError) -> None:
        """See Scheduler."""
        with self._lock:
            self._outage = outage
            self._book.clear_backlog(outage)
        self._carry_on(None)
        self._report_drained()

    def _granted(self) -> None:
        """An instance that had to wait for its turn may run."""
        self._pump()
        with self._lock:
            self._instances.pool.return_unused()

    # The end

    def close(self, drained: Callable[[], None]) -> None:
        """See Scheduler. Sequences that are under way go on, as long as requests of them can still come."""
        has_successor = self._homes.closing(self)
        with self._lock:
            self._drain.close(drained)
            if not has_successor:
                self._instances.end_all(time.monotonic())
        self._pump()
        self._report_drained()

    def _report_drained(self) -> None:
        with self._lock:
            is_empty = self._book.is_empty and not self._instances.waiting
            drained = self._drain.finished() if is_empty else None
        if drained is not None:
            self._homes.closed(self)
            drained()

    # Work

    def _next_work(self, instance: SequenceInstance) -> FormedBatch | None:
        """Under the lock: the next batch of an instance, where it is free and has one."""
        batch = self._instances.next_batch(instance, time.monotonic_ns(), self._delay.set)
        self._drain.running += batch is not None
        return batch

    def _pump(self) -> None:
        """Start all that can run now."""
        with self._lock:
            works = [(instance, self._next_work(instance)) for instance in self._instances]
        for instance, work in works:
            if work is not None:
                self._run(instance, work)
        self._carry_on(None)

    def _carry_on(self, work: FormedBatch | None) -> None:
        """Without the lock: run a batch, and answer what is not to run."""
        if work is not None:
            slot = next(entry.slot for entry in work.undropped if isinstance(entry, SequenceRequest))
            assert slot is not None
            self._run(slot.instance, work)
        if self._book.refused:
            with self._lock:
                refused, self._book.refused = self._book.refused, []
            for entry, error in refused:
                self._refuse(entry, error)
            self._report_drained()

    def _run(self, instance: SequenceInstance, batch: FormedBatch) -> None:
        channel = instance.channel
        try:
            layout, requests = self._layouts.of(batch, channel)
            channel.execute(layout, requests, lambda outcome: self._finish(instance, batch, outcome))
        except WorkerGone as gone:
            self._layouts.forget(batch)
            self._fail(instance, batch, gone.text)
        except Exception as error:
            failure = not_handed_over(batch, error, self._config.name, self._log)
            self._layouts.forget(batch)
            with self._lock:
                self._drain.running -= 1
                self._instances.pool.end(channel, batch, 0)
                for entry in batch.undropped:
                    self._instances.done(entry, time.monotonic())
            for entry in batch.undropped:
                self._refuse(entry, failure)
            self._report_drained()
            # Not in here: the next batch may fail as well, and so on for all that wait.
            self._timers.call_soon(self._pump)

    def _fail(self, instance: SequenceInstance, batch: FormedBatch, reason: str) -> None:
        """The worker is gone and nothing of the batch ran: nor will anything else of its sequences."""
        with self._lock:
            self._drain.running -= 1
            self._instances.lose(instance.channel, reason)
        for entry in batch.undropped:
            if isinstance(entry, SequenceRequest):
                self._refuse(entry, self._book.loss_of(entry.tag.id, reason))
        self._carry_on(None)
        self._report_drained()

    def _finish(self, instance: SequenceInstance, batch: FormedBatch, outcome: BatchOutcome) -> None:
        """On the completion thread. Without states the next batch is started before this one's answers are written."""
        if isinstance(outcome.error, WorkerGone):
            outcome.release()
            self._layouts.forget(batch)
            self._fail(instance, batch, outcome.error.text)
            return
        work = None
        with self._lock:
            self._instances.pool.end(instance.channel, batch, outcome.output_start_ns - outcome.input_end_ns)
            if outcome.error is None:
                self._times.observe(batch, outcome)
            if self._waits_for_answers:
                instance.answering = True
            else:
                for entry in batch.undropped:
                    self._instances.done(entry, time.monotonic())
                work = self._next_work(instance)
        if work is not None:
            self._run(instance, work)
        is_answered = True
        try:
            is_answered = self._answerer.answer(batch, outcome)
        finally:
            outcome.release()
            if self._waits_for_answers:
                with self._lock:
                    instance.answering = False
                    work = self._next_work(instance)
                if work is not None:
                    self._run(instance, work)
            self._carry_on(None)
            if is_answered:
                self._batch_ended()

    def _ended(self, entry: SequenceRequest) -> None:
        """A request of a model whose answers are waited for has its last; called before that is sent."""
        slot = entry.slot
        if slot is None:
            return
        with self._lock:
            if self._iterative:
                self._book.end(slot, entry.tag.id)
            self._instances.done(entry, time.monotonic())
            work = self._next_work(slot.instance)
        self._carry_on(work)

    def _again(self, entry: QueuedRequest) -> None:
        """The model wants a request once more, as it was but for the flags."""
        assert isinstance(entry, SequenceRequest)
        slot, answers = entry.slot, entry.answers
        assert slot is not None and answers is not None, "it has run"
        again = once_more(entry, time.monotonic_ns())
        answers.request = again
        with self._lock:
            is_taken = self._instances.run_again(entry, again, time.monotonic())
            self._clients.start()
            work = self._next_work(slot.instance)
        if not is_taken:
            self._refuse(again, self._book.loss(again.tag.id) or self._admission.unknown(again.tag.id))
        self._carry_on(work)

    def _batch_ended(self) -> None:
        """All requests of a batch have been answered."""
        with self._lock:
            self._drain.running -= 1
        if self._drain.awaited:
            self._report_drained()

    def _refuse(self, entry: QueuedRequest, error: ServeError) -> None:
        refuse(entry, error, self._statistics)

    # Time

    def _client_left(self, entry: QueuedRequest) -> None:
        """Its sequence ends with it, unless it runs already."""
        if not isinstance(entry, SequenceRequest):
            return
        with self._lock:
            self._instances.leave(entry, time.monotonic())
        self._pump()

    def _expire(self) -> None:
        """On the timers' thread."""
        now = time.monotonic()
        left: list[SequenceRequest] = []
        with self._lock:
            for entry in self._deadlines.pop_due(now):
                if not isinstance(entry, SequenceRequest):
                    continue
                deadline = entry.request.deadline
                if deadline is not None and deadline <= now:
                    left.append(entry)
                else:
                    self._book.expire(entry)
        for entry in left:
            self._client_left(entry)
        self._carry_on(None)

    def _delay_passed(self) -> None:
        with self._lock:
            self._delay.rung()
        self._pump()

    def _reap(self) -> None:
        with self._lock:
            self._idle.look()
            now = time.monotonic()
            for instance in self._instances:
                self._instances.feed(instance, now)
        self._pump()
        self._report_drained()
