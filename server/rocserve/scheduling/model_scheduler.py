"""The scheduler of models whose requests are independent of each other: one queue before all instances."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rocserve.core.errors import ServeError, deadline_exceeded, repeated, unavailable
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.batch_policy import batch_policy
from rocserve.scheduling.queue import QueueFull, RequestQueue
from rocserve.scheduling.response_sequencer import OrderedResponder, ResponseSequencer
from rocserve.scheduling.scheduler import Scheduler, SchedulerParts, cancelled
from rocserve.scheduling.triage import NOTHING, Triage
from rocserve.workers.instance import Instance, WorkerGone


class ModelScheduler(Scheduler):
    """See Scheduler; batches are formed as the model's batch policy says."""

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
        self._refused += [(entry, outage) for entry in self._queue.clear()]
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
                decision = self._triage.decide(now_ns, pool.count_in_hand(instance))
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
                        entry.responder = OrderedResponder(entry.responder, self._sequencer.ticket())
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
