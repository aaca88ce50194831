"""The instances of a model version, and how many batches each has in hand."""

from __future__ import annotations

from rocserve.workers.channel import SLOTS, Channel

AHEAD = SLOTS - 2
"""Batches that may wait in a worker behind the one in its engine. A slot each for these, for the one in the engine, and
for the one whose outputs are still being read."""

SHORT_NS = 1_000_000
"""Batches are sent ahead only while the engine takes less than this for one: then the way to the worker and back is a
large part of the time, and a request that waits there instead of in the queue loses next to nothing."""


class InstancePool:
    """Not thread-safe: the scheduler that owns it calls it under its lock."""

    def __init__(self) -> None:
        self._in_hand: dict[Channel, int] = {}
        self._engine_ns = SHORT_NS
        self._sends_ahead = True

    def attach(self, channel: Channel) -> None:
        self._in_hand[channel] = 0

    def detach(self, channel: Channel) -> None:
        self._in_hand.pop(channel, None)

    def idle(self) -> Channel | None:
        """An instance with nothing to do."""
        for channel, count in self._in_hand.items():
            if not count:
                return channel
        return None

    def ahead(self) -> Channel | None:
        """A busy instance that may be sent one more batch, the one with the fewest."""
        if self._engine_ns >= SHORT_NS or not self._in_hand or not self._sends_ahead:
            return None
        channel = min(self._in_hand, key=self._in_hand.__getitem__)
        return channel if self._in_hand[channel] <= AHEAD else None

    def stop_sending_ahead(self) -> None:
        """From now on a busy instance gets nothing more."""
        self._sends_ahead = False

    def begin(self, channel: Channel) -> None:
        self._in_hand[channel] += 1

    def end(self, channel: Channel, engine_ns: int) -> None:
        """A batch is back, after this time in the engine (0: it did not get there)."""
        if channel in self._in_hand:
            self._in_hand[channel] -= 1
        if engine_ns:
            self._engine_ns += (engine_ns - self._engine_ns) >> 3
