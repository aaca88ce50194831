"""How requests of several sequences become batches of one instance: direct and oldest, as Triton has them."""

from __future__ import annotations

from typing import Protocol

from rocserve.core.model_config import DynamicBatching, ModelConfig, SequenceBatching
from rocserve.scheduling.batch_policy import BatchPolicy, DynamicBatcher, NoBatching
from rocserve.scheduling.queue import QueueLimits, RequestQueue
from rocserve.scheduling.sequence.inputs import SequenceInputs
from rocserve.scheduling.sequence.table import SequenceInstance, SequenceRequest, SequenceTable, Slot

_DEFAULT_CANDIDATES = 1


class Strategy(Protocol):
    """One model's."""

    slot_count: int
    """Of each instance."""

    def prepare(self, instance: SequenceInstance) -> None:
        """A new one."""

    def feed(self, slot: Slot, now: float) -> None:
        """A slot that is not busy may have got a request, or be done with one."""

    def ready_at(self, instance: SequenceInstance, now_ns: int) -> int | None:
        """When it has a batch to run, by time.monotonic_ns(): now at the latest, or later; None = nothing is there."""

    def form(self, instance: SequenceInstance, now_ns: int) -> list[SequenceRequest]:
        """The batch, once it is ready, with the controls and states; a row of no request has the responder NOBODY."""


def strategy_of(
    config: ModelConfig, batching: SequenceBatching, table: SequenceTable, inputs: SequenceInputs
) -> Strategy:
    """What a model's configuration asks for."""
    if batching.oldest is not None:
        return OldestStrategy(config, batching, table, inputs)
    return DirectStrategy(config, batching, table, inputs)


class DirectStrategy:
    """Each sequence keeps its row of the batch: the rows between of those that have nothing to run are no requests."""

    def __init__(
        self, config: ModelConfig, batching: SequenceBatching, table: SequenceTable, inputs: SequenceInputs
    ) -> None:
        self.slot_count = max(config.max_batch_size, 1)
        direct = batching.direct
        self._delay_ns = direct.max_queue_delay_microseconds * 1000 if direct is not None else 0
        self._utilization = direct.minimum_slot_utilization if direct is not None else 0.0
        self._table = table
        self._inputs = inputs

    def prepare(self, instance: SequenceInstance) -> None:
        """See Strategy."""

    def feed(self, slot: Slot, now: float) -> None:
        """See Strategy."""

    def ready_at(self, instance: SequenceInstance, now_ns: int) -> int | None:
        fronts = [slot.queue[0] for slot in self._waiting(instance)]
        if not fronts:
            return None
        is_used = len(fronts) / self.slot_count >= self._utilization
        if not self._delay_ns or not self._utilization or is_used:
            return now_ns
        return min(request.queue_start_ns for request in fronts) + self._delay_ns

    def form(self, instance: SequenceInstance, now_ns: int) -> list[SequenceRequest]:
        """See Strategy. The request that has waited longest says what the others must be like."""
        waiting = self._waiting(instance)
        for slot in waiting:
            self._inputs.begin(slot.queue[0], slot)
        oldest = min(waiting, key=lambda slot: slot.queue[0].queue_start_ns)
        batch_key = self._inputs.plan(oldest.queue[0]).batch_key
        rows: dict[int, SequenceRequest] = {}
        for slot in waiting:
            if self._inputs.plan(slot.queue[0]).batch_key == batch_key:
                slot.busy = True
                request = rows[slot.index] = self._table.take(slot, now_ns / 1e9)
                self._inputs.add_to(request)
        model = rows[oldest.index]
        return [rows.get(index) or self._inputs.absent(model) for index in range(max(rows) + 1)]

    def _waiting(self, instance: SequenceInstance) -> list[Slot]:
        return [slot for slot in instance.slots if slot.queue and not slot.busy]


class OldestStrategy:
    """Each slot hands one request at a time to its instance's dynamic batcher."""

    def __init__(
        self, config: ModelConfig, batching: SequenceBatching, table: SequenceTable, inputs: SequenceInputs
    ) -> None:
        oldest = batching.oldest
        assert oldest is not None, "the other strategy"
        self.slot_count = oldest.max_candidate_sequences or max(config.max_batch_size, _DEFAULT_CANDIDATES)
        self._policy: BatchPolicy = NoBatching(None)
        if config.max_batch_size > 0:
            self._policy = DynamicBatcher(
                config.max_batch_size,
                oldest.preferred_batch_sizes or (config.max_batch_size,),
                oldest.max_queue_delay_microseconds * 1000,
            )
        self._table = table
        self._inputs = inputs

    def prepare(self, instance: SequenceInstance) -> None:
        # Bounded by the number of slots.
        instance.candidates = RequestQueue(DynamicBatching(), QueueLimits(self.slot_count + 1, 1 << 62))

    def feed(self, slot: Slot, now: float) -> None:
        if not slot.queue:
            return
        slot.busy = True
        self._inputs.begin(slot.queue[0], slot)
        request = self._table.take(slot, now)
        self._inputs.add_to(request)
        assert slot.instance.candidates is not None
        slot.instance.candidates.push(request)

    def ready_at(self, instance: SequenceInstance, now_ns: int) -> int | None:
        queue = instance.candidates
        if not queue:
            return None
        decision = self._policy.decide(queue, now_ns)
        return now_ns if decision.request_count else decision.decide_again_at_ns

    def form(self, instance: SequenceInstance, now_ns: int) -> list[SequenceRequest]:
        queue = instance.candidates
        assert queue is not None
        count = self._policy.decide(queue, now_ns).request_count
        return [request for request in queue.take(count) if isinstance(request, SequenceRequest)]
