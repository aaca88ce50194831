"""A measuring process as its parent has it: takes orders, answers, and ends with all that it started; latencies taken
in turns."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from rocserve.core.errors import unavailable
from rocserve.core.plain import from_json, to_json
from rocserve.jobs.hints import with_hint
from rocserve.jobs.runner import JobProcess, describe_end
from rocserve.settings.flag import AMOUNT, POSITIVE, flag, number
from rocserve.tools.measuring.messages import Answer, Engine, Measure, Measured, Opened, Order

_CHILD = "rocserve.tools.measuring.child"


class MeasuringProcess:
    """A context: the process is gone when it is left. Orders are answered one after the other."""

    def __init__(
        self, title: str, python: Sequence[str], environment: Mapping[str, str], *, timeout_seconds: float = 0.0
    ) -> None:
        """
        `title`: what errors begin with. `python`: the words that start the interpreter. `environment`: set on top of
        this process's. `timeout_seconds`: up to its last answer, as --timeout-secs has it; 0 = no limit.

        Raises:
            ServeError: it cannot be started.
        """
        self.title = title
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + (timeout_seconds or math.inf)
        self._lines: list[bytes] = []
        try:
            self._process = JobProcess([*python, "-P", "-m", _CHILD], {**os.environ, **environment})
        except OSError as error:
            raise unavailable(f"{title}: no process could be started: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def open(self, engine: Engine) -> Opened:
        """Load the model. Raises: ServeError: it cannot be had or cannot load the model, with the reason."""
        self._send(Order(engine=engine))
        opened = self.answer().opened
        assert opened is not None
        return opened

    def measure(self, order: Measure) -> Measured:
        """Raises: ServeError: a run failed."""
        self.begin(order)
        return self.measured()

    def begin(self, order: Measure) -> None:
        """As `measure`, without waiting for the answer."""
        self._send(Order(measure=order))

    def measured(self) -> Measured:
        """The answer to what was begun. Raises: ServeError."""
        measured = self.answer().measured
        assert measured is not None
        return measured

    def answer(self) -> Answer:
        """The next one. Raises: ServeError: it is that something failed, or there will be none."""
        answer = from_json(Answer, self._line())
        if answer.failure:
            raise unavailable(f"{self.title}: {answer.failure}")
        return answer

    def _send(self, order: Order) -> None:
        try:
            self._process.send(to_json(order))
        except BrokenPipeError:
            raise unavailable(f"{self.title}: {self._end()}") from None

    def _line(self) -> bytes:
        poll = select.poll()
        poll.register(self._process.replies, select.POLLIN)
        while not self._lines:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise unavailable(
                    f"{self.title} took longer than --timeout-secs ({self._timeout_seconds:g} s) and was stopped; raise"
                    " --timeout-secs (0 = no limit)"
                )
            if poll.poll(None if left == math.inf else left * 1000):
                lines = self._process.take_replies()
                if lines is None:
                    raise unavailable(f"{self.title}: {self._end()}")
                self._lines += lines
        # What engines write is in memory until it is taken, and they may write much.
        self._process.output.take_lines()
        return self._lines.pop(0)

    def _end(self) -> str:
        status = self._process.wait()
        self._process.output.take_lines(ended=True)
        return with_hint(describe_end(status, self._process.output.last_lines, 0, "the process"))


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Milliseconds, by the names that tables and JSON have for them."""

    runs: int
    min: float
    mean: float
    p50: float
    p95: float
    p99: float
    std: float
    """Standard deviation over all that was measured."""


def summarise(seconds: Sequence[float]) -> LatencySummary:
    """
    Raises:
        ValueError: there is nothing to summarise.
    """
    if not seconds:
        raise ValueError("no times were measured")
    milliseconds = np.asarray(seconds, dtype=np.float64) * 1e3
    p50, p95, p99 = (float(value) for value in np.percentile(milliseconds, (50, 95, 99)))
    return LatencySummary(
        runs=len(seconds),
        min=float(milliseconds.min()),
        mean=float(milliseconds.mean()),
        p50=p50,
        p95=p95,
        p99=p99,
        std=float(milliseconds.std()),
    )


_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to measure."""

    warm_up: int = flag(3, AMOUNT, "runs before those that are timed")
    repeats: int = flag(10, POSITIVE, "timed runs, at least")
    seconds: float = flag(2.0, number("S", 0, float), "how long each setting is timed, at least")


def time_interleaved(
    processes: Mapping[str, MeasuringProcess], orders: Mapping[str, Measure], timing: Timing
) -> dict[str, list[float]]:
    """The latencies, in seconds, of each process's order; who begins changes from round to round.

    Raises:
        ServeError: a run failed.
    """
    for name, order in orders.items():
        if timing.warm_up:
            processes[name].measure(replace(order, repeats=timing.warm_up, seconds=0.0))
    share = Timing(0, math.ceil(timing.repeats / _ROUNDS), timing.seconds / _ROUNDS)
    latencies: dict[str, list[float]] = {name: [] for name in orders}
    for place in range(min(_ROUNDS, timing.repeats)):
        for name in list(orders)[:: -1 if place % 2 else 1]:
            order = replace(orders[name], repeats=share.repeats, seconds=share.seconds, outputs_file="")
            latencies[name] += processes[name].measure(order).latencies
    return latencies
