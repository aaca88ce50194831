"""Random starts, ends, deadlines, cancellations, reschedules and losses of workers, over few ids and slots: each
answer is that of a model that has run only its own sequence. The test's clock makes each seed do the same every time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.hand_loop import Flag, HandLoop
from support.outputs import outputs_from

from rocserve.backends.request_model import RESCHEDULED
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import OldestStrategy
from rocserve.core.requests import Member
from rocserve.core.tensors import Tensor
from rocserve.workers.instance import WorkerGone
from rocserve.workers.instance_requests import RequestLost
from rocserve.workers.results import Outputs

from .conftest import STATE, Answer, Bench, Row, read_row

STEPS = 900
MOST_AGAIN = 3
"""An iterative request of value v runs v % MOST_AGAIN times more."""


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000_000_000_000

    def monotonic(self) -> float:
        return self.ns / 1e9

    def monotonic_ns(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "monotonic_ns", clock.monotonic_ns)
    return clock


@dataclass
class Batch:
    """The batch that a worker runs, and the outcome that it will report."""

    rows: Sequence[Row]
    numbers: Sequence[int]
    on_outcome: Callable[[Batch], None]
    sums: Sequence[int] = ()
    open: frozenset[int] = frozenset()
    error: ServeError | None = None
    failures: Mapping[int, ServeError] = field(default_factory=dict)
    parameters: Mapping[int, object] = field(default_factory=dict)
    is_large: bool = False
    slot: object = None
    input_end_ns: int = 0
    output_start_ns: int = 0
    compute_end_ns: int = 0

    def outputs_of(self, index: int) -> Outputs:
        row = self.rows[index]
        outputs = [Tensor("OUT", DataType.INT32, (1, 1), np.int32(self.sums[index]).tobytes())]
        if row.state is not None:
            state = np.array([*row.state, row.value], np.int32)
            outputs.append(Tensor("STATE_OUT", DataType.INT32, (1, state.size), state.tobytes()))
        return outputs_from(outputs)


class Worker:
    """An instance whose model keeps a sum for each id: of all values since the last START, and 1 for each further run
    of a request. With states, the server keeps the values instead."""

    device = rate_limiter = None
    batches_at_once = 1

    def __init__(self, loop: HandLoop, is_iterative: bool) -> None:
        self.batch: Batch | None = None
        self.has_ended = False
        self._loop = loop
        self._is_iterative = is_iterative
        self._sums: dict[int, int] = {}
        self._runs_left: dict[int, int] = {}
        self._open: dict[int, Callable[[object, bool], None]] = {}

    def execute(self, is_grouped: bool, members: Sequence[Member], on_outcome: Callable[[Batch], None]) -> None:
        if self.has_ended:
            raise WorkerGone("gone")
        assert self.batch is None, "one batch at a time"
        rows = [read_row(member) for member in members]
        ids = [row.sequence for row in rows if row.ready]
        assert len(ids) == len(set(ids)), "one request of a sequence in a batch"
        self.batch = Batch(rows, [member[2] for member in members], on_outcome)

    def finish(self) -> None:
        """Run the batch, and report it."""
        batch, self.batch = self.batch, None
        assert batch is not None
        batch.sums = [self._run(row) if row.ready else 0 for row in batch.rows]
        batch.input_end_ns = batch.output_start_ns = batch.compute_end_ns = time.monotonic_ns()
        batch.open = frozenset(index for index, row in enumerate(batch.rows) if self._runs_left.get(row.sequence))
        self._loop.turning(batch.on_outcome)(batch)
        for index in batch.open:
            answer = self._open.pop(batch.numbers[index], None)
            if answer is not None:
                self._loop.turning(answer)(RESCHEDULED, True)

    def _run(self, row: Row) -> int:
        if row.state is not None:
            return sum(row.state) + row.value
        again = self._runs_left.get(row.sequence, 0)
        if row.start:
            self._sums[row.sequence] = row.value
        elif again:
            self._sums[row.sequence] += 1
        else:
            self._sums[row.sequence] += row.value
        if self._is_iterative:
            is_new = row.start or not again
            self._runs_left[row.sequence] = row.value % MOST_AGAIN if is_new else again - 1
        return self._sums[row.sequence]

    def end(self) -> None:
        self.has_ended = True
        batch, self.batch = self.batch, None
        still_open, self._open = self._open, {}
        for answer in still_open.values():
            answer(RequestLost(StatusCode.UNAVAILABLE, "it died"), True)
        if batch is not None:
            batch.error = WorkerGone("it died")
            self._loop.turning(batch.on_outcome)(batch)

    # Stands in for RequestInstance.

    def open_request(self, on_answer: Callable[[object, bool], None], trace: object) -> int:
        number = len(self._open) + 1
        while number in self._open:
            number += 1
        self._open[number] = on_answer
        return number

    def close_requests(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._open.pop(number, None)

    def cancel(self, number: int) -> None: ...


@dataclass(eq=False)
class Sent:
    value: int
    answer: Answer
    has_deadline: bool
    has_left: bool = False


@dataclass(eq=False)
class Life:
    """A sequence, as its clients see it."""

    requests: list[Sent] = field(default_factory=list)
    has_ended: bool = False
    may_be_lost: bool = False
    """A worker that may have had it has died."""

    @property
    def may_fail(self) -> bool:
        return self.may_be_lost or any(sent.has_left or sent.has_deadline for sent in self.requests)

    @property
    def is_answered(self) -> bool:
        return all(sent.answer.done.is_set() for sent in self.requests)


class Course:
    """Random steps, and what must hold after each."""

    def __init__(self, bench: Bench, clock: Clock, seed: int, is_iterative: bool) -> None:
        self.bench = bench
        self.random = random.Random(seed)
        self.lives: dict[int, list[Life]] = {}
        self._clock = clock
        self._is_iterative = is_iterative

    @property
    def workers(self) -> list[Worker]:
        return self.bench.instances

    def step(self) -> None:
        kinds = (self.ask, self.finish, self.leave, self.pass_time, self.die)
        (step,) = self.random.choices(kinds, (50, 45, 5, 10, 0.3))
        step()
        if self._is_iterative:
            running = [
                row.sequence for worker in self.workers if worker.batch for row in worker.batch.rows if row.ready
            ]
            assert len(running) == len(set(running)), "one request of an id at a time"

    def ask(self) -> None:
        sequence, value = self.random.randint(1, 4), self.random.randint(1, 1000)
        start, end = self.random.random() < 0.35, self.random.random() < 0.25
        deadline = None
        if self.random.random() < 0.1:
            deadline = self._clock.monotonic() + self.random.choice((0, 0.01, 0.05, 0.2))
        lives = self.lives.setdefault(sequence, [])
        life = lives[-1] if lives else None
        try:
            answer = self.bench.ask(sequence, value, start=start, end=end, deadline=deadline)
        except ServeError as error:
            assert not start
            if life is not None and not life.has_ended:
                ended_with_its_request = self._is_iterative and life.is_answered
                assert life.may_fail or ended_with_its_request, error.text
                assert "must specify the START flag" in error.text or (life.may_be_lost and "lost" in error.text)
                life.has_ended = True
            return
        if start:
            life = Life()
            lives.append(life)
        assert life is not None and not life.has_ended
        life.requests.append(Sent(value, answer, deadline is not None))
        life.has_ended = end

    def finish(self) -> None:
        busy = [worker for worker in self.workers if worker.batch is not None]
        if busy:
            self.random.choice(busy).finish()

    def leave(self) -> None:
        leaving = [
            sent
            for lives in self.lives.values()
            for life in lives[-3:]
            for sent in life.requests
            if sent.answer.leave is not None and not sent.answer.done.is_set()
        ]
        if leaving:
            sent = self.random.choice(leaving)
            sent.has_left = True
            sent.answer.leave()

    def pass_time(self) -> None:
        self._clock.ns += self.random.randint(1, 40) * 1_000_000
        self.bench.loop.turn()

    def die(self) -> None:
        for lives in self.lives.values():
            for life in lives:
                life.may_be_lost |= not life.has_ended or not life.is_answered
        worker = self.random.choice(self.workers)
        self.workers.remove(worker)
        worker.end()
        self.bench.scheduler.detach(worker)
        self.workers.append(Worker(self.bench.loop, self._is_iterative))
        self.bench.scheduler.attach(self.workers[-1])

    def check(self) -> int:
        """Compare all answers with those of a model of one sequence. Returns the number of right answers."""
        right = 0
        for life in (life for lives in self.lives.values() for life in lives):
            total, has_failed = 0, False
            for sent in life.requests:
                total += sent.value + (sent.value % MOST_AGAIN if self._is_iterative else 0)
                assert sent.answer.done.is_set()
                error = sent.answer.error
                if error is None:
                    assert not has_failed, "what comes after a failure in its sequence does not run"
                    assert sent.answer.value == total
                    right += 1
                    continue
                has_failed = True
                assert life.may_fail, f"{error.code}: {error.text}"
                if not life.may_be_lost:
                    expected = {StatusCode.CANCELLED}
                    if sent.has_deadline:
                        expected.add(StatusCode.DEADLINE_EXCEEDED)
                    assert error.code in expected
        return right


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["keeps its own state", "with states", "iterative"])
@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_random_steps(make_bench, clock: Clock, strategy: str, kind: str, seed: int) -> None:
    is_iterative = kind == "iterative"
    bench = make_bench(
        instances=2,
        make_instance=lambda loop: Worker(loop, is_iterative),
        answers_requests=is_iterative,
        max_batch_size=1 + seed % 2,
        oldest=OldestStrategy(1 + seed % 2, preserve_ordering=seed > 1) if strategy == "oldest" else None,
        states=(STATE,) if kind == "with states" else (),
        iterative=is_iterative,
        max_sequence_idle_microseconds=10**12,
    )
    course = Course(bench, clock, seed, is_iterative)
    for _ in range(STEPS):
        course.step()
    drained = Flag(bench.loop)
    bench.scheduler.close(drained.set)
    for _ in range(10 * STEPS):
        if drained.is_set():
            break
        course.finish()
    assert drained.is_set()
    assert bench.scheduler.waiting == 0
    assert course.check() > STEPS // 10
