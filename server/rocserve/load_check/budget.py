"""The time limit of a check, and its runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rocserve.load_check.tensors import Feed, Run


class OutOfTime(Exception):
    """The time left does not suffice for the next run."""


class Budget:
    """The seconds that all checks of one load may take together."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seconds = seconds
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self.clock()


class Trials:
    """Runs an engine within a budget, and counts the runs."""

    def __init__(self, run: Run, budget: Budget) -> None:
        self._run = run
        self._budget = budget
        self.runs = 0
        self.seconds_per_row = 0.0
        """On average, without the first two runs, which allocate memory. 0 = not known yet."""
        self.fastest_row = math.inf
        """The fewest seconds of a row: the model's own time, even if a busy machine has delayed other runs."""
        self._slowest_row = 0.0
        self._seconds = 0.0
        self._rows = 0
        self.last_seconds = 0.0
        self.refusal = ""
        """The first line of the engine's most recent refusal of an input."""

    def run(self, feed: Feed, rows: int = 1) -> Feed | None:
        """Run; None = the engine refuses this input. Raises OutOfTime if the run would probably last too long."""
        if self._budget.left <= self.seconds_per_row * rows:
            slowness = f" where a row takes {self._slowest_row:.2g} s" if self.runs else ""
            raise OutOfTime(f"{self._budget.seconds:g} s are too few{slowness}")
        started = self._budget.clock()
        self.runs += 1
        try:
            outputs = self._run(feed)
        except Exception as error:
            # Each engine raises its own types.
            self.refusal = str(error).partition("\n")[0]
            return None
        self.last_seconds = self._budget.clock() - started
        self.fastest_row = min(self.fastest_row, self.last_seconds / rows)
        self._slowest_row = max(self._slowest_row, self.last_seconds / rows)
        if self.runs > 2:
            self._seconds += self.last_seconds
            self._rows += rows
            self.seconds_per_row = self._seconds / self._rows
        return outputs
