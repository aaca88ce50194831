"""Random requests in random order: each is answered once, in its sequence's order, by one instance."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from support.hand_loop import Flag

from rocserve.core.errors import ServeError
from rocserve.core.model_config import OldestStrategy

from .conftest import STATE, Answer, Bench, HandInstance

STEPS = 1500


class Course:
    """Random steps, and what must hold after each."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench = bench
        self.random = random.Random(seed)
        self.sent: list[tuple[int, int, Answer]] = []
        self.refused = 0
        self.finished: dict[HandInstance, int] = defaultdict(int)
        self.ran: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.life_of: dict[int, tuple[int, int]] = {}
        """By the request's number. An ended id may be used again immediately, on another instance."""
        self.lives: dict[int, int] = defaultdict(int)

    def ask(self) -> None:
        sequence = self.random.randint(1, 12)
        number = len(self.sent) + 1
        start, end = self.random.random() < 0.3, self.random.random() < 0.2
        try:
            answer = self.bench.ask(sequence, number, start=start, end=end)
        except ServeError as error:
            assert "must specify the START flag" in error.text or "has been lost" in error.text
            self.refused += 1
            return
        self.sent.append((sequence, number, answer))
        self.life_of[number] = (sequence, self.lives[sequence])
        self.lives[sequence] += end

    def finish(self) -> None:
        busy = [instance for instance in self.bench.instances if len(instance.executions) > self.finished[instance]]
        if not busy:
            return
        instance = self.random.choice(busy)
        assert len(instance.executions) == self.finished[instance] + 1, "one batch at a time"
        self.finished[instance] += 1
        rows = [row for row in instance.last.rows if row.ready]
        lives = [self.life_of[row.value] for row in rows]
        assert len(set(lives)) == len(rows), "one request of a sequence in a batch"
        for row, life in zip(rows, lives, strict=True):
            assert row.sequence == life[0]
            self.ran[life].append(row.value)
        instance.last.finish()

    def leave(self) -> None:
        waiting = [
            (sequence, answer)
            for sequence, _, answer in self.sent[-30:]
            if answer.leave is not None and not answer.done.is_set()
        ]
        if waiting:
            sequence, answer = self.random.choice(waiting)
            answer.leave()
            self.lives[sequence] += 1

    def check(self) -> None:
        for values in self.ran.values():
            assert values == sorted(values), "in the order of their coming"
        answered = {answer.value for *_, answer in self.sent if answer.value is not None}
        for _, number, answer in self.sent:
            assert answer.done.is_set()
            if answer.error is None:
                assert answer.value == number
                assert number in self.ran[self.life_of[number]]
        assert len(answered) > STEPS // 10


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", ["direct", "oldest", "direct with states", "oldest with states"])
def test_random_steps(make_bench, strategy: str, seed: int) -> None:
    oldest = OldestStrategy(max_candidate_sequences=3, preserve_ordering=seed % 2 == 1)
    bench = make_bench(
        instances=2,
        oldest=oldest if "oldest" in strategy else None,
        states=(STATE,) if "states" in strategy else (),
    )
    course = Course(bench, seed)
    for _ in range(STEPS):
        step = course.random.random()
        if step < 0.55:
            course.ask()
        elif step < 0.98:
            course.finish()
        else:
            course.leave()
    drained = Flag(bench.loop)
    bench.scheduler.close(drained.set)
    for _ in range(10 * STEPS):
        if drained.is_set():
            break
        course.finish()
    assert drained.is_set()
    assert bench.scheduler.waiting == 0
    course.check()
