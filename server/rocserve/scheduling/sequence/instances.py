"""The instances of a sequence model: their slots, what they are to run next, and what is lost with one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rocserve.core.sequences import SequenceTag
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.entry import QueuedRequest
from rocserve.scheduling.instances import InstancePool
from rocserve.scheduling.ordering import AnswerOrder, OrderedResponder
from rocserve.scheduling.refusals import cancelled, deadline_exceeded
from rocserve.scheduling.sequence.book import SequenceBook
from rocserve.scheduling.sequence.dressing import NOBODY
from rocserve.scheduling.sequence.places import SequenceInstance, SequenceRequest, Slot
from rocserve.scheduling.sequence.strategies import Strategy
from rocserve.workers.channel import Channel


class SequenceInstances:
    """Not thread-safe: the scheduler that owns it calls it under its lock."""

    def __init__(self, pool: InstancePool, book: SequenceBook, strategy: Strategy, keeps_order: bool) -> None:
        """`keeps_order`: whether the answers of an instance go out in the order in which their requests came up."""
        self.pool = pool
        self.waiting = _Waiting(book)
        """All requests that do not run yet."""
        self._book = book
        self._strategy = strategy
        self._keeps_order = keeps_order
        self._by_channel: dict[Channel, SequenceInstance] = {}
        self._count = 0

    def __iter__(self) -> Iterator[SequenceInstance]:
        return iter(self._book.instances)

    def attach(self, channel: Channel, now: float) -> None:
        """A new one, with free slots."""
        self.pool.attach(channel)
        instance = SequenceInstance(channel, self._count, self._strategy.slot_count)
        self._count += 1
        if self._keeps_order:
            instance.order = AnswerOrder()
        self._strategy.prepare(instance)
        self._by_channel[channel] = instance
        self._book.add_instance(instance, now)
        self.feed(instance, now)

    def lose(self, channel: Channel, reason: str) -> None:
        """Its worker has ended, and with it what the model knew of its sequences. May be called twice."""
        self.pool.detach(channel)
        instance = self._by_channel.pop(channel, None)
        if instance is None:
            return
        self._book.remove_instance(instance, reason)
        for entry in instance.candidates.clear() if instance.candidates is not None else ():
            if isinstance(entry, SequenceRequest):
                self._book.refused.append((entry, self._book.loss_of(entry.tag.id, reason)))

    def end_all(self, now: float) -> None:
        """No request of any sequence comes any more."""
        self._book.end_all()
        for instance in self:
            self.feed(instance, now)

    def feed(self, instance: SequenceInstance, now: float) -> None:
        for slot in instance.slots:
            self.feed_slot(slot, now)

    def feed_slot(self, slot: Slot, now: float) -> None:
        """Something has changed about it. Where its sequence is over it is free at once for whoever comes next."""
        if not slot.busy and not slot.instance.gone:
            self._book.settle(slot, now)
            self._strategy.feed(slot, now)

    def next_batch(self, instance: SequenceInstance, now_ns: int, arm: Callable[[float], None]) -> FormedBatch | None:
        """What a free instance is to run now. `arm` is called with the time at which to ask again, by
        time.monotonic(), where it is to wait for more requests."""
        channel = instance.channel
        if instance.answering or not self.pool.is_idle(channel):
            return None
        candidates = instance.candidates
        if self._book.deadline_count or (candidates is not None and candidates.deadline_count):
            self._drop_hopeless(instance, now_ns / 1e9)
        ready_at = self._strategy.ready_at(instance, now_ns)
        if ready_at is None:
            return None
        if ready_at > now_ns:
            arm(ready_at / 1e9)
            return None
        if self.pool.is_limited and not self.pool.claim(channel):
            return None
        entries: list[QueuedRequest] = list(self._strategy.form(instance, now_ns))
        batch = FormedBatch(entries, now_ns)
        for entry in entries:
            if entry.responder is NOBODY:
                batch.drop(entry)
                batch.absent_rows += 1
            elif instance.order is not None and not isinstance(entry.responder, OrderedResponder):
                entry.responder = OrderedResponder(entry.responder, instance.order.take_turn())
        self.pool.begin(channel, batch)
        return batch

    def _drop_hopeless(self, instance: SequenceInstance, now: float) -> None:
        """What has lost its time since it came up is not to run."""
        for entry in list(instance.candidates or ()):
            if isinstance(entry, SequenceRequest) and self._book.is_hopeless(entry, now):
                assert instance.candidates is not None
                instance.candidates.remove(entry)
                self._book.refused.append((entry, deadline_exceeded()))
                self.done(entry, now)
        self.feed(instance, now)

    def done(self, entry: QueuedRequest, now: float) -> None:
        """A request has run: its sequence's next may."""
        if isinstance(entry, SequenceRequest) and entry.slot is not None:
            # Once only: the slot may soon be busy with another.
            slot, entry.slot = entry.slot, None
            slot.busy = False
            self.feed_slot(slot, now)

    def run_again(self, entry: SequenceRequest, again: SequenceRequest, now: float) -> bool:
        """A request that has run is to run once more, as `again`; False: its sequence no longer has the slot."""
        slot, entry.slot = entry.slot, None
        if slot is None:
            return False
        slot.busy = False
        is_taken = self._book.take_again(again, slot, now)
        self.feed_slot(slot, now)
        return is_taken

    def leave(self, entry: SequenceRequest, now: float) -> None:
        """Nobody waits for a request any more; its sequence ends with it, unless it has been handed to its instance."""
        if self._book.cancel(entry, now):
            return
        queue = entry.slot.instance.candidates if entry.slot is not None else None
        if queue is not None and queue.remove(entry):
            self._book.refused.append((entry, cancelled()))
            self.done(entry, now)


class _Waiting:
    """Implements client_watch.Waiting: in the book, and among the candidates of the instances' next batches."""

    def __init__(self, book: SequenceBook) -> None:
        self._book = book

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self._book.waiting()
        for instance in self._book.instances:
            yield from instance.candidates or ()

    def __bool__(self) -> bool:
        return bool(self._book.count) or any(instance.candidates for instance in self._book.instances)


def once_more(entry: SequenceRequest, now_ns: int) -> SequenceRequest:
    """A request that has run, as it was before but for the flags."""
    assert entry.bare is not None, "it has run"
    entry.request.data, plan = entry.bare
    again = replace(entry, plan=plan, bare=None, slot=None, queue_start_ns=now_ns)
    again.tag = SequenceTag(entry.tag.id)
    return again
