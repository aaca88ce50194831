"""Keeps the sequences of one model version: their slots, their waiting requests, and when each was last used."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocserve.core.errors import ServeError, deadline_exceeded, unavailable
from rocserve.core.requests import InferRequest
from rocserve.core.sequences import NO_SEQUENCE, SequenceId, SequenceTag
from rocserve.core.serving import Responder
from rocserve.core.tensors import Buffer
from rocserve.core.validation import RequestPlan
from rocserve.scheduling.batch_policy import half_time
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.queue import QueueFull, QueueLimits, RequestQueue
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
    place: Place | None = None
    """The slot or backlog in which the request waits; None before and after."""
    slot: Slot | None = None
    """The slot in which the request runs or has run; None before."""
    states: SequenceStates | None = None
    """The sequence's states, which the answer to this request changes."""
    cancelled: bool = False
    answers: SequenceResponder | None = None
    """Takes the states out of the answers. A request that is run again keeps this responder."""
    original: tuple[Sequence[Buffer], RequestPlan] | None = None
    """The client's data, and the plan, without controls and states."""


@dataclass(slots=True, eq=False)
class Slot:
    """A slot of an instance, for one sequence at a time; not a slot of a heap."""

    instance: SequenceInstance
    index: int
    queue: deque[SequenceRequest] = field(default_factory=deque)
    sequence: SequenceId | None = None
    states: SequenceStates | None = None
    busy: bool = False
    """A request of the slot runs, maybe the last of an earlier sequence: the next must wait."""
    forced_end: bool = False
    """No more requests of the sequence come: the slot is free when the present ones have run."""


@dataclass(slots=True, eq=False)
class SequenceInstance:
    worker: Instance
    number: int
    slot_count: int
    """The most sequences at a time."""
    slots: list[Slot] = field(default_factory=list)
    """Made when needed: all slots that have had a sequence, and the next one."""
    candidates: RequestQueue = field(init=False)
    """The requests that slots have handed to the dynamic batcher; always empty with the direct strategy."""
    gone: bool = False
    is_answering: bool = False
    """A batch is being answered: the next one is formed after that."""
    sequencer: ResponseSequencer | None = None
    """None = responses need no order."""

    def __post_init__(self) -> None:
        # Each slot has at most one request here.
        self.candidates = RequestQueue(None, QueueLimits(self.slot_count + 1, 1 << 62))


@dataclass(slots=True, eq=False)
class Backlog:
    sequence: SequenceId
    queue: deque[SequenceRequest] = field(default_factory=deque)


Place = Slot | Backlog


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
        self._places: dict[SequenceId, Place] = {}
        """Sequence that goes on -> its slot or backlog; a sequence leaves with its last request."""
        self._ready: list[tuple[int, int, Slot]] = []
        """Heap of free slots by index: using the lowest keeps batches short."""
        self._backlog: deque[Backlog] = deque()
        self._last_used: OrderedDict[SequenceId, float] = OrderedDict()
        """time.monotonic() of the last use of each sequence in a slot, the longest unused first."""
        self._lost: OrderedDict[SequenceId, str] = OrderedDict()
        self._refused = refused
        self.count = 0
        self.deadline_count = 0
        self._nbytes = 0

    # Sequences

    def __contains__(self, sequence: SequenceId) -> bool:
        return sequence in self._places

    @property
    def is_empty(self) -> bool:
        return not self._places and not self.count

    def lost_error(self, sequence: SequenceId) -> ServeError | None:
        """Return the error for requests of a lost sequence; None if it was not lost, or the loss is forgotten."""
        reason = self._lost.get(sequence)
        return None if reason is None else self.lost_sequence_error(sequence, reason)

    def lost_sequence_error(self, sequence: SequenceId, reason: str) -> ServeError:
        return unavailable(
            f"sequence {sequence} of model '{self._model}' has been lost with the worker that ran it, start it again:"
            f" {reason}"
        )

    def place(self, request: SequenceRequest, now: float) -> Slot | None:
        """Add a request; return its slot, None if its sequence waits for a slot. Raises QueueFull."""
        if self.count >= self._limits.max_requests or self._nbytes + request.nbytes > self._limits.max_bytes:
            raise QueueFull(request.id)
        sequence = request.tag.id
        place = self._places.get(sequence)
        if place is None:
            self._lost.pop(sequence, None)
            if self._ready:
                place = heapq.heappop(self._ready)[2]
                place.sequence = sequence
                if place is place.instance.slots[-1]:
                    self._open_slot(place.instance, now)
            else:
                place = Backlog(sequence)
                self._backlog.append(place)
            self._places[sequence] = place
        self._add(request, place)
        if request.tag.ends:
            self._forget(sequence)
        elif isinstance(place, Slot):
            self._use(sequence, now)
        return place if isinstance(place, Slot) else None

    def end(self, slot: Slot, sequence: SequenceId) -> None:
        """End a slot's sequence: the slot is free when the present requests have run."""
        if slot.sequence == sequence and not slot.forced_end:
            slot.forced_end = True
            self._forget_place(slot)

    def end_all(self) -> None:
        """End all sequences; those in the backlog run to the last request that has come."""
        for place in self._places.values():
            if isinstance(place, Slot):
                place.forced_end = True
        self._places.clear()
        self._last_used.clear()

    def _use(self, sequence: SequenceId, now: float) -> None:
        self._last_used[sequence] = now
        self._last_used.move_to_end(sequence)

    def _forget_place(self, place: Place) -> None:
        """Forget the sequence of a slot or backlog, if it still goes on there."""
        if place.sequence is not None and self._places.get(place.sequence) is place:
            self._forget(place.sequence)

    def _forget(self, sequence: SequenceId) -> None:
        self._places.pop(sequence, None)
        self._last_used.pop(sequence, None)

    # Slots

    def advance(self, slot: Slot, now: float) -> None:
        """Give the slot to the next sequence if the present one has ended, or if its next request cannot be
        answered."""
        while self._has_ended(slot, now) if slot.queue else slot.forced_end:
            self._release(slot, now)

    def _has_ended(self, place: Place, now: float) -> bool:
        """End the sequence if its next request is too late or its client has left. Returns whether it did."""
        request = place.queue[0]
        is_hopeless = self.is_hopeless(request, now)
        if not is_hopeless and not request.cancelled:
            return False
        self._forget_place(place)
        if is_hopeless:
            self._drop(place.queue.popleft())
            self._refused.append((request, deadline_exceeded()))
        self._refuse(place.queue, cancelled())
        return True

    def take(self, slot: Slot, now: float) -> SequenceRequest:
        request = slot.queue.popleft()
        self._drop(request)
        if request.tag.ends:
            self._release(slot, now)
        return request

    def requeue(self, request: SequenceRequest, slot: Slot, now: float) -> bool:
        """Queue a request that has run and must run again. Returns False if its sequence no longer has the slot."""
        sequence = request.tag.id
        if slot.instance.gone or slot.sequence != sequence:
            return False
        self._add(request, slot)
        if self._places.get(sequence) is slot:
            self._use(sequence, now)
        return True

    def _release(self, slot: Slot, now: float) -> None:
        slot.sequence, slot.states, slot.forced_end = None, None, False
        if slot.instance.gone:
            return
        while self._backlog:
            backlog = self._next_backlog(now)
            if self._has_ended(backlog, now):
                continue
            slot.queue, slot.sequence = backlog.queue, backlog.sequence
            for request in slot.queue:
                # The timeout limits only the wait for a slot.
                request.place, request.expires_at = slot, request.deadline
            if self._places.get(backlog.sequence) is backlog:
                self._places[backlog.sequence] = slot
                self._use(backlog.sequence, now)
            return
        heapq.heappush(self._ready, (slot.index, slot.instance.number, slot))

    def _next_backlog(self, now: float) -> Backlog:
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
            slot = Slot(instance, len(instance.slots))
            instance.slots.append(slot)
            self._release(slot, now)
            if slot.sequence is None:
                return

    def remove_instance(self, instance: SequenceInstance, reason: str) -> None:
        """Lose an instance's sequences, and refuse their requests."""
        instance.gone = True
        self.instances.remove(instance)
        self._ready = [ready for ready in self._ready if ready[2].instance is not instance]
        heapq.heapify(self._ready)
        for slot in instance.slots:
            if slot.sequence is not None:
                if self._places.get(slot.sequence) is slot:
                    self._forget(slot.sequence)
                    self._lost[slot.sequence] = reason
                self._refuse(slot.queue, self.lost_sequence_error(slot.sequence, reason))
            slot.sequence = None
        # The slots refer to the instance: the cycle would last until the next garbage collection.
        instance.slots = []
        while len(self._lost) > _REMEMBERED_LOSSES:
            self._lost.popitem(last=False)

    # Requests that wait too long, and requests whose clients have left

    def clear_backlog(self, error: ServeError) -> None:
        while self._backlog:
            self._refuse_backlog(self._backlog[0], error)

    def is_hopeless(self, request: SequenceRequest, now: float) -> bool:
        """Return whether a request would end too late if it ran now, and may not run as a probe."""
        deadline = request.deadline
        if deadline is None or deadline > now + self._times.of(self._largest_batch):
            return False
        return deadline <= now or not self._times.may_probe(int(now * 1e9))

    def cancel(self, request: SequenceRequest, now: float) -> bool:
        """End the sequence of a request whose client has left: now; if it has a slot, when the request's turn comes.
        Returns False if the request does not wait."""
        place, deadline = request.place, request.deadline
        if isinstance(place, Slot):
            request.cancelled = True
            self.advance(place, now)
        elif place is not None:
            is_late = deadline is not None and deadline <= now
            self._refuse_backlog(place, deadline_exceeded() if is_late else cancelled())
        return place is not None

    def expire(self, request: SequenceRequest) -> None:
        """Refuse a whole sequence that waits for a slot, because one of its requests has waited for its timeout."""
        if isinstance(request.place, Backlog):
            self._refuse_backlog(request.place, unavailable("timeout of the corresponding sequence has been expired"))

    def end_idle(self, now: float, idle_seconds: float) -> float | None:
        """End sequences without requests for `idle_seconds`. Returns when to call again (time.monotonic()), or None."""
        while self._last_used:
            sequence, used = next(iter(self._last_used.items()))
            if used + idle_seconds > now:
                return used + idle_seconds
            slot = self._places.get(sequence)
            if not isinstance(slot, Slot):
                del self._last_used[sequence]
            elif slot.busy or slot.queue:
                # A client that waits for an answer cannot send the next request.
                self._use(sequence, now)
            else:
                self.end(slot, sequence)
                self.advance(slot, now)
        return None

    def waiting(self) -> Iterator[SequenceRequest]:
        for instance in self.instances:
            for slot in instance.slots:
                yield from slot.queue
        for backlog in self._backlog:
            yield from backlog.queue

    def _refuse_backlog(self, backlog: Backlog, error: ServeError) -> None:
        self._backlog.remove(backlog)
        self._forget_place(backlog)
        self._refuse(backlog.queue, error)

    def _refuse(self, queue: deque[SequenceRequest], error: ServeError) -> None:
        while queue:
            request = queue.popleft()
            self._drop(request)
            self._refused.append((request, error))

    def _add(self, request: SequenceRequest, place: Place) -> None:
        place.queue.append(request)
        request.place = place
        self.count += 1
        self.deadline_count += request.deadline is not None
        self._nbytes += request.nbytes

    def _drop(self, request: SequenceRequest) -> None:
        request.place = None
        self.count -= 1
        self.deadline_count -= request.deadline is not None
        self._nbytes -= request.nbytes
