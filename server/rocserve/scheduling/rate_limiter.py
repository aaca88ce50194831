"""Which instances may run, over all models: each holds its resources while it runs, and those that ran least go first.

Triton's rate limiter, in the mode execution_count: of the instances that have something to run, the one with the least
product of executions and priority is next, and all wait until there are resources for it.
"""

from __future__ import annotations

import enum
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InstanceRateLimiter
from rocserve.settings import RateLimitResource

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
    """Models are registered by the thread that loads them, instances ask on the data plane's. What both know, how much
    there is of each resource, is replaced whole."""

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
        return functools.partial(self._unregister, model)

    def _unregister(self, model: object) -> None:
        if self._registered.pop(model, None) is not None:
            self._available = self._resources(self._all_needs())
            self._call_soon(self._allocate)

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
            if not self._fits(instance.needs):
                return
            heapq.heappop(self._staged)
            for key, count in instance.needs.items():
                self._allocated[key] = self._allocated.get(key, 0) + count
            instance.state = _State.GRANTED
            if instance is not asking:
                self._call_soon(instance.on_granted)

    def _fits(self, needs: Needs) -> bool:
        return all(self._allocated.get(key, 0) + count <= self._available.get(key, 0) for key, count in needs.items())
