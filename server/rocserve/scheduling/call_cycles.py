"""The rate limiter's records of models and instances; finds the instance that must run although the limiter lacks
resources, because it waits for itself.

Who waits for whom:

- a caller, an instance with open calls, waits for the place of each call;
- a call at an instance waits for the calls that this instance makes;
- a call in a model's queue waits for an instance of the model, each of which may be running or in the limiter's line;
- an instance in the line waits for the holders of its missing resources, and for those before it that need the same.

Everything else ends by itself: an instance that runs and makes no calls, a model that is about to form a batch.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rocserve.core.model_config import InstanceRateLimiter, ModelConfig

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


class LimitState(enum.Enum):
    FREE = enum.auto()
    """The instance has nothing to run, or has not asked the limiter."""
    STAGED = enum.auto()
    """It waits in the line."""
    GRANTED = enum.auto()


@dataclass(eq=False, slots=True)
class LimitedModel:
    """The limiter's record of a model version."""

    name: str
    keeps_order: bool = False
    """Whether its requests may have to wait for each of its instances: they belong to sequences, or are answered in the
    order of their arrival. Otherwise one instance that takes batches is enough."""
    instances: dict[object, LimitedInstance] = field(default_factory=dict)
    """By the Instance."""
    has_warned: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> LimitedModel:
        batching = config.dynamic_batching
        keeps_order = batching is not None and batching.preserve_ordering
        return cls(config.name, keeps_order or config.sequence_batching is not None)


class LimitedInstance:
    """The limiter's record of an instance: its resources, its state, and its virtual times."""

    __slots__ = ("called", "finish", "model", "needs", "on_granted", "start", "state", "weight")

    def __init__(
        self, model: LimitedModel, limits: InstanceRateLimiter, device: int | None, on_granted: Callable[[], None]
    ) -> None:
        """`on_granted`: called when the instance had to wait and may now run."""
        self.model = model
        self.needs = {key: count for key, count in needs_of(limits, device).items() if count}
        self.weight = max(limits.priority, 1)
        self.on_granted = on_granted
        self.called = Counter[Place]()
        """The number of unanswered calls of its model, by place."""
        self.state = LimitState.FREE
        self.start = self.finish = 0
        """Virtual times at which the execution that it runs has started, and the one before it has finished."""

    @property
    def is_staged(self) -> bool:
        return self.state is LimitState.STAGED

    @property
    def is_granted(self) -> bool:
        return self.state is LimitState.GRANTED


Place = tuple[LimitedModel, LimitedInstance | None]
"""The called model, and the instance to which the request was given; None = it waits for one, or for any at all
(`keeps_order`)."""

_Waiter = tuple[LimitedInstance, bool]
"""An instance, and whether it waits in the line (True) or for its calls (False): it may do both."""


class Standstill:
    """The callers and instances that can never go on by themselves: the callers whose calls cannot all be answered, and
    the instances in the line that cannot get their resources even when all others have ended and given back theirs."""

    def __init__(
        self,
        line: Sequence[LimitedInstance],
        callers: Iterable[LimitedInstance],
        held: Mapping[ResourceKey, int],
        available: Needs,
    ) -> None:
        """`line`: those who wait for resources, in their order. `held`: what all instances hold."""
        self._line = line
        self._held = held
        self._available = available
        self._claims = dict.fromkeys(line)
        self._callers = dict.fromkeys(callers)
        self._held_for_good: Counter[ResourceKey] = Counter()
        while self._strike_out():
            pass

    def first_to_run(self) -> LimitedInstance | None:
        """Return an instance in the line that waits for itself, and for which a caller waits: each end of another
        instance would come too late for it. Only after all others have given back its resources."""
        for caller in self._callers:
            for claim in self._called_in_cycle(caller):
                if all(self._held.get(key, 0) <= self._held_for_good[key] for key in claim.needs):
                    return claim
        return None

    def _strike_out(self) -> bool:
        """Strike out those that can go on once all struck out earlier have ended. Returns whether there were any."""
        before = len(self._claims) + len(self._callers)
        self._held_for_good = Counter()
        for caller in self._callers:
            if caller.is_granted:
                self._held_for_good.update(caller.needs)
        waiting: dict[LimitedInstance, None] = {}
        taken: set[ResourceKey] = set()
        for claim in self._claims:
            if self._lacking(claim) or not taken.isdisjoint(claim.needs):
                waiting[claim] = None
                taken.update(claim.needs)
        callers = [caller for caller in self._callers if any(map(self._stands_still, caller.called))]
        self._claims, self._callers = waiting, dict.fromkeys(callers)
        return len(self._claims) + len(self._callers) < before

    def _lacking(self, claim: LimitedInstance) -> list[ResourceKey]:
        held, available = self._held_for_good, self._available
        return [key for key, count in claim.needs.items() if held[key] + count > available.get(key, 0)]

    def _stands_still(self, place: Place) -> bool:
        model, instance = place
        if instance is not None:
            return instance in self._callers
        blocked = [self._takes_no_batch(one) for one in model.instances.values()]
        if model.keeps_order:
            return any(blocked)
        return bool(blocked) and all(blocked)

    def _takes_no_batch(self, instance: LimitedInstance) -> bool:
        if instance.is_staged:
            return instance in self._claims
        return instance.is_granted and instance in self._callers

    # Cycles

    def _called_in_cycle(self, caller: LimitedInstance) -> list[LimitedInstance]:
        """Follow the waits from a caller until one repeats. Return, of the instances in this cycle, those in the line
        for which a caller waits."""
        way: dict[_Waiter, int] = {}
        called: set[LimitedInstance] = set()
        waiter: _Waiter | None = (caller, False)
        while waiter is not None and waiter not in way:
            way[waiter] = len(way)
            following = self._next(waiter)
            if following is not None and following[1] and not waiter[1]:
                called.add(following[0])
            waiter = following
        if waiter is None:
            return []
        return [one for (one, in_line), place in way.items() if place >= way[waiter] and in_line and one in called]

    def _next(self, waiter: _Waiter) -> _Waiter | None:
        """Return one for which `waiter` waits; None only if an instance needs more than can ever exist."""
        instance, in_line = waiter
        if in_line:
            lacking = self._lacking(instance)
            for caller in self._callers:
                if caller.is_granted and not caller.needs.keys().isdisjoint(lacking):
                    return caller, False
            before = self._line[: self._line.index(instance)]
            others = (one for one in before if one in self._claims and not one.needs.keys().isdisjoint(instance.needs))
            first = next(others, None)
            return None if first is None else (first, True)
        model, called = next(filter(self._stands_still, instance.called))
        if called is not None:
            return called, False
        blocked = [one for one in model.instances.values() if self._takes_no_batch(one)]
        # Preferably one in the line: it needs only resources, the others need answers.
        other = next((one for one in blocked if one.is_staged), blocked[0])
        return other, other.is_staged
