"""The instances of a model version, the batches that each has in flight, and which may run, over all models."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InstanceRateLimiter
from rocserve.core.requests import InferRequest
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.compute_times import SHORT_NS, ComputeTimes
from rocserve.settings import RateLimitResource
from rocserve.workers.instance import Instance

ResourceKey = tuple[int | None, str]
"""The device (None: the whole machine) and the resource's name."""

Needs = Mapping[ResourceKey, int]

_CPU_DEVICE = 0
"""Instances on the CPU hold the resources of device 0."""


def needs_of(limits: InstanceRateLimiter, device: int | None) -> Needs:
    """What an instance holds while it runs. `device`: the GPU's number, None on the CPU."""
    place = _CPU_DEVICE if device is None else device
    return {(None if resource.is_global else place, resource.name): resource.count for resource in limits.resources}


class _State(enum.Enum):
    FREE = enum.auto()
    """It has nothing to run, or has not asked."""
    STAGED = enum.auto()
    """It has something to run and waits."""
    GRANTED = enum.auto()
    """It holds its resources."""


class LimitedInstance:
    """One instance, as the limiter knows it."""

    __slots__ = ("executions", "needs", "on_granted", "state", "weight")

    def __init__(self, limits: InstanceRateLimiter, device: int | None, on_granted: Callable[[], None]) -> None:
        """`on_granted`: called when it may run at last, after it had to wait."""
        self.needs = needs_of(limits, device)
        self.weight = max(limits.priority, 1)
        self.on_granted = on_granted
        self.executions = 0
        self.state = _State.FREE

    @property
    def rank(self) -> int:
        """The least is next."""
        return self.executions * self.weight

    @property
    def is_granted(self) -> bool:
        return self.state is _State.GRANTED


class RateLimiter:
    """Triton's, in the mode execution_count: each instance holds its resources while it runs; of those that have
    something to run, the one with the least product of executions and priority is next, and all wait until there are
    resources.

    Models are registered by the thread that loads them, instances ask on the data plane's. What both know, how much
    there is of each resource, is replaced whole.
    """

    def __init__(self, explicit: Sequence[RateLimitResource], call_soon: Callable[[Callable[[], None]], None]) -> None:
        """`explicit`: how much there is of each resource; empty = as much as the neediest instance holds. `call_soon`:
        runs a callback on the data plane's thread, later."""
        self._explicit = tuple(explicit)
        self._call_soon = call_soon
        self._registered: dict[object, Sequence[Needs]] = {}
        self._available: Needs = {}
        self._allocated: dict[ResourceKey, int] = {}
        self._staged: list[tuple[int, int, LimitedInstance]] = []
        self._numbers = itertools.count(1)

    # Models

    def register(self, instances: Sequence[Needs]) -> Callable[[], None]:
        """A model's instances are to be run; what to call when they run no more. Raises: ServeError: INVALID_ARGUMENT,
        there can never be resources for one of them, or a resource is both of the machine and of a device."""
        self._available = self._resources([*self._all_needs(), *instances])
        model = object()
        self._registered[model] = tuple(instances)
        self._call_soon(self._allocate)

        def unregister() -> None:
            if self._registered.pop(model, None) is not None:
                self._available = self._resources(self._all_needs())
                self._call_soon(self._allocate)

        return unregister

    def _all_needs(self) -> list[Needs]:
        return [needs for instances in self._registered.values() for needs in instances]

    def _resources(self, instances: Iterable[Needs]) -> Needs:
        most: dict[ResourceKey, int] = {}
        for needs in instances:
            for key, count in needs.items():
                most[key] = max(most.get(key, 0), count)
        available = {key: self._explicit_count(key) for key in most} if self._explicit else dict(most)
        for (device, name), needed in most.items():
            if available[device, name] < needed:
                raise invalid_argument(
                    f'Resource count for "{name}" is limited to {available[device, name]} which will prevent scheduling'
                    f" of one or more model instances, the minimum required count is {needed}"
                )
        for device, name in most:
            if device is not None and (None, name) in most:
                raise invalid_argument(
                    f'Resource "{name}" is present as both global and device-specific resource in the model'
                    " configuration."
                )
        return available

    def _explicit_count(self, key: ResourceKey) -> int:
        """As --rate-limit-resource says, which knows no capitals; what it does not name is not there."""
        device, name = key
        return max(
            (
                resource.count
                for resource in self._explicit
                if resource.name.lower() == name.lower() and (device is None or resource.device in (None, device))
            ),
            default=0,
        )

    # Instances

    def ask(self, instance: LimitedInstance) -> bool:
        """Whether an instance may run now; if not, `on_granted` is called when it may."""
        if instance.state is _State.FREE:
            instance.state = _State.STAGED
            heapq.heappush(self._staged, (instance.rank, next(self._numbers), instance))
            self._allocate(asking=instance)
        return instance.is_granted

    def release(self, instance: LimitedInstance, has_run: bool) -> None:
        """What an instance was granted is free again, or what it asked for not needed any more. Who gets it is decided
        a moment later, so that this instance may be among those that ask."""
        if instance.is_granted:
            for key, count in instance.needs.items():
                self._allocated[key] -= count
            instance.executions += has_run
        elif instance.state is _State.STAGED:
            self._staged = [entry for entry in self._staged if entry[2] is not instance]
            heapq.heapify(self._staged)
        instance.state = _State.FREE
        self._call_soon(self._allocate)

    def _allocate(self, asking: LimitedInstance | None = None) -> None:
        """Grant what can be granted, in turn; `asking` is not called back."""
        while self._staged:
            instance = self._staged[0][2]
            allocated, available = self._allocated, self._available
            if any(allocated.get(key, 0) + count > available.get(key, 0) for key, count in instance.needs.items()):
                return
            heapq.heappop(self._staged)
            for key, count in instance.needs.items():
                self._allocated[key] = self._allocated.get(key, 0) + count
            instance.state = _State.GRANTED
            if instance is not asking:
                self._call_soon(instance.on_granted)


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
        self.in_hand: dict[Instance, deque[FormedBatch]] = {}
        """By instance; the first is in the engine, those behind it have been sent ahead."""
        self._begun: set[Instance] = set()
        """The instances that have been handed a batch."""
        self._times = times
        self._begun_ns = 0
        """When a batch was last handed to an instance."""
        self._sends_ahead = sends_ahead

    def attach(self, instance: Instance, on_granted: Callable[[], None]) -> None:
        """`on_granted` is called when the instance had to wait and may run."""
        self.in_hand[instance] = deque()

    def detach(self, instance: Instance) -> None:
        self.in_hand.pop(instance, None)
        self._begun.discard(instance)

    def idle(self) -> Instance | None:
        """An instance whose engine can begin a batch; best one with nothing to do."""
        best = None
        for instance, batches in self.in_hand.items():
            if not batches:
                return instance
            if best is None and len(batches) < instance.batches_at_once:
                best = instance
        return best

    def is_idle(self, instance: Instance) -> bool:
        """Whether an instance is there and has nothing to do."""
        batches = self.in_hand.get(instance)
        return batches is not None and not batches

    def ahead(self) -> Instance | None:
        """A busy instance that may be sent one more batch, the one with the fewest."""
        if self._times.engine_ns >= SHORT_NS or not self._sends_ahead:
            return None
        best, fewest = None, AHEAD + 1
        for instance, batches in self.in_hand.items():
            count = len(batches)
            if count < fewest:
                best, fewest = instance, count
        return best

    @property
    def returns_by_ns(self) -> int:
        """By time.monotonic_ns(), when a batch that an instance has is likely to be back; 0: none is, or only after
        a while."""
        if self._times.engine_ns >= BRIEF_NS or not self._sends_ahead or not any(self.in_hand.values()):
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
        batches = self.in_hand[instance]
        batches.append(batch)
        self._begun_ns = batch.compute_start_ns
        batch.sent_ahead = len(batches) > 1
        if instance not in self._begun:
            self._begun.add(instance)
            batch.is_first = True

    def end(self, instance: Instance, batch: FormedBatch) -> None:
        """A batch is back."""
        batches = self.in_hand.get(instance)
        if batches:
            if batches[0] is batch:
                batches.popleft()
            elif batch in batches:
                batches.remove(batch)

    # Requests that have been sent ahead and are still to run

    @property
    def has_waiting(self) -> bool:
        return any(len(batches) > 1 or (batches and batches[0].is_grouped) for batches in self.in_hand.values())

    def waiting(self) -> Iterator[InferRequest]:
        """As far as the server can know; those that were dropped are not among them. From any thread."""
        # Copies, each made in one step: the data plane goes on meanwhile.
        for batches in tuple(self.in_hand.values()):
            for place, batch in enumerate(tuple(batches)):
                yield from _waiting_of(batch, place)

    def batch_ahead(self, entry: InferRequest) -> FormedBatch | None:
        """The batch with which a request was sent ahead; None when it is not (or no longer) waiting in a worker."""
        for batches in self.in_hand.values():
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
        free = [instance for instance, batches in self.in_hand.items() if not batches]
        limited = self._limited
        return min(free, key=lambda each: (not limited[each].is_granted, limited[each].rank), default=None)

    def claim(self, instance: Instance) -> bool:
        return self._limiter.ask(self._limited[instance])

    def end(self, instance: Instance, batch: FormedBatch) -> None:
        super().end(instance, batch)
        limited = self._limited.get(instance)
        if limited is not None and not self.in_hand[instance]:
            self._limiter.release(limited, has_run=True)

    def return_unused(self) -> None:
        """What was granted for work that is gone by now."""
        for instance, limited in self._limited.items():
            if limited.is_granted and not self.in_hand[instance]:
                self._limiter.release(limited, has_run=False)
