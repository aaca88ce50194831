"""Limits which instances of all models may run, as Triton's mode execution_count does: an instance holds its resources
while it runs a batch.

**Who waits.** An instance that needs no resource never waits. The others stand in one line, in the order of the virtual
times at which they finished their last execution. An instance takes no resource that one before it in the line needs;
it may take all others.

**Fair share** (start-time fair queueing). An execution starts, in virtual time, when the instance finished its last
one, or later if a clock of its resources is later, so time without work earns nothing. It sets these clocks to its
start, and finishes `priority` units after it. So while an instance waits, each other of its priority that needs the
same runs at most once, and one with priority 2 runs half as often.

**No cycle of holders and waiters.** A model may call others while its instance holds resources, and a call stands in
the line like a client's request. If an instance in the line waits for itself, over any number of calls, queues and
resources (`call_cycles.py`), no other instance can free it, so it runs immediately: out of its turn and, if the cycle
holds its resources, beyond the amount. Each event that may close a cycle (a request for resources, a call, a
lost instance, a smaller amount) is followed by this check, so no cycle lasts.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from rocserve.core.errors import invalid_argument
from rocserve.core.exchange import EndHook, Exchange, HookOrder
from rocserve.core.requests import InferRequest
from rocserve.scheduling.call_cycles import (
    LimitedInstance,
    LimitedModel,
    LimitState,
    Needs,
    Place,
    ResourceKey,
    Standstill,
)
from rocserve.settings import RateLimitResource


class RateLimiter:
    """See the top of this file. Models are registered by the thread that loads them, instances ask on the data plane's
    thread: both share only the available resources, a mapping that is replaced and never changed."""

    def __init__(
        self,
        explicit: Sequence[RateLimitResource],
        call_soon: Callable[[Callable[[], None]], None],
        log: logging.Logger,
    ) -> None:
        """`explicit`: the available resources; empty = as many as the neediest instance needs. `call_soon`: runs a
        callback on the data plane's thread."""
        self._explicit = tuple(explicit)
        self._call_soon = call_soon
        self._log = log
        self._registered: dict[object, Sequence[Needs]] = {}
        self._available: Needs = {}
        self._held: dict[ResourceKey, int] = {}
        self._clocks: dict[ResourceKey, int] = {}
        self._line: list[LimitedInstance] = []
        self._calls: dict[InferRequest, tuple[LimitedInstance, Place]] = {}
        """The calls that instances' models make, perhaps while the instances run a batch: the caller and the place."""
        self._callers: dict[LimitedInstance, None] = {}
        """The instances with open calls."""
        self._is_scheduled = False
        """Whether `_allocate` will be called in a later call of the loop."""

    # Models

    def register(self, instances: Sequence[Needs]) -> Callable[[], None]:
        """Register a model's instances; return the function that unregisters them. Raises ServeError (INVALID_ARGUMENT)
        if the resources can never suffice, or if a resource belongs to both the machine and a device."""
        self._available = self._resources(instances)
        model = object()
        self._registered[model] = tuple(instances)
        self._allocate_soon()

        def unregister() -> None:
            if self._registered.pop(model, None) is not None:
                self._available = self._resources()
                self._allocate_soon()

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
        """Return the amount of a resource in --rate-limit-resource; 0 if no flag names it. The flag ignores case."""
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
        if instance.state is LimitState.FREE:
            if not instance.needs or not (self._line or self._lacking(instance)):
                self._grant(instance, asking=instance)
                return True
            instance.state = LimitState.STAGED
            bisect.insort(self._line, instance, key=attrgetter("finish"))
            self._allocate(asking=instance)
        return instance.is_granted

    def release(self, instance: LimitedInstance, has_run: bool) -> None:
        """Take back an instance's resources, or its request for them. They are granted in a later call of the loop, so
        that this instance can ask again before that."""
        if instance.is_granted:
            for key, count in instance.needs.items():
                self._held[key] -= count
            if has_run:
                instance.finish = instance.start + instance.weight
        elif instance.is_staged:
            self._line.remove(instance)
        instance.state = LimitState.FREE
        self._allocate_soon()

    def lose(self, instance: LimitedInstance) -> None:
        """Release an instance's resources, because its worker has ended. Its requests wait for another instance."""
        self.release(instance, has_run=False)
        for request, (_, place) in tuple(self._calls.items()):
            if place[1] is instance:
                self._put(request, (instance.model, None))

    def _allocate_soon(self) -> None:
        """Allocate in a later call of the loop. From any thread."""
        if self._line and not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._allocate_now)

    def _allocate_now(self) -> None:
        self._is_scheduled = False
        self._allocate()

    def _allocate(self, asking: LimitedInstance | None = None) -> None:
        """Grant resources in the order of the line, then to those that wait for themselves. `asking` is not called
        back."""
        while self._line:
            waiting: list[LimitedInstance] = []
            needed: set[ResourceKey] = set()
            for instance in self._line:
                if needed.isdisjoint(instance.needs) and not self._lacking(instance):
                    self._grant(instance, asking)
                else:
                    waiting.append(instance)
                    needed.update(instance.needs)
            self._line = waiting
            if not self._callers:
                return
            first = Standstill(waiting, self._callers, self._held, self._available).first_to_run()
            if first is None:
                return
            self._warn(first)
            waiting.remove(first)
            self._grant(first, asking)

    def _lacking(self, instance: LimitedInstance) -> list[ResourceKey]:
        held, available = self._held, self._available
        return [key for key, count in instance.needs.items() if held.get(key, 0) + count > available.get(key, 0)]

    def _grant(self, instance: LimitedInstance, asking: LimitedInstance | None) -> None:
        instance.start = max([instance.finish, *[self._clocks.get(key, 0) for key in instance.needs]])
        for key, count in instance.needs.items():
            self._held[key] = self._held.get(key, 0) + count
            self._clocks[key] = instance.start
        instance.state = LimitState.GRANTED
        if instance is not asking:
            self._call_soon(instance.on_granted)

    def _warn(self, instance: LimitedInstance) -> None:
        """Log once per model that an instance exceeds an amount."""
        lacking, model = self._lacking(instance), instance.model
        if lacking and not model.has_warned:
            model.has_warned = True
            self._log.warning(
                "model '%s' runs although its resource '%s' is used up, because those who hold it wait for its answer;"
                " raise --rate-limit-resource=%s:COUNT, or give it another resource than its callers",
                model.name,
                lacking[0][1],
                lacking[0][1],
            )

    # Calls

    def follow(self, request: InferRequest, exchange: Exchange, model: LimitedModel) -> None:
        """Follow a call that has reached a model until its last answer."""
        caller = request.caller
        assert isinstance(caller, LimitedInstance), "InstancePool.caller returned it"
        place: Place = (model, None)
        self._calls[request] = caller, place
        self._callers[caller] = None
        caller.called[place] += 1
        self._allocate_soon()
        exchange.add(EndHook(HookOrder.CALL, functools.partial(self._end_call, request)))

    def move(self, request: InferRequest, model: LimitedModel, instance: LimitedInstance | None) -> None:
        """Note where a call is now: in a model's queue, or given to an instance."""
        self._put(request, (model, None if model.keeps_order else instance))

    def _put(self, request: InferRequest, place: Place) -> None:
        caller, before = self._calls[request]
        _take_one(caller.called, before)
        self._calls[request] = caller, place
        caller.called[place] += 1
        self._allocate_soon()

    def _end_call(self, request: InferRequest) -> None:
        caller, place = self._calls.pop(request)
        _take_one(caller.called, place)
        if not caller.called:
            del self._callers[caller]


def _take_one(counts: Counter[Place], place: Place) -> None:
    counts[place] -= 1
    if not counts[place]:
        del counts[place]
