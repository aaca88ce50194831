"""Models that call each other while they hold the rate limiter's resources: no cycle of holders and waiters lasts."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.hand_instances import Answer, Execution, HandInstance
from support.hand_loop import HandLoop

from rocserve.core.datatypes import DataType
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import (
    DynamicBatching,
    InputConfig,
    InstanceRateLimiter,
    ModelConfig,
    OutputConfig,
    RateLimiterResource,
)
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.statistics import ModelStatistics
from rocserve.scheduling.call_cycles import LimitedInstance, Needs, Place, needs_of
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.queue import QueueLimits
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.scheduling.scheduler import SchedulerParts
from rocserve.scheduling.served_version import ScheduledVersion
from rocserve.settings import RateLimitResource
from rocserve.workers.instance import WorkerGone

HEAD = RequestHead("m", "", (InputHead("IN", "FP32", (1, 1)),))


pytestmark = pytest.mark.usefixtures("clock")
"""How fast the tests run decides nothing: no time passes."""


@dataclass(eq=False)
class Script:
    """A request to a model, and the calls that the model makes for it: groups, one after the other."""

    model: str
    groups: list[list[Script]] = field(default_factory=list)


def script(model: str, *called: Script) -> Script:
    """A request whose model makes calls one after the other."""
    return Script(model, [[one] for one in called])


class Calling(Execution):
    """A batch whose model makes the calls of each request, in the requests' order, and ends when the test says so."""

    world: World
    instance: CallingInstance
    is_over = False

    def begin(self) -> None:
        values = [int(np.frombuffer(data[0], np.float32)[0]) for data in self.requests]
        self.groups = [group for value in values for group in self.world.scripts[value].groups]
        self.open = 0
        self.go_on()

    def go_on(self) -> None:
        if self.is_over:
            return
        while not self.open and self.groups:
            group = self.groups.pop(0)
            self.open = len(group)
            for one in group:
                self.world.send(one, Caller(self), self.world.schedulers[self.instance.model].caller(self.instance))
        if not self.open:
            self.world.ready.append(self)


class CallingInstance(HandInstance):
    def __init__(self, loop: HandLoop, world: World, model: str, needs: InstanceRateLimiter) -> None:
        super().__init__(loop)
        self.world, self.model, self.rate_limiter = world, model, needs

    def execute(self, is_grouped, members, on_outcome) -> None:
        if self.closed:
            raise WorkerGone("gone")
        execution = Calling(self._loop, is_grouped, members, on_outcome)
        execution.world, execution.instance = self.world, self
        self.executions.append(execution)
        # As in a server, the model's calls come in a later turn.
        self._loop.call_soon(execution.begin)


class Caller:
    """The responder of a call."""

    def __init__(self, execution: Calling) -> None:
        self._execution = execution

    def send(self, answer: object, final: bool = True) -> None:
        self._execution.open -= 1
        self._execution.go_on()

    def expect_many(self) -> None: ...
    def watch_cancellation(self, callback: Callable[[], None]) -> None: ...


class Limiter(RateLimiter):
    """Checks that who exceeds an amount could never have been granted its resources otherwise."""

    exceeded: list[LimitedInstance]

    def _warn(self, instance: LimitedInstance) -> None:
        super()._warn(instance)
        lacking = self._lacking(instance)
        if lacking:
            self.exceeded.append(instance)
        assert any(place == (instance.model, None) for _, place in self._calls.values())
        assert not could_be_granted(instance, list(self._line), list(self._calls.values()), self._available)


OpenCall = tuple[LimitedInstance, Place]
"""A caller, and where its call is."""


def could_be_granted(
    wanted: LimitedInstance, line: list[LimitedInstance], calls: list[OpenCall], available: Needs
) -> bool:
    """Let all run and end that can. Returns whether `wanted` is granted its resources at last."""
    models = {id(one.model): one.model for one in [*line, *(caller for caller, _ in calls)]}
    models |= {id(model): model for _, (model, _) in calls}
    running = {one for model in models.values() for one in model.instances.values() if one.is_granted}
    open_calls = list(calls)
    while True:
        before = len(open_calls), len(running), len(line)
        for one in tuple(running):
            if not any(caller is one for caller, _ in open_calls):
                running.remove(one)
                open_calls = [(caller, place) for caller, place in open_calls if place[1] is not one]
        needed: set[Any] = set()
        for one in tuple(line):
            fits = all(
                sum(other.needs.get(key, 0) for other in running) + count <= available[key]
                for key, count in one.needs.items()
            )
            if fits and needed.isdisjoint(one.needs):
                line.remove(one)
            else:
                needed |= set(one.needs)
        if wanted not in line:
            return True
        for model in models.values():
            stuck = [one in line or one in running for one in model.instances.values()]
            if not (any(stuck) if model.keeps_order else all(stuck)):
                open_calls = [(caller, place) for caller, place in open_calls if place != (model, None)]
        if before == (len(open_calls), len(running), len(line)):
            return False


class World:
    """Schedulers of models on instances that a test answers by hand, with one limiter."""

    def __init__(self, amounts: dict[str, int]) -> None:
        self.loop = HandLoop()
        explicit = [RateLimitResource(name, count) for name, count in amounts.items()]
        self.limiter = Limiter(explicit, self.loop.call_soon, logging.getLogger("test"))
        self.limiter.exceeded = []
        self.schedulers: dict[str, ModelScheduler] = {}
        self.versions: dict[str, ScheduledVersion] = {}
        self.instances: list[CallingInstance] = []
        self.scripts: list[Script] = []
        self.ready: list[Calling] = []

    def add(
        self, name: str, instances: int = 1, rows: int = 1, in_order: bool = False, priority: int = 0, **needs: int
    ) -> None:
        config = ModelConfig(
            name=name,
            max_batch_size=rows,
            inputs=(InputConfig("IN", DataType.FP32, (-1,)),),
            outputs=(OutputConfig("OUT", DataType.FP32, (-1,)),),
            dynamic_batching=DynamicBatching(preserve_ordering=in_order),
        )
        log, statistics = logging.getLogger("test"), ModelStatistics()
        parts = SchedulerParts(config, 1, statistics, self.loop, QueueLimits(), log, limiter=self.limiter)
        scheduler = self.schedulers[name] = ModelScheduler(parts)
        self.versions[name] = ScheduledVersion(config, b"", 1, statistics, scheduler)
        limits = InstanceRateLimiter(
            tuple(RateLimiterResource(resource, count) for resource, count in needs.items()), priority
        )
        self.limiter.register([needs_of(limits, None)])
        for _ in range(instances):
            self.start_instance(name, limits)

    def start_instance(self, model: str, limits: InstanceRateLimiter) -> None:
        instance = CallingInstance(self.loop, self, model, limits)
        self.instances.append(instance)
        self.schedulers[model].attach(instance)
        self.loop.turn()

    def send(self, request: Script, responder: Any, caller: object = None) -> None:
        value = np.float32(len(self.scripts)).tobytes()
        self.scripts.append(request)
        self.versions[request.model].infer(InferRequest(HEAD, "", [value], caller=caller), Exchange(responder))

    def ask(self, *requests: Script) -> list[Answer]:
        """Send clients' requests in one turn of the loop."""
        answers = [Answer(self.loop) for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            self.send(request, answer)
        self.loop.turn()
        return answers

    def finish(self, execution: Calling) -> None:
        self.ready.remove(execution)
        execution.is_over = True
        execution.finish()

    def finish_all(self) -> None:
        while self.ready:
            self.finish(self.ready[0])

    def lose(self, instance: CallingInstance) -> None:
        """End an instance's worker, with the batch that it runs, and start another."""
        instance.closed = True
        running = [execution for execution in instance.executions if not execution.is_over]
        self.ready = [execution for execution in self.ready if execution not in running]
        self.instances.remove(instance)
        self.schedulers[instance.model].detach(instance)
        for execution in running:
            execution.is_over = True
            execution.finish(WorkerGone("gone"))
        self.loop.turn()
        self.start_instance(instance.model, instance.rate_limiter)

    def running(self, model: str) -> int:
        return sum(1 for one in self.ready if one.instance.model == model)

    def assert_nothing_is_left(self, answers: Sequence[Answer]) -> None:
        assert all(answer.response is not None for answer in answers)
        limiter = self.limiter
        assert (limiter._line, limiter._calls, limiter._callers) == ([], {}, {})
        assert not any(limiter._held.values())


def test_a_called_model_without_needs_does_not_wait_behind_those_who_want_what_its_caller_holds() -> None:
    world = World({"R": 1})
    world.add("free")
    world.add("calling", instances=2, R=1)
    answers = world.ask(*[script("calling", script("free"), script("free"))] * 3)
    world.finish_all()
    assert not world.limiter.exceeded
    world.assert_nothing_is_left(answers)


def test_a_called_model_may_need_what_its_caller_holds() -> None:
    world = World({"R": 1})
    world.add("called", R=1)
    world.add("calling", R=1)
    answers = world.ask(script("calling", script("called")))
    assert world.running("called") == 1
    assert [one.model.name for one in world.limiter.exceeded] == ["called"]
    world.finish_all()
    world.assert_nothing_is_left(answers)


def test_a_call_waits_for_those_who_can_give_back_what_it_needs() -> None:
    """Only what its own callers hold is not to be had."""
    world = World({"R": 2})
    world.add("called", R=1)
    world.add("calling", R=1)
    world.add("other", R=1)
    answers = world.ask(script("other")) + world.ask(script("calling", script("called")))
    assert (world.running("other"), world.running("called")) == (1, 0)
    world.finish_all()
    assert not world.limiter.exceeded
    world.assert_nothing_is_left(answers)


def test_an_amount_is_exceeded_only_when_all_others_have_given_back_what_they_held() -> None:
    world = World({"R": 2})
    world.add("called", R=2)
    world.add("calling", R=1)
    world.add("other", R=1)
    answers = world.ask(script("other"), script("calling", script("called")))
    assert (world.running("other"), world.running("called")) == (1, 0)
    world.finish(world.ready[0])
    assert world.running("called") == 1
    world.finish_all()
    world.assert_nothing_is_left(answers)


def test_a_batch_may_wait_for_a_call_that_its_model_made_before_it() -> None:
    """For example in another thread."""
    world = World({"R": 1})
    for name in ("free", "between"):
        world.add(name)
    for name in ("holder", "needy"):
        world.add(name, R=1)
    answers = world.ask(script("holder", script("free"), script("between")))
    early = Answer(world.loop)
    world.send(script("needy"), early, world.schedulers["between"].caller(world.instances[1]))
    world.loop.turn()
    assert not world.running("needy")
    world.finish(world.ready[0])
    assert (world.running("between"), world.running("needy")) == (1, 1)
    world.finish_all()
    world.assert_nothing_is_left([*answers, early])


def test_callers_that_hold_what_the_other_calls_need_both_end() -> None:
    world = World({"R": 1, "S": 1})
    for name, held, needed in (("a", "R", "S"), ("b", "S", "R")):
        world.add(name, **{held: 1})
        world.add(f"called by {name}", **{needed: 1})
    answers = world.ask(*[script(name, script(f"called by {name}")) for name in ("a", "b", "a", "b")])
    assert len(world.limiter.exceeded) == 1
    world.finish_all()
    world.assert_nothing_is_left(answers)


def test_a_caller_that_holds_nothing_waits_with_its_calls_for_their_turn() -> None:
    """Nothing is exceeded, although all instances of a model wait for calls: their callers hold nothing."""
    world = World({"R": 1})
    world.add("called", instances=2, R=1)
    world.add("calling", instances=3)
    answers = world.ask(*[script("calling", script("called"))] * 3)
    assert world.running("called") == 1
    world.finish_all()
    assert not world.limiter.exceeded
    world.assert_nothing_is_left(answers)


def test_a_caller_waits_over_a_model_that_is_busy_with_another_call() -> None:
    """`holder` calls `between`, whose only instance runs a client's request that needs what the holder has."""
    world = World({"R": 1})
    world.add("holder", R=1)
    world.add("between")
    world.add("needy", R=1)
    world.add("before")
    answers = world.ask(script("between", script("before"), script("needy")))
    answers += world.ask(script("holder", script("between")))
    assert not world.running("needy")
    world.finish_all()
    assert [one.model.name for one in world.limiter.exceeded] == ["needy"]
    world.assert_nothing_is_left(answers)


@pytest.mark.parametrize("models", [["m"] * 4, ["a", "b", "a", "b"], ["a", "a", "b", "a"]])
def test_a_model_may_be_called_by_those_that_it_has_called_while_it_has_free_instances(models: list[str]) -> None:
    world = World({"R": 1})
    for name in sorted({*models}):
        world.add(name, instances=models.count(name) + 1, R=1)
    request = script(models[-1])
    for name in models[-2::-1]:
        request = script(name, request)
    answers = world.ask(request)
    assert len(world.ready) == 1, "the last called"
    world.finish_all()
    world.assert_nothing_is_left(answers)


def random_world(numbers: random.Random, instances: int = 0) -> tuple[World, list[str]]:
    """`instances`: of each model, which then may call itself; 0 = any number."""
    amounts = {name: numbers.randint(1, 3) for name in "RST"[: numbers.randint(1, 3)]}
    world, names = World(amounts), [f"m{number}" for number in range(numbers.randint(2, 6))]
    for name in names:
        needs = {
            resource: numbers.randint(1, amounts[resource])
            for resource in numbers.sample(list(amounts), numbers.randint(0, len(amounts)))
        }
        world.add(
            name,
            instances=instances or numbers.randint(1, 3),
            rows=numbers.randint(1, 3),
            # In order, an answer would wait for the one to its own caller.
            in_order=not instances and numbers.random() < 0.2,
            priority=numbers.randint(0, 3),
            **needs,
        )
    return world, names


def random_script(numbers: random.Random, names: list[str], first: int = 0) -> Script:
    """A request to a model and its calls, of later models only: one that calls itself may have to wait for itself."""
    number = numbers.randrange(first, len(names))
    groups = []
    if number + 1 < len(names):
        for _ in range(numbers.choice((0, 1, 1, 2))):
            groups.append([random_script(numbers, names, number + 1) for _ in range(numbers.choice((1, 1, 2)))])
    return Script(names[number], groups)


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_any_callers_over_any_resources_end(first_seed: int) -> None:
    """As long as a request is not answered, some execution waits for no call."""
    for seed in range(first_seed, first_seed + 20):
        numbers = random.Random(seed)
        world, names = random_world(numbers)
        answers = []
        for _ in range(80):
            action = numbers.random()
            if action < 0.4:
                answers += world.ask(*[random_script(numbers, names) for _ in range(numbers.choice((1, 1, 3)))])
            elif action < 0.42:
                world.lose(numbers.choice(world.instances))
            elif world.ready:
                world.finish(numbers.choice(world.ready))
            assert world.ready or all(answer.done.is_set() for answer in answers), f"seed {seed}"
        world.finish_all()
        assert all(answer.done.is_set() for answer in answers), f"seed {seed}"
        world.assert_nothing_is_left(answers)


def random_recursion(numbers: random.Random, names: list[str], spare: dict[str, int]) -> Script:
    """A request to a model, and calls of any models one after the other, of each at most `spare` within each other."""
    name = numbers.choice([name for name in names if spare[name]])
    left = {**spare, name: spare[name] - 1}
    calls = numbers.choice((0, 1, 1, 1, 2)) if any(left.values()) else 0
    return script(name, *[random_recursion(numbers, names, left) for _ in range(calls)])


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_one_client_may_use_models_that_call_each_other_in_any_way(first_seed: int) -> None:
    """Others only use single models meanwhile: no instance waits for ever but for resources."""
    for seed in range(first_seed, first_seed + 20):
        numbers = random.Random(seed)
        world, names = random_world(numbers, instances=3)
        others: list[Answer] = []
        for _ in range(6):
            (answer,) = world.ask(random_recursion(numbers, names, dict.fromkeys(names, 3)))
            while not answer.done.is_set():
                assert world.ready, f"seed {seed}"
                if numbers.random() < 0.2:
                    others += world.ask(Script(numbers.choice(names)))
                world.finish(numbers.choice(world.ready))
        world.finish_all()
        world.assert_nothing_is_left(others)
