"""The rate limiter: resources, order, and schedulers that wait for both."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import DynamicBatching, InstanceRateLimiter, RateLimiterResource
from rocserve.scheduling.instances import LimitedInstance, RateLimiter, needs_of
from rocserve.settings import RateLimitResource


def limits(priority: int = 0, everywhere: bool = False, **counts: int) -> InstanceRateLimiter:
    return InstanceRateLimiter(
        tuple(RateLimiterResource(name, count, everywhere) for name, count in counts.items()), priority
    )


class Limited:
    """A limiter whose callbacks run when the test asks for it, and instances that record their grants."""

    def __init__(self, *explicit: RateLimitResource) -> None:
        self.granted: list[str] = []
        self._soon: list[Callable[[], None]] = []
        self.limiter = RateLimiter(explicit, self._soon.append)

    def load(self, *instances: InstanceRateLimiter, device: int | None = None) -> Callable[[], None]:
        return self.limiter.register([needs_of(each, device) for each in instances])

    def instance(self, name: str, needs: InstanceRateLimiter, device: int | None = None) -> LimitedInstance:
        return LimitedInstance(needs, device, lambda: self.granted.append(name))

    def end(self, instance: LimitedInstance) -> None:
        """End a run, without asking again."""
        self.limiter.release(instance, has_run=True)
        self.run_soon()

    def run_soon(self) -> None:
        while self._soon:
            self._soon.pop(0)()


@pytest.fixture
def limited() -> Limited:
    return Limited()


def test_an_instance_without_needs_runs_at_once(limited: Limited) -> None:
    instance = limited.instance("a", limits())
    assert limited.limiter.ask(instance)
    limited.limiter.release(instance, has_run=True)
    assert limited.limiter.ask(instance)
    assert not limited.granted


def test_there_is_as_much_as_the_neediest_holds(limited: Limited) -> None:
    small, large = limits(R=2), limits(R=5)
    limited.load(small, small, large)
    first, second, third = (limited.instance(name, needs) for name, needs in (("1", small), ("2", small), ("3", large)))
    assert limited.limiter.ask(first)
    assert limited.limiter.ask(second)
    assert not limited.limiter.ask(third)
    limited.end(first)
    assert not limited.granted
    limited.end(second)
    assert limited.granted == ["3"]
    assert limited.limiter.ask(third)


def test_devices_have_their_own_and_the_machine_has_one(limited: Limited) -> None:
    own, shared = limits(R=1), limits(S=1, everywhere=True)
    limited.load(own, device=0)
    limited.load(own, device=1)
    limited.load(shared)
    assert limited.limiter.ask(limited.instance("0", own, 0))
    assert limited.limiter.ask(limited.instance("1", own, 1))
    # The CPU has the same resources as device 0.
    assert not limited.limiter.ask(limited.instance("cpu", own))


def test_a_global_resource_is_shared_by_all_devices(limited: Limited) -> None:
    shared = limits(S=1, everywhere=True)
    limited.load(shared, device=0)
    assert limited.limiter.ask(limited.instance("0", shared, 0))
    assert not limited.limiter.ask(limited.instance("1", shared, 1))


def test_who_ran_least_for_its_priority_is_next(limited: Limited) -> None:
    urgent, patient = limits(1, R=1), limits(3, R=1)
    limited.load(urgent, patient)
    instances = {"urgent": limited.instance("urgent", urgent), "patient": limited.instance("patient", patient)}
    assert limited.limiter.ask(instances["urgent"])
    assert not limited.limiter.ask(instances["patient"])
    running, order = "urgent", []
    for _ in range(16):
        order.append(running)
        # Both have endless work: after a run each asks again immediately.
        limited.limiter.release(instances[running], has_run=True)
        granted = limited.limiter.ask(instances[running])
        limited.run_soon()
        running = running if granted else limited.granted.pop()
    assert order.count("urgent") == 12
    assert order[:5] == ["urgent", "patient", "urgent", "urgent", "patient"]


def test_explicit_counts_take_the_place_of_what_models_hold() -> None:
    limited = Limited(RateLimitResource("r", 3), RateLimitResource("r", 5, 1), RateLimitResource("s", 2, 7))
    limited.load(limits(R=3), device=0)
    limited.load(limits(R=5), device=1)
    limited.load(limits(S=2, everywhere=True))
    with pytest.raises(ServeError) as raised:
        limited.load(limits(R=4), device=0)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert raised.value.text == (
        'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the'
        " minimum required count is 4"
    )
    with pytest.raises(ServeError, match='Resource count for "T" is limited to 0'):
        limited.load(limits(T=1))


def test_a_resource_is_of_the_machine_or_of_devices(limited: Limited) -> None:
    unload = limited.load(limits(R=1))
    with pytest.raises(ServeError) as raised:
        limited.load(limits(R=1, everywhere=True))
    assert raised.value.text == (
        'Resource "R" is present as both global and device-specific resource in the model configuration.'
    )
    unload()
    limited.load(limits(R=1, everywhere=True))


def test_what_leaves_makes_room_and_takes_its_resources_along(limited: Limited) -> None:
    small, large = limits(R=1), limits(R=3)
    limited.load(small)
    unload = limited.load(large)
    instances = [limited.instance(str(number), small) for number in range(3)]
    assert [limited.limiter.ask(instance) for instance in instances] == [True] * 3
    for instance in instances:
        limited.limiter.release(instance, has_run=True)
    unload()
    assert [limited.limiter.ask(instance) for instance in instances] == [True, False, False]


def test_who_asked_and_has_nothing_to_run_any_more_stands_in_nobodys_way(limited: Limited) -> None:
    needs = limits(R=1)
    limited.load(needs)
    first, second, third = (limited.instance(str(number), needs) for number in range(3))
    assert limited.limiter.ask(first)
    limited.limiter.ask(second)
    limited.limiter.ask(third)
    limited.limiter.release(second, has_run=False)
    limited.end(first)
    assert limited.granted == ["2"]


@pytest.fixture
def pair(make_bench, loop):
    """Two models whose instances need the only unit of R."""
    limiter = RateLimiter((), loop.call_soon)
    needs = limits(R=1)
    limiter.register([needs_of(needs, None)])

    def limited_bench(**more):
        bench = make_bench(DynamicBatching(), instances=0, limiter=limiter, **more)
        instance = bench.new_instance()
        instance.rate_limiter, instance.device = needs, None
        bench.instances.append(instance)
        bench.scheduler.attach(instance)
        return bench

    return limited_bench(), limited_bench()


def test_schedulers_run_one_at_a_time_and_batch_what_waits(pair, wait_for) -> None:
    one, other = pair
    one.submit(1.0)
    waiting = [other.submit(value) for value in (2.0, 3.0)]
    assert not other.executions
    assert other.scheduler.waiting == 2
    one.executions[0].finish()
    wait_for(lambda: other.executions)
    assert other.executions[0].request_sizes == (1, 1)
    one.submit(4.0)
    assert len(one.executions) == 1
    other.executions[0].finish()
    wait_for(lambda: len(one.executions) == 2)
    assert all(answer.error is None for answer in waiting)


def test_a_grant_that_nobody_needs_any_more_goes_on(pair, wait_for) -> None:
    one, other = pair
    one.submit(1.0)
    doomed = other.submit(2.0, timeout=10_000)
    assert doomed.done.wait(5)
    one.executions[0].finish()
    one.submit(3.0)
    wait_for(lambda: len(one.executions) == 2)
    assert not other.executions


def test_an_instance_that_is_lost_gives_back_what_it_held(pair, wait_for) -> None:
    one, other = pair
    one.submit(1.0)
    waiting = other.submit(2.0)
    one.scheduler.detach(one.instances[0])
    wait_for(lambda: other.executions)
    other.executions[0].finish()
    assert waiting.error is None
