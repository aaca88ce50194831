"""Keeps the sequences of one model version: their slots, their waiting requests, and when each was last used."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocserve.core.errors import ServeError, deadline_exceeded, unavailable
from rocserve.core.memo import Memo
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import NO_SEQUENCE, SequenceId, SequenceTag
from rocserve.core.serving import Responder
from rocserve.core.tensors import Buffer
from rocserve.core.validation import RequestPlan
from rocserve.scheduling.batch_policy import half_time
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.queue import QueueFull, QueueLimits
from rocserve.scheduling.response_sequencer import ResponseSequencer
from rocserve.scheduling.scheduler import Refused, cancelled
from rocserve.workers.instance import Instance

if TYPE_CHECKING:
    from rocserve.scheduling.sequence.inputs import SequenceResponder, SequenceStates


@dataclass(slots=True, eq=False)
class SequenceRequest(InferRequest):
    @classmethod
    def of(cls, request: InferRequest, tag: SequenceTag, responder: Responder, now_ns: int) -> SequenceRequest:
        """Make the scheduler's copy of a validated request."""
        own = cls(
            request.head,
            request.id,
            request.data,
            request.deadline,
            request.in_turn,
            request.trace,
            request.phases,
            request.sequence,
            request.data_owner,
            tag=tag,
        )
        own.plan, own.nbytes, own.responder, own.queue_start_ns = request.plan, request.nbytes, responder, now_ns
        return own

    tag: SequenceTag = NO_SEQUENCE
    live: LiveSequence | None = None
    """The sequence in which the request waits or runs; None before and after."""
    refusal: ServeError | None = None
    """Its time has passed, or its client has left: the sequence ends with this error when the request's turn comes."""
    answers: SequenceResponder | None = None
    """Takes the states out of the answers. A request that is run again keeps this responder."""
    original: tuple[Sequence[Buffer], RequestPlan] | None = None
    """The client's data, and the plan, without controls and states; None as long as these are not added."""

    @property
    def slot(self) -> SequenceSlot:
        """Return the slot that the request's sequence has been given."""
        assert self.live is not None and self.live.slot is not None, "its sequence has a slot"
        return self.live.slot


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence that takes more requests, or that has ended but has requests that wait or run."""

    id: SequenceId
    queue: deque[SequenceRequest] = field(default_factory=deque)
    slot: SequenceSlot | None = None
    """None = the sequence waits for a slot."""
    states: SequenceStates | None = None
    has_ended: bool = False
    """No more requests of the sequence come: it leaves its slot when its last one, with the END flag, begins to run, or
    else when that one is done."""


@dataclass(slots=True, eq=False)
class SequenceSlot:
    """A slot of an instance, for one sequence at a time."""

    instance: SequenceInstance
    index: int
    live: LiveSequence | None = None
    busy: bool = False
    """A request of the slot runs, maybe the last of an earlier sequence: the next must wait."""


@dataclass(slots=True, eq=False)
class SequenceInstance:
    worker: Instance
    number: int
    slot_count: int
    """The most sequences at a time."""
    slots: list[SequenceSlot] = field(default_factory=list)
    """Made when needed: all slots that have had a sequence, and the next one."""
    ready: dict[SequenceSlot, None] = field(default_factory=dict)
    """The slots that are not busy and have a request, in the order in which they became so."""
    is_answering: bool = False
    """A batch is being answered: the next one is formed after that."""
    sequencer: ResponseSequencer | None = None
    """None = responses need no order."""


_REMEMBERED_LOSSES = 10_000


class SequenceTable:
    """Gives sequences slots, and keeps their requests until they run."""

    def __init__(
        self, model: str, limits: QueueLimits, times: ComputeTimes, largest_batch: int, refused: list[Refused]
    ) -> None:
        """`largest_batch`: in rows. `refused`: the scheduler's list of requests that must not run."""
        self._model = model
        self._limits = limits
        self._times = times
        self._largest_batch = largest_batch
        self.instances: list[SequenceInstance] = []
        self._live: dict[SequenceId, LiveSequence] = {}
        """The sequences that have not ended."""
        self._free: list[tuple[int, int, SequenceSlot]] = []
        """Heap of free slots by index: using the lowest keeps batches short."""
        self._backlog: deque[LiveSequence] = deque()
        """The sequences that wait for a slot."""
        self._last_used: OrderedDict[SequenceId, float] = OrderedDict()
        """time.monotonic() of the last use of each sequence in a slot, the longest unused first."""
        self._lost = Memo[SequenceId, str](_REMEMBERED_LOSSES)
        self._refused = refused
        self.count = 0
        self.deadline_count = 0
        self._nbytes = 0

    # Sequences

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._live

    def __iter__(self) -> Iterator[SequenceRequest]:
        """Yield the requests that wait."""
        for instance in self.instances:
            for slot in instance.slots:
                if slot.live is not None:
                    yield from slot.live.queue
        for live in self._backlog:
            yield from live.queue

    @property
    def is_empty(self) -> bool:
        return not self._live and not self.count

    def lost_error(self, sequence: SequenceId) -> ServeError | None:
        """Return the error for requests of a lost sequence; None if it was not lost, or the loss is forgotten."""
        reason = self._lost.get(sequence)
        return None if reason is None else self.lost_sequence_error(sequence, reason)

    def lost_sequence_error(self, sequence: SequenceId, reason: str) -> ServeError:
        return unavailable(
            f"sequence {sequence} of model '{self._model}' has been lost with the worker that ran it, start it again:"
            f" {reason}"
        )

    def place(self, request: SequenceRequest, now: float) -> bool:
        """Add a request. Returns whether its sequence has a slot. Raises QueueFull."""
        if self.count >= self._limits.max_requests or self._nbytes + request.nbytes > self._limits.max_bytes:
            raise QueueFull(request.id)
        sequence = request.tag.id
        live = self._live.get(sequence)
        if live is None:
            self._lost.pop(sequence, None)
            live = self._live[sequence] = LiveSequence(sequence)
            if self._free:
                free = heapq.heappop(self._free)[2]
                free.live, live.slot = live, free
                if free is free.instance.slots[-1]:
                    self._open_slot(free.instance, now)
            else:
                self._backlog.append(live)
        self._add(request, live)
        if request.tag.ends:
            self.end(live)
        slot = live.slot
        if slot is None:
            return False
        self._use(live, now)
        if not slot.busy:
            self.advance(slot, now)
        return True

    def end(self, live: LiveSequence) -> None:
        if not live.has_ended:
            live.has_ended = True
            del self._live[live.id]
            self._last_used.pop(live.id, None)

    def end_all(self, now: float) -> None:
        """End all sequences; each runs to the last request that has come."""
        for live in tuple(self._live.values()):
            self.end(live)
            if live.slot is not None and not live.slot.busy:
                self.advance(live.slot, now)

    def _use(self, live: LiveSequence, now: float) -> None:
        if not live.has_ended:
            self._last_used[live.id] = now
            self._last_used.move_to_end(live.id)

    # Slots

    def advance(self, slot: SequenceSlot, now: float) -> None:
        """Give the slot to the next sequence if the present one has ended, or if its next request cannot be
        answered."""
        while slot.live is not None and self._is_over(slot.live, now):
            self._release(slot, now)
        if slot.live is None or not slot.live.queue or slot.busy:
            slot.instance.ready.pop(slot, None)
        else:
            slot.instance.ready[slot] = None

    def _is_over(self, live: LiveSequence, now: float) -> bool:
        """Return whether a sequence has ended and no request of it waits. If its next request is too late, or is to be
        refused, the sequence ends."""
        if not live.queue:
            return live.has_ended
        error = deadline_exceeded() if self.is_hopeless(live.queue[0], now) else live.queue[0].refusal
        if error is None:
            return False
        self.end(live)
        self._refuse(live.queue.popleft(), error)
        self._refuse_all(live, cancelled())
        return True

    def take(self, request: SequenceRequest, now: float) -> None:
        """Take a slot's next request, which runs now."""
        slot, live = request.slot, request.slot.live
        assert live is not None, "the request's sequence has the slot"
        live.queue.popleft()
        self._forget(request)
        slot.busy = True
        del slot.instance.ready[slot]
        # The model may want an iterative request again, so its sequence keeps the slot until it is done.
        if request.tag.ends and request.on_reschedule is None:
            self._release(slot, now)

    def request_done(self, request: SequenceRequest, now: float) -> None:
        """Let the next request of a slot run, because this one has ended. Only the first call has an effect, as the
        slot may soon be busy with another."""
        if request.live is not None and not request.waiting:
            slot, request.live = request.slot, None
            slot.busy = False
            self.advance(slot, now)

    def requeue(self, request: SequenceRequest, now: float) -> bool:
        """Queue a request that has run and must run again. Returns False if its sequence no longer has the slot."""
        live = request.slot.live
        if live is None or live is not request.live:
            return False
        self._add(request, live)
        self._use(live, now)
        return True

    def _release(self, slot: SequenceSlot, now: float) -> None:
        slot.live = None
        slot.instance.ready.pop(slot, None)
        while self._backlog:
            live = self._next_backlog(now)
            if self._is_over(live, now):
                continue
            slot.live, live.slot = live, slot
            for request in live.queue:
                # The timeout limits only the wait for a slot.
                request.expires_at = request.deadline
            self._use(live, now)
            return
        heapq.heappush(self._free, (slot.index, slot.instance.number, slot))

    def _next_backlog(self, now: float) -> LiveSequence:
        """Remove and return the sequence that gets a slot: the newest with a deadline if the oldest has used half of
        its time (see Triage), otherwise the oldest."""
        first = self._backlog[0].queue[0]
        if first.deadline is None or half_time(first, self._times.of(self._largest_batch)) >= now:
            return self._backlog.popleft()
        newest = next(each for each in reversed(self._backlog) if each.queue[0].deadline is not None)
        self._backlog.remove(newest)
        return newest

    # Instances

    def add_instance(self, instance: SequenceInstance, now: float) -> None:
        self.instances.append(instance)
        self._open_slot(instance, now)

    def _open_slot(self, instance: SequenceInstance, now: float) -> None:
        """Make slots until one is free: not all, because a configuration may allow two billion."""
        while len(instance.slots) < instance.slot_count:
            slot = SequenceSlot(instance, len(instance.slots))
            instance.slots.append(slot)
            self._release(slot, now)
            self.advance(slot, now)
            if slot.live is None:
                return

    def remove_instance(self, instance: SequenceInstance, reason: str) -> None:
        """Lose an instance's sequences, and refuse their requests."""
        self.instances.remove(instance)
        self._free = [free for free in self._free if free[2].instance is not instance]
        heapq.heapify(self._free)
        for slot in instance.slots:
            live, slot.live = slot.live, None
            if live is not None:
                if not live.has_ended:
                    self.end(live)
                    self._lost.keep(live.id, reason)
                self._refuse_all(live, self.lost_sequence_error(live.id, reason))
        # The slots refer to the instance: the cycle would last until the next garbage collection.
        instance.slots = []
        instance.ready.clear()

    # Requests that wait too long, and requests whose clients have left

    def is_hopeless(self, request: SequenceRequest, now: float) -> bool:
        """Return whether a request would end too late if it ran now, and may not run as a probe."""
        deadline = request.deadline
        if deadline is None or deadline > now + self._times.of(self._largest_batch):
            return False
        return deadline <= now or not self._times.may_probe(int(now * 1e9))

    def take_out(self, request: SequenceRequest, error: ServeError, now: float) -> None:
        """Refuse a request that waits, and end its sequence: now; if it has a slot, when the request's turn comes."""
        live = request.live
        assert live is not None, "it waits"
        if live.slot is None:
            self._backlog.remove(live)
            self.end(live)
            self._refuse_all(live, error)
        else:
            request.refusal = error
            self.advance(live.slot, now)

    def end_idle(self, now: float, idle_seconds: float) -> float | None:
        """End sequences without requests for `idle_seconds`. Returns when to call again (time.monotonic()), or None."""
        while self._last_used:
            sequence, used = next(iter(self._last_used.items()))
            if used + idle_seconds > now:
                return used + idle_seconds
            live = self._live[sequence]
            assert live.slot is not None, "only sequences in slots are used"
            if live.slot.busy or live.queue:
                # A client that waits for an answer cannot send the next request.
                self._use(live, now)
            else:
                self.end(live)
                self.advance(live.slot, now)
        return None

    def _refuse_all(self, live: LiveSequence, error: ServeError) -> None:
        while live.queue:
            self._refuse(live.queue.popleft(), error)

    def _refuse(self, request: SequenceRequest, error: ServeError) -> None:
        self._forget(request)
        request.live = None
        self._refused.append((request, error))

    def _add(self, request: SequenceRequest, live: LiveSequence) -> None:
        live.queue.append(request)
        request.live, request.waiting = live, True
        self.count += 1
        self.deadline_count += request.deadline is not None
        self._nbytes += request.nbytes

    def _forget(self, request: SequenceRequest) -> None:
        request.waiting = False
        self.count -= 1
        self.deadline_count -= request.deadline is not None
        self._nbytes -= request.nbytes
