"""The rate limiter: resources, order, and schedulers that wait for both."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import DynamicBatching, InstanceRateLimiter, RateLimiterResource
from rocserve.scheduling.call_cycles import LimitedInstance, LimitedModel, needs_of
from rocserve.scheduling.rate_limiter import RateLimiter
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
        self.limiter = RateLimiter(explicit, self._soon.append, logging.getLogger("test"))

    def load(self, *instances: InstanceRateLimiter, device: int | None = None) -> Callable[[], None]:
        return self.limiter.register([needs_of(one, device) for one in instances])

    def instance(self, name: str, needs: InstanceRateLimiter, device: int | None = None) -> LimitedInstance:
        model = LimitedModel(name)
        return LimitedInstance(model, needs, device, lambda: self.granted.append(name))

    def end(self, instance: LimitedInstance) -> None:
        """End a run, without asking again."""
        self.limiter.release(instance, has_run=True)
        self.run_soon()

    def run_soon(self) -> None:
        while self._soon:
            self._soon.pop(0)()

    def run_busy(self, instances: dict[str, LimitedInstance], times: int) -> list[str]:
        """Run instances with endless work, which ask again when they have run; return who ran, in order."""
        running = [name for name, instance in instances.items() if self.limiter.ask(instance)]
        order: list[str] = []
        for _ in range(times):
            name = running.pop(0)
            order.append(name)
            self.limiter.release(instances[name], has_run=True)
            if self.limiter.ask(instances[name]):
                running.append(name)
            self.run_soon()
            running += self.granted
            self.granted.clear()
        for instance in instances.values():
            self.limiter.release(instance, has_run=False)
        self.run_soon()
        self.granted.clear()
        return order


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


def test_an_instance_of_priority_3_runs_a_third_as_often(limited: Limited) -> None:
    urgent, patient = limits(1, R=1), limits(3, R=1)
    limited.load(urgent, patient)
    instances = {"urgent": limited.instance("urgent", urgent), "patient": limited.instance("patient", patient)}
    order = limited.run_busy(instances, 400)
    assert order.count("urgent") == 300
    assert order[:7] == ["urgent", "patient", "urgent", "urgent", "patient", "urgent", "urgent"]


def test_a_model_that_is_new_or_has_rested_gets_its_share_and_no_more(limited: Limited) -> None:
    needs = limits(R=1)
    limited.load(needs)
    old, new, rested = (limited.instance(name, needs) for name in ("old", "new", "rested"))
    assert limited.run_busy({"old": old, "rested": rested}, 1000).count("old") == 500
    limited.run_busy({"old": old}, 1000)
    order = limited.run_busy({"old": old, "new": new, "rested": rested}, 300)
    assert Counter(order) == {"old": 100, "new": 100, "rested": 100}


def test_other_resources_do_not_change_the_share(limited: Limited) -> None:
    """A model that runs often on its own resource sets no clock of another resource forward."""
    urgent, patient, apart = limits(1, R=1), limits(2, R=1), limits(S=1)
    limited.load(urgent, patient, apart)
    instances = {name: limited.instance(name, needs) for name, needs in (("urgent", urgent), ("patient", patient))}
    other = limited.instance("apart", apart)
    order: list[str] = []
    for _ in range(100):
        for _ in range(10):
            assert limited.limiter.ask(other)
            limited.limiter.release(other, has_run=True)
        order += limited.run_busy(instances, 3)
    assert Counter(order) == {"urgent": 200, "patient": 100}


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_more_than_one_execution_of_each(limited: Limited, seed: int) -> None:
    """Instances of one priority, which need any of three resources, in any amounts, and ask at any time. While one
    waits, each other that needs the same is granted it at most once."""
    numbers = random.Random(seed)
    instances: dict[str, LimitedInstance] = {}
    for number in range(numbers.randint(2, 8)):
        needs = limits(**{name: numbers.randint(1, 4) for name in numbers.sample("RST", numbers.randint(1, 3))})
        limited.load(needs)
        instances[str(number)] = limited.instance(str(number), needs)
    running: list[str] = []
    passed: dict[str, Counter[str]] = {}

    def begin(name: str) -> None:
        passed.pop(name, None)
        running.append(name)
        for waiting, counts in passed.items():
            if not instances[waiting].needs.keys().isdisjoint(instances[name].needs):
                counts[name] += 1
                assert counts[name] <= 1, (name, passed)

    for _ in range(400):
        if running and numbers.random() < 0.6:
            name = running.pop(numbers.randrange(len(running)))
            limited.limiter.release(instances[name], has_run=True)
        else:
            name = numbers.choice(list(instances))
        if name not in running and name not in passed:
            if limited.limiter.ask(instances[name]):
                begin(name)
            else:
                passed[name] = Counter()
        limited.run_soon()
        for name in limited.granted:
            begin(name)
        limited.granted.clear()
        assert running or not passed


def test_who_waits_stops_only_those_who_need_the_same(limited: Limited) -> None:
    one, both, other, none = limits(R=1), limits(R=1, S=1), limits(T=1), limits()
    limited.load(one, both, other, none)
    assert limited.limiter.ask(limited.instance("1", one))
    assert not limited.limiter.ask(limited.instance("2", both))
    assert not limited.limiter.ask(limited.instance("3", limits(S=1)))
    for _ in range(3):
        assert limited.limiter.ask(limited.instance("4", none))
    assert limited.limiter.ask(limited.instance("5", other))


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
    limiter = RateLimiter((), loop.call_soon, logging.getLogger("test"))
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


def test_a_model_runs_where_it_needs_no_resource(make_bench, loop) -> None:
    limiter = RateLimiter((), loop.call_soon, logging.getLogger("test"))
    limiter.register([needs_of(limits(R=1), None)])
    bench = make_bench(DynamicBatching(), max_batch_size=1, instances=0, limiter=limiter)
    for needs in (limits(R=1), limits(R=1), limits()):
        instance = bench.new_instance()
        instance.rate_limiter = needs
        bench.instances.append(instance)
        bench.scheduler.attach(instance)
    for value in (1.0, 2.0, 3.0):
        bench.submit(value)
    assert sorted(len(instance.executions) for instance in bench.instances) == [0, 1, 1]
    assert len(bench.instances[2].executions) == 1
    bench.finish_all()


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
    assert doomed.done.wait(PATIENCE_SECONDS)
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
