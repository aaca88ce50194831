"""Keeps the instances of model versions with their batches, and limits which instances of all models may run."""

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
from rocserve.scheduling.compute_times import SEND_AHEAD_BELOW_NS, ComputeTimes
from rocserve.settings import RateLimitResource
from rocserve.workers.instance import Instance

ResourceKey = tuple[int | None, str]
"""The device (None = the whole machine) and the resource's name."""

Needs = Mapping[ResourceKey, int]


def needs_of(limits: InstanceRateLimiter, device: int | None) -> Needs:
    """Return the resources that an instance holds while it runs. `device`: the GPU's number, None on the CPU."""
    # Instances on the CPU hold the resources of device 0.
    key_device = device or 0
    return {
        (None if resource.is_global else key_device, resource.name): resource.count for resource in limits.resources
    }


class _State(enum.Enum):
    FREE = enum.auto()
    """The instance has nothing to run, or has not asked the limiter."""
    STAGED = enum.auto()
    GRANTED = enum.auto()


class LimitedInstance:
    """The limiter's record of an instance: its resources, its executions and its state."""

    __slots__ = ("executions", "needs", "on_granted", "state", "weight")

    def __init__(self, limits: InstanceRateLimiter, device: int | None, on_granted: Callable[[], None]) -> None:
        """`on_granted`: called when the instance had to wait and may now run."""
        self.needs = needs_of(limits, device)
        self.weight = max(limits.priority, 1)
        self.on_granted = on_granted
        self.executions = 0
        self.state = _State.FREE

    @property
    def rank(self) -> int:
        """The product of executions and priority; the instance with the lowest rank is next."""
        return self.executions * self.weight

    @property
    def is_granted(self) -> bool:
        return self.state is _State.GRANTED


class RateLimiter:
    """Limits which instances run, as Triton's mode execution_count does. Each instance holds its resources while it
    runs. The waiting instance with the lowest rank is next; all others wait until there are resources for it. Models
    are registered by the thread that loads them, instances ask on the data plane's thread: both share only the
    available resources, a mapping that is replaced and never changed."""

    def __init__(self, explicit: Sequence[RateLimitResource], call_soon: Callable[[Callable[[], None]], None]) -> None:
        """`explicit`: the available resources; empty = as many as the neediest instance needs. `call_soon`: runs a
        callback on the data plane's thread."""
        self._explicit = tuple(explicit)
        self._call_soon = call_soon
        self._registered: dict[object, Sequence[Needs]] = {}
        self._available: Needs = {}
        self._allocated: dict[ResourceKey, int] = {}
        self._staged: list[tuple[int, int, LimitedInstance]] = []
        self._numbers = itertools.count(1)

    # Models

    def register(self, instances: Sequence[Needs]) -> Callable[[], None]:
        """Register a model's instances; return the function that unregisters them. Raises ServeError (INVALID_ARGUMENT)
        if the resources can never suffice, or if a resource is both of the machine and of a device."""
        self._available = self._resources(instances)
        model = object()
        self._registered[model] = tuple(instances)
        self._call_soon(self._allocate)

        def unregister() -> None:
            if self._registered.pop(model, None) is not None:
                self._available = self._resources()
                self._call_soon(self._allocate)

        return unregister

    def _resources(self, new_instances: Iterable[Needs] = ()) -> Needs:
        most: dict[ResourceKey, int] = {}
        for needs in itertools.chain(*self._registered.values(), new_instances):
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
        """Return what --rate-limit-resource gives of a resource; 0 if no flag names it. The flag ignores case."""
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
        """Return whether an instance may run now. If not, `on_granted` is called when it may."""
        if instance.state is _State.FREE:
            instance.state = _State.STAGED
            heapq.heappush(self._staged, (instance.rank, next(self._numbers), instance))
            self._allocate(asking=instance)
        return instance.is_granted

    def release(self, instance: LimitedInstance, has_run: bool) -> None:
        """Take back an instance's resources, or its request for them. They are granted in a later call of the loop, so
        that this instance can ask again before that."""
        if instance.is_granted:
            for key, count in instance.needs.items():
                self._allocated[key] -= count
            instance.executions += has_run
        elif instance.state is _State.STAGED:
            self._staged = [staged for staged in self._staged if staged[2] is not instance]
            heapq.heapify(self._staged)
        instance.state = _State.FREE
        self._call_soon(self._allocate)

    def _allocate(self, asking: LimitedInstance | None = None) -> None:
        """Grant resources in the order of ranks. `asking` is not called back."""
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


MOST_AHEAD = 2
"""Batches that may wait in a worker, so that its engine never waits for one. More would only wait longer."""

ROUND_TRIP_NS = 100_000
"""About the time of the way to a worker and back. If the engine takes less for a batch, idle instances would be sent
many small batches: 8 requests in flight on four instances took a sixth more CPU time each."""


class InstancePool:
    """Keeps the batches that each instance has in flight. With a rate limiter, instances run only while it grants them
    their resources."""

    def __init__(self, times: ComputeTimes, sends_ahead: bool = True, limiter: RateLimiter | None = None) -> None:
        """`sends_ahead`: a busy instance may be sent further batches, which can then no longer be overtaken; never with
        a limiter."""
        self.in_flight: dict[Instance, deque[FormedBatch]] = {}
        """Instance -> its batches: the first is in the engine, the others were sent ahead."""
        self._used: set[Instance] = set()
        self._times = times
        self._last_begin_ns = 0
        self.sends_ahead = sends_ahead and limiter is None
        self._limiter = limiter
        self._limited: dict[Instance, LimitedInstance] = {}
        """All instances if there is a limiter, else none."""

    def attach(self, instance: Instance, on_granted: Callable[[], None]) -> None:
        self.in_flight[instance] = deque()
        if self._limiter is not None:
            self._limited[instance] = LimitedInstance(instance.rate_limiter, instance.device, on_granted)

    def detach(self, instance: Instance) -> None:
        self.in_flight.pop(instance, None)
        self._used.discard(instance)
        self._release(self._limited.pop(instance, None), has_run=False)

    def idle(self) -> Instance | None:
        """Return an instance whose engine can begin a batch, preferably one without batches. With a limiter, return the
        one without batches that may run first."""
        if self._limited:
            free = [each for each, batches in self.in_flight.items() if not batches]
            limited = self._limited
            return min(free, key=lambda each: (not limited[each].is_granted, limited[each].rank), default=None)
        best = None
        for instance, batches in self.in_flight.items():
            if not batches:
                return instance
            if best is None and len(batches) < instance.batches_at_once:
                best = instance
        return best

    def is_idle(self, instance: Instance) -> bool:
        batches = self.in_flight.get(instance)
        return batches is not None and not batches

    def ahead(self) -> Instance | None:
        """Return the busy instance with the fewest batches, if it may be sent one more."""
        if self._times.engine_ns >= SEND_AHEAD_BELOW_NS or not self.sends_ahead:
            return None
        best, fewest = None, MOST_AHEAD + 1
        for instance, batches in self.in_flight.items():
            count = len(batches)
            if count < fewest:
                best, fewest = instance, count
        return best

    @property
    def next_return_ns(self) -> int:
        """time.monotonic_ns() when a batch is likely to come back; 0 = none is in flight, or none comes back soon."""
        if self._times.engine_ns >= ROUND_TRIP_NS or not self.sends_ahead or not any(self.in_flight.values()):
            return 0
        return self._last_begin_ns + ROUND_TRIP_NS

    def claim(self, instance: Instance) -> bool:
        """Ask the rate limiter, if there is one, for what an idle instance needs. Returns whether it may run now."""
        return self._limiter is None or self._limiter.ask(self._limited[instance])

    def return_unused(self) -> None:
        """Return resources that were granted for work that no longer exists."""
        for instance, limited in self._limited.items():
            if limited.is_granted and not self.in_flight[instance]:
                self._release(limited, has_run=False)

    def _release(self, limited: LimitedInstance | None, has_run: bool) -> None:
        if self._limiter is not None and limited is not None:
            self._limiter.release(limited, has_run)

    def begin(self, instance: Instance, batch: FormedBatch) -> None:
        batches = self.in_flight[instance]
        batches.append(batch)
        self._last_begin_ns = batch.compute_start_ns
        batch.sent_ahead = len(batches) > 1
        if instance not in self._used:
            self._used.add(instance)
            batch.is_first = True

    def end(self, instance: Instance, batch: FormedBatch) -> None:
        batches = self.in_flight.get(instance)
        if batches and batch in batches:
            batches.remove(batch)
        if self._limited and not batches:
            self._release(self._limited.get(instance), has_run=True)

    # Requests that were sent ahead and have not begun to run

    @property
    def has_waiting(self) -> bool:
        return any(len(batches) > 1 or (batches and batches[0].is_grouped) for batches in self.in_flight.values())

    def waiting(self) -> Iterator[InferRequest]:
        """Yield the requests that wait in workers, as far as the server can know. Safe on any thread."""
        # Copies, each made in one step, because the data plane changes these meanwhile.
        for batches in tuple(self.in_flight.values()):
            for place, batch in enumerate(tuple(batches)):
                yield from _waiting_of(batch, place)

    def batch_ahead(self, request: InferRequest) -> FormedBatch | None:
        """Return the batch with which a request waits in a worker, sent ahead; None if it does not wait there."""
        for batches in self.in_flight.values():
            for place, batch in enumerate(batches):
                if any(waiting is request for waiting in _waiting_of(batch, place)):
                    return batch
        return None


def _waiting_of(batch: FormedBatch, place: int) -> Iterator[InferRequest]:
    if place == 0 and not batch.is_grouped:
        return
    # Of the grouped requests in the engine at least the first has begun to run.
    begun = batch.requests[0] if place == 0 else None
    for request in batch.undropped:
        if request is not begun:
            yield request
