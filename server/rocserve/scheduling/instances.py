"""The instances of a model version, and the batches that each has in hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.entry import QueuedRequest
from rocserve.workers.channel import SLOTS, Channel

AHEAD = SLOTS - 2
"""Batches that may wait in a worker behind the one in its engine. A slot each for these, for the one in the engine, and
for the one whose outputs are still being read."""

SHORT_NS = 1_000_000
"""Batches are sent ahead only while the engine takes less than this for one: then the way to the worker and back is a
large part of the time, and a request that waits there instead of in the queue loses next to nothing."""


class InstancePool:
    """Not thread-safe: the scheduler that owns it calls it under its lock."""

    is_limited = False
    """Whether `claim` may refuse: schedulers in a hurry need not ask otherwise."""

    def __init__(self, sends_ahead: bool = True) -> None:
        """`sends_ahead`: whether a busy instance may be sent more, which then can no longer be overtaken."""
        self._in_hand: dict[Channel, deque[FormedBatch]] = {}
        """By instance; the first is in the engine, those behind it have been sent ahead."""
        self._begun: set[Channel] = set()
        """The instances that have been handed a batch."""
        self._engine_ns = SHORT_NS
        self._sends_ahead = sends_ahead

    def attach(self, channel: Channel) -> None:
        self._in_hand[channel] = deque()

    def detach(self, channel: Channel) -> None:
        self._in_hand.pop(channel, None)
        self._begun.discard(channel)

    def idle(self) -> Channel | None:
        """An instance with nothing to do."""
        for channel, batches in self._in_hand.items():
            if not batches:
                return channel
        return None

    def is_idle(self, channel: Channel) -> bool:
        """Whether an instance is there and has nothing to do."""
        batches = self._in_hand.get(channel)
        return batches is not None and not batches

    def count_in_hand(self, channel: Channel) -> int:
        """The batches of an instance, the one in its engine included."""
        return len(self._in_hand[channel])

    def ahead(self) -> Channel | None:
        """A busy instance that may be sent one more batch, the one with the fewest."""
        if self._engine_ns >= SHORT_NS or not self._sends_ahead:
            return None
        best, fewest = None, AHEAD + 1
        for channel, batches in self._in_hand.items():
            count = len(batches)
            if count < fewest:
                best, fewest = channel, count
        return best

    def stop_sending_ahead(self) -> None:
        """From now on a busy instance gets nothing more."""
        self._sends_ahead = False

    def claim(self, channel: Channel) -> bool:
        """Ask for all that an idle instance needs to run a batch now. Where it is refused, the pool's owner is told
        when it is worth another look."""
        return True

    def return_unused(self) -> None:
        """Give back what was claimed, and granted, for work that is gone by now."""

    def begin(self, channel: Channel, batch: FormedBatch) -> bool:
        """Hand a batch to an instance; whether it waits there behind another."""
        batches = self._in_hand[channel]
        batches.append(batch)
        batch.sent_ahead = len(batches) > 1
        if channel not in self._begun:
            self._begun.add(channel)
            batch.is_first = True
        return batch.sent_ahead

    def end(self, channel: Channel, batch: FormedBatch, engine_ns: int) -> None:
        """A batch is back, after this time in the engine (0: it did not get there)."""
        batches = self._in_hand.get(channel)
        if batches:
            if batches[0] is batch:
                batches.popleft()
            elif batch in batches:
                batches.remove(batch)
        if engine_ns:
            self._engine_ns += (engine_ns - self._engine_ns) >> 3

    # Requests that have been sent ahead and are still to run

    @property
    def has_waiting(self) -> bool:
        return any(len(batches) > 1 or (batches and batches[0].one_by_one) for batches in self._in_hand.values())

    def waiting(self) -> Iterator[QueuedRequest]:
        """As far as the server can know; those that were dropped are not among them."""
        for batches in self._in_hand.values():
            for place, batch in enumerate(batches):
                yield from _waiting_of(batch, place)

    def batch_ahead(self, entry: QueuedRequest) -> FormedBatch | None:
        """The batch with which a request was sent ahead; None when it is not (or no longer) waiting in a worker."""
        for batches in self._in_hand.values():
            for place, batch in enumerate(batches):
                if any(waiting is entry for waiting in _waiting_of(batch, place)):
                    return batch
        return None


def _waiting_of(batch: FormedBatch, place: int) -> Iterator[QueuedRequest]:
    if place == 0 and not batch.one_by_one:
        return
    # Of a convoy in the engine at least the first has begun.
    begun = batch.entries[0] if place == 0 else None
    for entry in batch.undropped:
        if entry is not begun:
            yield entry
