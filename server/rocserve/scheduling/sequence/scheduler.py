"""Schedules the requests of models with sequences."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import cast

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, copied_error, invalid_argument, unavailable
from rocserve.core.exchange import ENDED, Exchange, HookOrder
from rocserve.core.model_config import ModelConfig, SequenceBatching
from rocserve.core.padding import Padding
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import NO_SEQUENCE, SequenceId, SequenceTag
from rocserve.plane.loop import Alarm
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.batch_policy import DynamicBatcher
from rocserve.scheduling.bucket_batcher import BucketBatcher
from rocserve.scheduling.queue import ARRIVAL, QueueFull
from rocserve.scheduling.response_sequencer import OrderHook, ResponseSequencer
from rocserve.scheduling.scheduler import Scheduler, SchedulerParts, cancelled
from rocserve.scheduling.sequence.inputs import SequenceInputs, StatesHook
from rocserve.scheduling.sequence.router import RoutedVersion
from rocserve.scheduling.sequence.slots import SequenceInstance, SequenceRequest
from rocserve.scheduling.sequence.table import SequenceTable
from rocserve.workers.instance import Instance, WorkerGone
from rocserve.workers.results import BatchOutcome


class DirectStrategy:
    """Forms batches by Triton's strategy "direct": each sequence keeps its row, and rows between are padding."""

    def __init__(
        self, config: ModelConfig, batching: SequenceBatching, inputs: SequenceInputs, padding: Padding
    ) -> None:
        self.slot_count = max(config.max_batch_size, 1)
        self._delay_ns = batching.slot_delay_microseconds * 1000
        self._utilization = batching.slot_utilization
        self._inputs = inputs

    def choose(self, instance: SequenceInstance, now_ns: int) -> list[SequenceRequest] | int:
        """Return the requests of the next batch, or the time.monotonic_ns() at which to choose again. The instance has
        requests that are ready. Padding rows have an exchange that has ended."""
        ready = list(self._inputs.ready_requests(instance))
        oldest = min(ready, key=ARRIVAL)
        if self._delay_ns and len(ready) < self._utilization * self.slot_count:
            due_ns = oldest.queue_start_ns + self._delay_ns
            if due_ns > now_ns:
                return due_ns
        key = oldest.plan.batch_key
        rows = {request.slot.index: request for request in ready if request.plan.batch_key == key}
        return [rows.get(index) or self._inputs.padding_row(oldest) for index in range(max(rows) + 1)]


class OldestStrategy:
    """Forms batches by Triton's strategy "oldest": each slot hands one request at a time to a dynamic batcher."""

    def __init__(
        self, config: ModelConfig, batching: SequenceBatching, inputs: SequenceInputs, padding: Padding
    ) -> None:
        oldest = batching.oldest
        assert oldest is not None, "the other strategy"
        rows = max(config.max_batch_size, 1)
        self.slot_count = oldest.max_candidate_sequences or rows
        preferred = oldest.preferred_batch_sizes if config.max_batch_size else ()
        batcher = DynamicBatcher(rows, preferred or (rows,), oldest.max_queue_delay_microseconds * 1000)
        self._batcher = BucketBatcher(batcher, padding, oldest.preserve_ordering) if padding.dimensions else batcher
        self._inputs = inputs

    def choose(self, instance: SequenceInstance, now_ns: int) -> list[SequenceRequest] | int:
        decision = self._batcher.decide(self._inputs.ready_requests(instance), now_ns)
        if not decision.request_count:
            return decision.decide_again_at_ns
        return [*cast(Sequence[SequenceRequest], decision.members(self._inputs.ready_requests(instance)))]


class SequenceScheduler(Scheduler):
    """Gives each sequence a slot of an instance; the strategy forms batches from the slots. See Scheduler."""

    def __init__(self, parts: SchedulerParts) -> None:
        super().__init__(parts, sends_ahead=False)
        config = parts.config
        batching = config.sequence_batching
        assert batching is not None, "a model without sequences"
        self._router = parts.router
        self._inputs = SequenceInputs(config, batching, parts.initial_states)
        self._correlation_id = self._inputs.controls.correlation_id
        self._numbers = itertools.count(1)
        """Sequence ids for an iterative model's requests without one: each is a separate sequence."""
        self._queue = self._table = SequenceTable(
            config.name, parts.limits, self._times, max(config.max_batch_size, 1), self._refused
        )
        self._routed = RoutedVersion(parts.version, self._table, self.adopt, self._schedule_pump)
        kind = DirectStrategy if batching.oldest is None else OldestStrategy
        self._strategy: DirectStrategy | OldestStrategy = kind(config, batching, self._inputs, parts.padding)
        self._instances: dict[Instance, SequenceInstance] = {}
        self._instance_count = 0
        """Instances that were ever attached."""
        self._keeps_order = batching.oldest is not None and batching.oldest.preserve_ordering
        self._iterative = batching.iterative
        self._waits_for_answers = bool(batching.states) or batching.iterative
        """The next request of a sequence cannot run before the previous answer is known."""
        self._idle = Alarm(parts.plane)
        self._idle_seconds = batching.max_sequence_idle_microseconds / 1e6

    # Requests

    def submit(self, request: InferRequest, exchange: Exchange) -> None:
        """See Scheduler. Requests of another version's sequence go to that version."""
        tag = self._tag(request)
        is_known = tag.id in self._table
        if not is_known and not tag.starts:
            owner = self._router.find(tag.id, request.head.model_version, self._routed)
            if owner is None:
                raise self._table.lost_error(tag.id) or self._unknown(tag.id)
            owner.adopt(request, exchange)
            return
        if self._outage is not None:
            raise copied_error(self._outage)
        now_ns = time.monotonic_ns()
        queued = SequenceRequest.of(request, tag, exchange, now_ns)
        if self._waits_for_answers:
            states = StatesHook(queued, self._inputs, self._request_ended)
            exchange.add(states)
            if self._iterative:
                queued.on_reschedule = partial(self._run_again, states)
        self._place(queued, now_ns / 1e9)
        self._arrived.append(queued)
        if tag.starts:
            self._router.restart(tag.id, self._routed)
        if is_known and tag.starts:
            self._log.warning(
                "%ssequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence"
                " start. Previous sequence will be terminated early.",
                request_prefix([request.id]),
                tag.id,
                self._config.name,
            )
        self._schedule_pump()

    def _tag(self, request: InferRequest) -> SequenceTag:
        """Return the request's sequence. Raises ServeError (INVALID_ARGUMENT) if the request may not belong to it."""
        tag, model = request.sequence or NO_SEQUENCE, self._config.name
        if request.plan.batch_size > 1:
            raise invalid_argument(
                f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence"
                " batcher"
            )
        if not tag.id:
            if not self._iterative:
                raise invalid_argument(
                    f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
                )
            return SequenceTag(next(one for one in self._numbers if one not in self._table), starts=True)
        control, is_text = self._correlation_id, isinstance(tag.id, str)
        if control is not None and (control.datatype is DataType.BYTES) is not is_text:
            raise invalid_argument(
                f"{request_prefix([request.id])}sequence batching control '{control.name}' data-type is"
                f" '{'BYTES' if is_text else 'UINT64'}', but model '{model}' expects '{control.datatype.value}'"
            )
        return tag

    def _unknown(self, sequence: SequenceId) -> ServeError:
        """Return the error for a request of an unknown or ended sequence without the START flag."""
        return invalid_argument(
            f"inference request for sequence {sequence} to model '{self._config.name}' must specify the START flag on"
            " the first request of the sequence"
        )

    def _place(self, request: SequenceRequest, now: float) -> None:
        try:
            has_slot = self._table.place(request, now)
        except QueueFull:
            if not self._is_pump_scheduled:
                raise
            # Requests of this turn that can run now leave their slots first.
            self._pump()
            if not request.tag.starts and request.tag.id not in self._table:
                raise self._unknown(request.tag.id) from None
            has_slot = self._table.place(request, now)
        request.expires_at = request.deadline
        timeout = request.plan.timeout_microseconds
        if timeout and not has_slot:
            limit = now + timeout / 1e6
            request.expires_at = limit if request.expires_at is None else min(limit, request.expires_at)
        self._watch_idle()

    def adopt(self, request: InferRequest, exchange: Exchange) -> None:
        """Take a request for a sequence of this version that arrived at its successor. Raises ServeError as
        `submit`."""
        self.validator.validate(request)
        if self._config.decoupled:
            exchange.expect_many()
        self._pool.take_over(request)
        self.submit(request, exchange)

    def _is_empty(self) -> bool:
        return self._table.is_empty and super()._is_empty()

    # Instances

    def attach(self, worker: Instance) -> None:
        """See Scheduler. The instance comes with free slots."""
        super().attach(worker)
        if not self._instance_count:
            self._router.add(self._routed)
        instance = SequenceInstance(worker, self._instance_count, self._strategy.slot_count)
        self._instance_count += 1
        if self._keeps_order:
            instance.sequencer = ResponseSequencer()
        self._instances[worker] = instance
        self._table.add_instance(instance, time.monotonic())
        self._watch_idle()

    def detach(self, worker: Instance) -> None:
        """See Scheduler. The instance's sequences are lost, because the worker had their states."""
        self._lose_instance(worker, "the worker has ended")
        self._schedule_pump()

    def _lose_instance(self, worker: Instance, reason: str) -> None:
        """May be called twice."""
        self._pool.detach(worker)
        instance = self._instances.pop(worker, None)
        if instance is not None:
            self._table.remove_instance(instance, reason, time.monotonic())

    # Work

    def _start_work(self) -> None:
        for instance in self._table.instances:
            batch = self._next_batch(instance, time.monotonic_ns())
            if batch is not None and not self._run(instance.worker, batch):
                self._batch_left(batch)
                return

    def _next_batch(self, instance: SequenceInstance, now_ns: int) -> FormedBatch | None:
        worker = instance.worker
        if instance.is_answering or not self._pool.is_idle(worker):
            return None
        if self._table.deadline_count:
            self._times.review(now_ns)
            # Requests may have expired since they became ready.
            for slot in tuple(instance.ready):
                self._table.advance(slot, now_ns / 1e9)
        if not instance.ready:
            return None
        chosen = self._strategy.choose(instance, now_ns)
        if isinstance(chosen, int):
            self._delay.set(chosen / 1e9, self._schedule_pump)
            return None
        if not self._pool.claim(worker):
            return None
        batch = FormedBatch(list[InferRequest](chosen), now_ns)
        for request in chosen:
            if request.exchange.state is ENDED:
                batch.padding_rows += 1
                continue
            self._table.take(request, now_ns / 1e9)
            if instance.sequencer is not None and not request.exchange.has(HookOrder.TURN):
                request.exchange.add(OrderHook(instance.sequencer.ticket(), self.work_off))
        self._pool.begin(worker, batch)
        return batch

    def _finish(self, worker: Instance, batch: FormedBatch, outcome: BatchOutcome) -> None:
        """See Scheduler. If the next requests need the answers, no batch is formed until all are answered."""
        instance = self._instances.get(worker) if self._waits_for_answers else None
        if not self._waits_for_answers and not isinstance(outcome.error, WorkerGone):
            self._batch_left(batch)
        if instance is None:
            super()._finish(worker, batch, outcome)
            return
        instance.is_answering = True
        try:
            super()._finish(worker, batch, outcome)
        finally:
            instance.is_answering = False
            self._schedule_pump()

    def _batch_left(self, batch: FormedBatch) -> None:
        """Let the next requests of the batch's sequences run."""
        now = time.monotonic()
        for request in batch.requests:
            if isinstance(request, SequenceRequest):
                self._table.request_done(request, now)

    def _requeue(self, worker: Instance, batch: FormedBatch, gone: WorkerGone) -> None:
        """See Scheduler. The sequences of the batch are lost."""
        self._lose_instance(worker, gone.text)
        for request in batch.running:
            if isinstance(request, SequenceRequest):
                self._give_up(request, self._table.lost_sequence_error(request.tag.id, gone.text))

    def _request_ended(self, request: SequenceRequest) -> None:
        """Free the slot of a request whose last answer comes, if the sequence's next request waits for answers."""
        if request.live is None:
            return
        if self._iterative and not request.live.queue:
            self._table.end(request.live)
        self._table.request_done(request, time.monotonic())
        self._schedule_pump()

    def _run_again(self, states: StatesHook, request: InferRequest) -> None:
        """Run a request again because its model asks for it, unchanged except for the flags."""
        assert isinstance(request, SequenceRequest) and request.original is not None, "it has run"
        now_ns = time.monotonic_ns()
        again = copy(request)
        (again.data, again.plan), again.original = request.original, None
        again.queue_start_ns, again.tag = now_ns, SequenceTag(request.tag.id)
        states.request = again
        if not self._table.requeue(again, now_ns / 1e9):
            again.live = None
            error = self._table.lost_error(again.tag.id) or self._unknown(again.tag.id)
            self._give_up(again, error)
        elif again.exchange.has_left:
            self._table.take_out(again, cancelled(), now_ns / 1e9)
        else:
            self._watch_time(again)
            # Each run may be shorter than the time after which clients are watched.
            again.exchange.watch_cancellation(partial(self._client_left, again))
        self._table.request_done(request, now_ns / 1e9)
        self._schedule_pump()

    # The end

    def close(self, drained: Callable[[], None]) -> None:
        """See Scheduler. Sequences go on as long as their requests can come through another version."""
        if not self._router.begin_closing(self._routed):
            self._table.end_all(time.monotonic())
        super().close(drained)

    def _break_cycles(self) -> None:
        super()._break_cycles()
        self._idle.cancel()
        self._router.remove(self._routed)
        del self._routed

    # Time, and clients that leave

    def _take_out(self, request: InferRequest, error: ServeError) -> None:
        """See Scheduler. The request's sequence ends with it. A request that was run again has been replaced by a copy
        with the same exchange, which is refused separately."""
        assert isinstance(request, SequenceRequest)
        if request.live is not None:
            self._table.take_out(request, error, time.monotonic())

    def _time_out(self, request: InferRequest) -> ServeError | None:
        return unavailable("timeout of the corresponding sequence has been expired")

    def _watch_idle(self) -> None:
        if not self._idle.is_set:
            end_at = self._table.end_idle(time.monotonic(), self._idle_seconds)
            if end_at is not None:
                self._idle.set(end_at, self._end_idle)

    def _end_idle(self) -> None:
        self._watch_idle()
        self._schedule_pump()
