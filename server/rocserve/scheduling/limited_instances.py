"""The instances of a model version where a rate limiter says which may run."""

from __future__ import annotations

from collections.abc import Callable

from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.instances import InstancePool
from rocserve.scheduling.rate_limiter import LimitedInstance, RateLimiter
from rocserve.workers.channel import Channel


class LimitedInstancePool(InstancePool):
    """A pool whose instances run only when they have been granted what they hold while they do."""

    is_limited = True

    def __init__(self, limiter: RateLimiter, on_granted: Callable[[], None]) -> None:
        """`on_granted` is called, without the scheduler's lock, when an instance that had to wait may run."""
        super().__init__(sends_ahead=False)
        self._limiter = limiter
        self._on_granted = on_granted
        self._limited: dict[Channel, LimitedInstance] = {}

    def attach(self, channel: Channel) -> None:
        super().attach(channel)
        self._limited[channel] = LimitedInstance(channel.rate_limiter, channel.device, self._on_granted)

    def detach(self, channel: Channel) -> None:
        super().detach(channel)
        instance = self._limited.pop(channel, None)
        if instance is not None:
            self._limiter.release(instance, has_run=False)

    def idle(self) -> Channel | None:
        """An instance with nothing to do: one that may run already, else the one whose turn comes first."""
        free = [channel for channel, batches in self._in_hand.items() if not batches]
        return min(free, key=self._rank, default=None)

    def claim(self, channel: Channel) -> bool:
        return self._limiter.ask(self._limited[channel])

    def end(self, channel: Channel, batch: FormedBatch, engine_ns: int) -> None:
        super().end(channel, batch, engine_ns)
        instance = self._limited.get(channel)
        if instance is not None and not self._in_hand[channel]:
            self._limiter.release(instance, has_run=True)

    def return_unused(self) -> None:
        """What was granted for work that is gone by now."""
        for channel, instance in self._limited.items():
            if instance.is_granted and not self._in_hand[channel]:
                self._limiter.release(instance, has_run=False)

    def _rank(self, channel: Channel) -> tuple[bool, int]:
        instance = self._limited[channel]
        return (not instance.is_granted, instance.rank)


def instance_pool(
    limiter: RateLimiter | None, on_granted: Callable[[], None], sends_ahead: bool = True
) -> InstancePool:
    """The pool of a version. `limiter`: None where each instance runs as it is free."""
    return InstancePool(sends_ahead) if limiter is None else LimitedInstancePool(limiter, on_granted)
