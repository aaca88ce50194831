"""Schedules the requests of models without sequences."""

from __future__ import annotations

import time

from rocserve.core.errors import ServeError, copied_error, deadline_exceeded, unavailable
from rocserve.core.exchange import Exchange, HookOrder
from rocserve.core.requests import InferRequest
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.batch_policy import NOTHING, BatchPolicy, DynamicBatcher, Triage, batch_policy
from rocserve.scheduling.bucket_batcher import BucketBatcher
from rocserve.scheduling.queue import QueueFull, RequestQueue
from rocserve.scheduling.response_sequencer import OrderHook, ResponseSequencer
from rocserve.scheduling.scheduler import Scheduler, SchedulerParts, cancelled
from rocserve.workers.instance import Instance, WorkerGone


class ModelScheduler(Scheduler):
    """Schedules independent requests: one queue for all instances, batches as the model's batch policy decides."""

    def __init__(self, parts: SchedulerParts) -> None:
        batching = parts.config.dynamic_batching
        self._queue: RequestQueue = RequestQueue(batching, parts.limits)
        super().__init__(parts, sends_ahead=not self._queue.has_policies)
        self._sequencer = ResponseSequencer() if batching is not None and batching.preserve_ordering else None
        keeps_order = self._sequencer is not None
        policy = batch_policy(parts.config, self._times)
        self._policy: BatchPolicy = policy
        if parts.padding.dimensions and isinstance(policy, DynamicBatcher):
            self._policy = BucketBatcher(policy, parts.padding, keeps_order)
        self._triage = Triage(self._queue, self._policy, self._times, keeps_order)
        self._fewest_for_busy = 0
        """Waiting requests with which the next batch may be full; with fewer, busy instances are sent none."""

    # Requests

    def submit(self, request: InferRequest, exchange: Exchange) -> None:
        if self._outage is not None:
            raise copied_error(self._outage)
        request.exchange = exchange
        request.queue_start_ns = now_ns = time.monotonic_ns()
        queue = self._queue
        if request.deadline is not None or queue.has_policies or request.plan.timeout_microseconds:
            queue.admit(request, now_ns / 1e9)
        try:
            queue.push(request)
        except QueueFull:
            if not self._is_pump_scheduled:
                raise
            # Requests of this turn that can run now leave the queue first.
            self._pump()
            queue.push(request)
        self._arrived.append(request)
        if request.deadline is not None:
            self._triage.note(request)
        if not self._is_pump_scheduled:
            self._schedule_pump()

    # Work

    def _start_work(self) -> None:
        """See Scheduler. A busy instance is sent a batch ahead only if the batch could not grow by waiting. The same
        applies to an idle instance while another will end its batch soon."""
        queue, pool = self._queue, self._pool
        while queue.count and not self._is_pump_scheduled:
            idle = pool.idle()
            instance = idle or pool.ahead()
            if instance is None:
                return
            if idle is None and queue.count < self._fewest_for_busy and not queue.deadline_count:
                return
            now_ns = time.monotonic_ns()
            if queue.deadline_count:
                batches_before = max(0, len(pool.in_flight[instance]) + 1 - instance.batches_at_once)
                decision = self._triage.decide(now_ns, batches_before)
                for request in self._triage.dropped:
                    self._give_up(request, deadline_exceeded())
                self._triage.dropped.clear()
            else:
                decision = self._policy.decide(queue, now_ns)
            if not decision.is_full:
                if idle is None:
                    self._fewest_for_busy = queue.count + decision.missing
                    return
                next_return_ns = pool.next_return_ns
                if now_ns < next_return_ns:
                    self._delay.set(next_return_ns / 1e9, self._schedule_pump)
                    return
            if decision.request_count == 0:
                if decision is not NOTHING:
                    self._delay.set(decision.decide_again_at_ns / 1e9, self._schedule_pump)
                return
            claimed = pool.claim_any(instance)
            if claimed is None:
                return
            instance = claimed
            self._fewest_for_busy = 0
            count, chosen = decision.request_count, decision.chosen
            if decision.is_grouped:
                # The requests of a group run one after another, so idle instances share them.
                count = min(count, -(-queue.count // max(1, pool.idle_count)))
            requests = queue.take_chosen(chosen[:count]) if chosen else queue.take(count)
            batch = FormedBatch(requests, now_ns, decision.is_grouped and count > 1)
            if self._sequencer is not None:
                for request in batch.requests:
                    # Tickets are given late, so a request that is refused while it waits delays no other. A request
                    # that comes back from a worker has its ticket.
                    if not request.exchange.has(HookOrder.TURN):
                        request.exchange.add(OrderHook(self._sequencer.ticket(), self.work_off))
            pool.begin(instance, batch)
            self._run(instance, batch)

    def _requeue(self, instance: Instance, batch: FormedBatch, gone: WorkerGone) -> None:
        """See Scheduler. The requests return to the front of the queue, except those whose clients have left or whose
        time has passed: neither is reported again."""
        self._pool.detach(instance)
        again: list[InferRequest] = []
        now = time.monotonic()
        for request in batch.running:
            refusal = cancelled() if request.exchange.has_left else self._outage or self._expiry(request, now)
            if refusal is None:
                again.append(request)
            else:
                self._give_up(request, refusal)
        self._queue.push_back(again)
        self._arrived += again
        for request in again:
            if request.deadline is not None:
                self._triage.note(request)

    # Requests that have not begun to run

    def _take_out(self, request: InferRequest, error: ServeError) -> None:
        self._queue.remove(request)
        self._give_up(request, error)

    def _time_out(self, request: InferRequest) -> ServeError | None:
        if self._queue.delay(request):
            self._watch_time(request)
            return None
        return unavailable("Request timeout expired")
