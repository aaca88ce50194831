"""The instances of a model version, and the batches that each has in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from rocserve.core.requests import InferRequest
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.compute_times import SHORT_NS, ComputeTimes
from rocserve.scheduling.rate_limiter import LimitedInstance, RateLimiter
from rocserve.workers.instance import Instance

AHEAD = 2
"""Batches that may wait in a worker behind the one in its engine, so that it never waits for the next: more would only
wait longer."""

BRIEF_NS = 100_000
"""What the way to a worker and back takes, about. Where the engine takes less for a batch, idle instances would be
sent many small ones: 8 requests in flight on four instances then took a sixth more CPU time each."""


class InstancePool:
    """Keeps the batches that each instance has in flight."""

    def __init__(self, times: ComputeTimes, sends_ahead: bool = True) -> None:
        """`times`: of the batches here. `sends_ahead`: whether a busy instance may be sent more, which then can no
        longer be overtaken."""
        self._in_hand: dict[Instance, deque[FormedBatch]] = {}
        """By instance; the first is in the engine, those behind it have been sent ahead."""
        self._begun: set[Instance] = set()
        """The instances that have been handed a batch."""
        self._times = times
        self._begun_ns = 0
        """When a batch was last handed to an instance."""
        self._sends_ahead = sends_ahead

    def attach(self, instance: Instance, on_granted: Callable[[], None]) -> None:
        """`on_granted` is called when the instance had to wait and may run."""
        self._in_hand[instance] = deque()

    def detach(self, instance: Instance) -> None:
        self._in_hand.pop(instance, None)
        self._begun.discard(instance)

    def idle(self) -> Instance | None:
        """An instance whose engine can begin a batch; best one with nothing to do."""
        best = None
        for instance, batches in self._in_hand.items():
            if not batches:
                return instance
            if best is None and len(batches) < instance.batches_at_once:
                best = instance
        return best

    def is_idle(self, instance: Instance) -> bool:
        """Whether an instance is there and has nothing to do."""
        batches = self._in_hand.get(instance)
        return batches is not None and not batches

    def count_in_hand(self, instance: Instance) -> int:
        """The batches of an instance, the one in its engine included."""
        return len(self._in_hand[instance])

    def ahead(self) -> Instance | None:
        """A busy instance that may be sent one more batch, the one with the fewest."""
        if self._times.engine_ns >= SHORT_NS or not self._sends_ahead:
            return None
        best, fewest = None, AHEAD + 1
        for instance, batches in self._in_hand.items():
            count = len(batches)
            if count < fewest:
                best, fewest = instance, count
        return best

    @property
    def returns_by_ns(self) -> int:
        """By time.monotonic_ns(), when a batch that an instance has is likely to be back; 0: none is, or only after
        a while."""
        if self._times.engine_ns >= BRIEF_NS or not self._sends_ahead or not any(self._in_hand.values()):
            return 0
        return self._begun_ns + BRIEF_NS

    def stop_sending_ahead(self) -> None:
        """From now on a busy instance gets nothing more."""
        self._sends_ahead = False

    def claim(self, instance: Instance) -> bool:
        """Ask for all that an idle instance needs to run a batch now."""
        return True

    def return_unused(self) -> None:
        """Give back what was claimed, and granted, for work that is gone by now."""

    def begin(self, instance: Instance, batch: FormedBatch) -> None:
        """A batch is about to be handed to an instance."""
        batches = self._in_hand[instance]
        batches.append(batch)
        self._begun_ns = batch.compute_start_ns
        batch.sent_ahead = len(batches) > 1
        if instance not in self._begun:
            self._begun.add(instance)
            batch.is_first = True

    def end(self, instance: Instance, batch: FormedBatch) -> None:
        """A batch is back."""
        batches = self._in_hand.get(instance)
        if batches:
            if batches[0] is batch:
                batches.popleft()
            elif batch in batches:
                batches.remove(batch)

    # Requests that have been sent ahead and are still to run

    @property
    def has_waiting(self) -> bool:
        return any(len(batches) > 1 or (batches and batches[0].is_grouped) for batches in self._in_hand.values())

    def waiting(self) -> Iterator[InferRequest]:
        """As far as the server can know; those that were dropped are not among them. From any thread."""
        # Copies, each made in one step: the data plane goes on meanwhile.
        for batches in tuple(self._in_hand.values()):
            for place, batch in enumerate(tuple(batches)):
                yield from _waiting_of(batch, place)

    def batch_ahead(self, entry: InferRequest) -> FormedBatch | None:
        """The batch with which a request was sent ahead; None when it is not (or no longer) waiting in a worker."""
        for batches in self._in_hand.values():
            for place, batch in enumerate(batches):
                if any(waiting is entry for waiting in _waiting_of(batch, place)):
                    return batch
        return None


def _waiting_of(batch: FormedBatch, place: int) -> Iterator[InferRequest]:
    if place == 0 and not batch.is_grouped:
        return
    # Of grouped requests in the engine at least the first has begun.
    begun = batch.entries[0] if place == 0 else None
    for entry in batch.undropped:
        if entry is not begun:
            yield entry


class LimitedInstancePool(InstancePool):
    """A pool whose instances run only when they have been granted what they hold while they do."""

    def __init__(self, times: ComputeTimes, limiter: RateLimiter) -> None:
        super().__init__(times, sends_ahead=False)
        self._limiter = limiter
        self._limited: dict[Instance, LimitedInstance] = {}

    def attach(self, instance: Instance, on_granted: Callable[[], None]) -> None:
        super().attach(instance, on_granted)
        self._limited[instance] = LimitedInstance(instance.rate_limiter, instance.device, on_granted)

    def detach(self, instance: Instance) -> None:
        super().detach(instance)
        limited = self._limited.pop(instance, None)
        if limited is not None:
            self._limiter.release(limited, has_run=False)

    def idle(self) -> Instance | None:
        """An instance with nothing to do: one that may run already, else the one whose turn comes first."""
        free = [instance for instance, batches in self._in_hand.items() if not batches]
        return min(free, key=self._rank, default=None)

    def claim(self, instance: Instance) -> bool:
        return self._limiter.ask(self._limited[instance])

    def end(self, instance: Instance, batch: FormedBatch) -> None:
        super().end(instance, batch)
        limited = self._limited.get(instance)
        if limited is not None and not self._in_hand[instance]:
            self._limiter.release(limited, has_run=True)

    def return_unused(self) -> None:
        """What was granted for work that is gone by now."""
        for instance, limited in self._limited.items():
            if limited.is_granted and not self._in_hand[instance]:
                self._limiter.release(limited, has_run=False)

    def _rank(self, instance: Instance) -> tuple[bool, int]:
        limited = self._limited[instance]
        return (not limited.is_granted, limited.rank)
