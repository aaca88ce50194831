"""Keeps the sequences of one model version: their slots, their waiting requests, and when each was last used."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator

from rocserve.core.errors import ServeError, StatusCode, deadline_exceeded, unavailable
from rocserve.core.exchange import ANSWERED, QUEUED, RUNNING
from rocserve.core.memo import Memo
from rocserve.core.sequences import SequenceId
from rocserve.scheduling.batch_policy import half_time
from rocserve.scheduling.compute_times import ComputeTimes
from rocserve.scheduling.queue import QueueFull, QueueLimits, Refused
from rocserve.scheduling.sequence.slots import LiveSequence, SequenceInstance, SequenceRequest, SequenceSlot


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
        self._sequences: dict[SequenceId, list[LiveSequence]] = {}
        """The sequences of each id, the oldest first. Only that one has a slot or waits for one; only the newest takes
        more requests."""
        self._free: list[tuple[int, int, SequenceSlot]] = []
        """Heap of free slots by index: using the lowest keeps batches short."""
        self._backlog: deque[LiveSequence] = deque()
        """The sequences that wait for a slot."""
        self._last_used: OrderedDict[SequenceId, float] = OrderedDict()
        """time.monotonic() of the last use of each sequence in a slot, the longest unused first."""
        self._lost = Memo[SequenceId, str](10_000)
        self._refused = refused
        self.count = 0
        self.deadline_count = 0
        self._nbytes = 0

    # Sequences

    def __contains__(self, sequence: SequenceId) -> bool:
        """Return whether a sequence takes more requests."""
        same = self._sequences.get(sequence)
        return same is not None and not same[-1].has_ended

    def __iter__(self) -> Iterator[SequenceRequest]:
        """Yield the requests that wait."""
        for same in self._sequences.values():
            for live in same:
                yield from live.queue

    @property
    def is_empty(self) -> bool:
        return not self._sequences

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
        same = self._sequences.setdefault(request.tag.id, [])
        is_new = request.tag.starts or not same
        if is_new:
            self._lost.pop(request.tag.id, None)
            same.append(LiveSequence(request.tag.id, restarts=bool(same) and not same[-1].has_ended))
            if len(same) > 1:
                self.end(same[-2])
        live = same[-1]
        self._add(request, live)
        if request.tag.ends:
            self.end(live)
        if not is_new:
            self._use(live, now)
        elif live is same[0]:
            self._find_slot(live, now)
        if same[0].slot is not None:
            self.advance(same[0].slot, now)
        return live.slot is not None

    def end(self, live: LiveSequence) -> None:
        if not live.has_ended:
            live.has_ended = True
            self._last_used.pop(live.id, None)

    def end_sequence(self, sequence: SequenceId, now: float) -> None:
        """End a sequence after the requests that have already arrived."""
        same = self._sequences.get(sequence)
        if same is not None:
            self.end(same[-1])
            if same[0].slot is not None:
                self.advance(same[0].slot, now)

    def end_all(self, now: float) -> None:
        for sequence in tuple(self._sequences):
            self.end_sequence(sequence, now)

    def _use(self, live: LiveSequence, now: float) -> None:
        if live.slot is not None and not live.has_ended:
            self._last_used[live.id] = now
            self._last_used.move_to_end(live.id)

    # Slots

    def advance(self, slot: SequenceSlot, now: float) -> None:
        """Give the slot to the next sequence if the present one is over and nothing runs in the slot."""
        while slot.running is None and slot.live is not None and self._is_over(slot.live, now):
            self._release(slot, now)
        if slot.live is None or not slot.live.queue or slot.running is not None:
            slot.instance.ready.pop(slot, None)
        else:
            slot.instance.ready[slot] = None

    def _is_over(self, live: LiveSequence, now: float) -> bool:
        """Return whether a sequence has ended and no request of it waits. It ends if its next request is too late."""
        if live.queue and self.is_hopeless(live.queue[0], now):
            self._cut(live, 0, live.queue[0], deadline_exceeded())
        return live.has_ended and not live.queue

    def take(self, request: SequenceRequest, now: float) -> None:
        """Take a slot's next request, which runs now."""
        slot, live = request.slot, request.slot.live
        assert live is not None, "the request's sequence has the slot"
        live.queue.popleft()
        self._forget(request)
        request.exchange.enter(RUNNING)
        slot.running = request
        del slot.instance.ready[slot]
        # The model may want an iterative request again, so its sequence keeps the slot until it is done.
        if request.tag.ends and request.on_reschedule is None:
            self._release(slot, now)

    def request_done(self, request: SequenceRequest, now: float) -> None:
        """Let the next request of a slot run, because this one has ended. Only the first call has an effect, as the
        slot may soon run another."""
        if request.live is not None and request.slot.running is request:
            slot, request.live = request.slot, None
            slot.running = None
            self.advance(slot, now)

    def requeue(self, request: SequenceRequest, now: float) -> bool:
        """Queue a request that has run and must run again, before the others of its sequence. Returns False if the
        slot was lost."""
        live = request.slot.live
        if live is None or live is not request.live:
            return False
        self._add(request, live, is_first=True)
        self._use(live, now)
        return True

    def _find_slot(self, live: LiveSequence, now: float) -> None:
        """Give a free slot to a sequence, or let it wait for one."""
        if not self._free:
            self._backlog.append(live)
            return
        slot = heapq.heappop(self._free)[2]
        self._give(slot, live, now)
        if slot is slot.instance.slots[-1]:
            self._open_slot(slot.instance, now)

    def _give(self, slot: SequenceSlot, live: LiveSequence, now: float) -> None:
        slot.live, live.slot = live, slot
        for request in live.queue:
            # The timeout limits only the wait for a slot.
            request.expires_at = request.deadline
        self._use(live, now)

    def _release(self, slot: SequenceSlot, now: float) -> None:
        live, slot.live = slot.live, None
        slot.instance.ready.pop(slot, None)
        if live is not None and (following := self._leave(live)) is not None:
            if following.restarts:
                self._backlog.appendleft(following)
            else:
                self._backlog.append(following)
        while self._backlog:
            live = self._next_backlog(now)
            if not self._is_over(live, now):
                self._give(slot, live, now)
                return
            if (following := self._leave(live)) is not None:
                self._backlog.appendleft(following)
        heapq.heappush(self._free, (slot.index, slot.instance.number, slot))

    def _leave(self, live: LiveSequence) -> LiveSequence | None:
        """Forget a sequence that is over. Returns the next one of its id, if that one waits for this slot."""
        same = self._sequences[live.id]
        was_first = live is same[0]
        same.remove(live)
        if not same:
            del self._sequences[live.id]
        return same[0] if same and was_first else None

    def _next_backlog(self, now: float) -> LiveSequence:
        """Remove and return the sequence that gets a slot: the newest with a deadline if the oldest has used half of
        its time (see Triage), otherwise the oldest."""
        first = self._backlog[0].queue[0]
        if first.deadline is None or half_time(first, self._times.of(self._largest_batch)) >= now:
            return self._backlog.popleft()
        newest = next(one for one in reversed(self._backlog) if one.queue[0].deadline is not None)
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

    def remove_instance(self, instance: SequenceInstance, reason: str, now: float) -> None:
        """Lose an instance's sequences, and refuse their requests. Those that have not begun get other slots."""
        self.instances.remove(instance)
        self._free = [free for free in self._free if free[2].instance is not instance]
        heapq.heapify(self._free)
        movable: list[LiveSequence] = []
        for slot in instance.slots:
            live, slot.live = slot.live, None
            if live is None:
                continue
            if live.queue and live.queue[0].tag.starts:
                live.slot = None
                self._last_used.pop(live.id, None)
                movable.append(live)
                continue
            if not live.has_ended:
                self.end(live)
                self._lost.keep(live.id, reason)
            self._refuse_all(live, self.lost_sequence_error(live.id, reason))
            if (following := self._leave(live)) is not None:
                movable.append(following)
        # The slots refer to the instance: the cycle would last until the next garbage collection.
        instance.slots = []
        instance.ready.clear()
        self._backlog.extendleft(reversed(movable))
        while self._free and self._backlog:
            live = self._backlog.popleft()
            self._find_slot(live, now)
            assert live.slot is not None, "a slot is free"
            self.advance(live.slot, now)

    # Requests that wait too long, and requests whose clients have left

    def is_hopeless(self, request: SequenceRequest, now: float) -> bool:
        """Return whether a request would end too late even if it ran now, in a batch as fast as the fastest of the last
        ones, and may not run as a probe. Nobody knows which batch it will run in: that depends on the other slots."""
        deadline = request.deadline
        if deadline is None or deadline > now + self._times.at_best_of_any_size:
            return False
        return deadline <= now or not self._times.may_probe(int(now * 1e9))

    def take_out(self, request: SequenceRequest, error: ServeError, now: float) -> None:
        """Refuse a request that waits, and end its sequence: if it has a slot, earlier requests of it still run."""
        live = request.live
        assert live is not None, "it waits"
        if live.slot is not None:
            self._cut(live, live.queue.index(request), request, error)
            self.advance(live.slot, now)
            return
        self._cut(live, 0, request, error)
        is_in_backlog = live is self._sequences[live.id][0]
        following = self._leave(live)
        if following is not None:
            self._backlog[self._backlog.index(live)] = following
        elif is_in_backlog:
            self._backlog.remove(live)

    def end_idle(self, now: float, idle_seconds: float) -> float | None:
        """End sequences without requests for `idle_seconds`. Returns when to call again (time.monotonic()), or None."""
        while self._last_used:
            sequence, used = next(iter(self._last_used.items()))
            if used + idle_seconds > now:
                return used + idle_seconds
            live = self._sequences[sequence][-1]
            assert live.slot is not None, "only sequences in slots are used"
            if live.slot.running is not None or live.queue:
                # A client that waits for an answer cannot send the next request.
                self._use(live, now)
            else:
                self.end(live)
                self.advance(live.slot, now)
        return None

    def _cut(self, live: LiveSequence, start: int, culprit: SequenceRequest, error: ServeError) -> None:
        """End a sequence because one of its requests cannot run, and refuse those of its queue from `start` on."""
        self.end(live)
        others = ServeError(
            StatusCode.CANCELLED,
            f"sequence {live.id} of model '{self._model}' has ended, start it again: another request of it was"
            " cancelled, or could not be answered in time",
        )
        if error.code is StatusCode.UNAVAILABLE:
            # The timeout of a request in the backlog is the whole sequence's.
            others = error
        refused = [live.queue.pop() for _ in range(len(live.queue) - start)]
        for request in reversed(refused):
            self._refuse(request, error if request is culprit else others)

    def _refuse_all(self, live: LiveSequence, error: ServeError) -> None:
        while live.queue:
            self._refuse(live.queue.popleft(), error)

    def _refuse(self, request: SequenceRequest, error: ServeError) -> None:
        self._forget(request)
        request.live = None
        request.exchange.enter(ANSWERED)
        self._refused.append((request, error))

    def _add(self, request: SequenceRequest, live: LiveSequence, is_first: bool = False) -> None:
        if is_first:
            live.queue.appendleft(request)
        else:
            live.queue.append(request)
        request.live = live
        request.exchange.enter(QUEUED)
        self.count += 1
        self.deadline_count += request.deadline is not None
        self._nbytes += request.nbytes

    def _forget(self, request: SequenceRequest) -> None:
        self.count -= 1
        self.deadline_count -= request.deadline is not None
        self._nbytes -= request.nbytes
