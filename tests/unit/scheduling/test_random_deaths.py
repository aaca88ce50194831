"""Random schedules of requests, answers, clients that leave and workers that die: each request is answered once, by its
own answer, and none that may have begun runs again."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from support.hand_instances import Answer, Execution, HandInstance

from rocserve.core.errors import unavailable
from rocserve.core.model_config import DynamicBatching
from rocserve.scheduling import batch_policy
from rocserve.workers.instance import WorkerGone

BATCHING = [None, DynamicBatching(), DynamicBatching(preserve_ordering=True)]


def _values(execution: Execution) -> list[float]:
    """The first number of each request, which no other request has."""
    return [float(np.frombuffer(data[0], np.float32)[0]) for data in execution.requests]


class Worker:
    """An instance, and the batches that it has not answered."""

    def __init__(self, instance: HandInstance, batches_at_once: int) -> None:
        self.instance = instance
        instance.batches_at_once = batches_at_once

    @property
    def sent(self) -> list[Execution]:
        return self.instance.executions


class Schedule:
    """Draws what happens next."""

    def __init__(self, make_bench, clock: list[int], seed: int) -> None:
        self._clock = clock
        self.random = random.Random(seed)
        self.batching = self.random.choice(BATCHING)
        count = self.random.choice([1, 2])
        # Without a batcher requests are grouped if their shapes are equal and fixed, with one if they are not equal.
        self.bench = make_bench(self.batching, width=2 if self.batching is None else -1, instances=count)
        self.workers = [self.worker(instance) for instance in self.bench.instances]
        self.answers: list[Answer] = []
        self.begun: set[float] = set()
        self.groups = 0

    def worker(self, instance: HandInstance) -> Worker:
        return Worker(instance, self.random.choice([1, 1, 2]))

    def run(self) -> None:
        for _ in range(200):
            (act,) = self.random.choices([self.ask, self.answer, self.leave, self.wait, self.die], [45, 35, 8, 5, 7])
            act()
        drained: list[bool] = []
        self.bench.scheduler.close(lambda: drained.append(True))
        while not drained:
            for worker in self.workers:
                while worker.sent:
                    self.finish(worker)
            self.bench.loop.run(0.01)

    def ask(self) -> None:
        self.bench.loop.turning(lambda: [self._ask() for _ in range(self.random.randint(1, 9))])()

    def _ask(self) -> None:
        # No two requests arrive at the same time.
        self._clock[0] += 1
        width = 2 if self.batching is None else self.random.choice([2, 3, 4])
        more = {"timeout": self.random.choice([500, 5000])} if self.random.random() < 0.1 else {}
        left = self.random.choice([0.001, 0.1, 1.0]) if self.random.random() < 0.15 else None
        deadline = None if left is None else time.monotonic() + left
        self.answers.append(self.bench._submit(float(len(self.answers)), 1, width, deadline, **more))

    def answer(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.sent:
            self.finish(worker)

    def finish(self, worker: Worker) -> None:
        batch = worker.sent.pop(0)
        self.groups += batch.is_grouped
        self.begin(_values(batch))
        batch.finish()

    def begin(self, values: list[float]) -> None:
        assert self.begun.isdisjoint(values), "it has begun before"
        self.begun.update(values)

    def leave(self) -> None:
        """Let a client leave."""
        if waiting := [one for one in self.answers if one.leave is not None and not one.done.is_set()]:
            answer = self.random.choice(waiting)
            leave, answer.leave = answer.leave, None
            assert leave is not None
            leave()

    def wait(self) -> None:
        self.bench.loop.run(self.random.choice([0.001, 0.02]))

    def die(self) -> None:
        """End a worker as Instance.end does, and replace it."""
        worker = self.random.choice(self.workers)
        self.workers.remove(worker)
        worker.instance.closed = True
        self.bench.scheduler.detach(worker.instance)
        sent = worker.sent
        taken, inside = self.random.randint(0, len(sent)), worker.instance.batches_at_once
        ends: list[tuple[Execution, bool, int]] = []
        for place, batch in enumerate(sent):
            was_inside = inside > 0 and place < taken
            inside = 0 if batch.is_grouped else inside - 1
            count = len(batch.requests)
            if batch.is_grouped:
                # A group begins when all batches before it have ended.
                count = self.random.randint(0, count) if was_inside and place == 0 else 0
            if was_inside:
                self.begin(_values(batch)[:count])
            ends.append((batch, was_inside, count if batch.is_grouped else 0))
        for batch, was_inside, begun in reversed(ends):
            batch.finish(unavailable("the worker died") if was_inside else WorkerGone("gone"), begun=begun)
        instance = self.bench.new_instance()
        self.workers.append(self.worker(instance))
        self.bench.scheduler.attach(instance)


@pytest.mark.parametrize("seed", range(12))
def test_each_request_is_answered_once_whichever_worker_dies(
    make_bench, clock: list[int], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(batch_policy, "CALM_REQUESTS", 3)
    schedule = Schedule(make_bench, clock, seed)
    schedule.run()
    assert schedule.groups > 5
    # An answer fails if it is sent twice.
    assert len(schedule.bench.answered) == len(schedule.answers)
    for value, answer in enumerate(schedule.answers):
        assert answer.error is not None or answer.number == 2.0 * value
    if schedule.batching is not None and schedule.batching.preserve_ordering:
        good = [answer.number for answer in schedule.bench.answered if answer.error is None]
        assert good == sorted(good)
