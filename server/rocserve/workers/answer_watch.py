"""Notices a worker that owes an answer and gives none.

The worker does nothing for it, and requests do not pay for it: each check of its instances compares what they owe with
the check before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rocserve.settings import TimeLimits

if TYPE_CHECKING:
    from rocserve.workers.instance import Instance

_POLL_SECONDS = 1.0
"""Between two checks, at the most."""
_SHORTEST_POLL_SECONDS = 0.05
"""Whatever limit a model asks for, its watch takes next to nothing of the loop."""
_CHECKS_WITHIN_LIMIT = 5
_REPORTED_AFTER_SECONDS = 10.0
"""Without an answer; sooner where the limit is so short that half of it has passed."""


@dataclass(frozen=True, slots=True)
class Owed:
    """What an instance owes at a moment."""

    batch: int = 0
    """The number of the batch that it is to answer first; 0 = it has none."""
    requests: int = 0
    """Requests that are open beside their batches."""
    calls: int = 0
    """Calls of other models that it waits for itself."""
    said: int = 0
    """How often it has said something beside its batches."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    is_stopped: bool = False
    """By SIGSTOP: it can do nothing."""
    is_traced: bool = False
    """A debugger has it."""


class Silence:
    """How long one instance has owed an answer and given none, by the checks of it."""

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._last = (Owed(), ProcessState())
        self.seconds = 0.0

    def check(self, owed: Owed, process: ProcessState, passed: float) -> None:
        """`passed`: seconds since the last check."""
        # A model that waits for another is due again when that has answered, unless it can do nothing with the answer.
        waits = owed.calls > 0 and not process.is_stopped
        is_due = (owed.batch or owed.requests) and not waits and not process.is_traced
        self.seconds = self.seconds + passed if is_due and self._last == (owed, process) else 0.0
        self._last = (owed, process)

    @property
    def excess(self) -> str:
        """The limit that has passed; "" = none."""
        limits, seconds, (owed, process) = self._limits, self.seconds, self._last
        if limits.request_timeout_seconds and seconds >= limits.request_timeout_seconds:
            return f"it had not answered for {limits.request_timeout_seconds:g} s (request_timeout_secs)"
        # Requests that a model holds open may be about what comes once a day; a batch keeps its loop waiting.
        if not limits.hang_timeout_seconds or seconds < limits.hang_timeout_seconds:
            return ""
        if process.is_stopped:
            return f"its process was stopped for {limits.hang_timeout_seconds:g} s (hang_timeout_secs)"
        return f"it hung for {limits.hang_timeout_seconds:g} s (hang_timeout_secs)" if owed.batch else ""

    @property
    def is_reported(self) -> bool:
        """Whether it is to be shown beside the model."""
        owed, process = self._last
        is_stuck = owed.batch > 0 or process.is_stopped
        return is_stuck and self.seconds >= min(_REPORTED_AFTER_SECONDS, shortest_limit(self._limits) / 2)


def shortest_limit(limits: TimeLimits) -> float:
    """Of those for answers, in seconds; infinite where there is none."""
    return min(filter(None, (limits.request_timeout_seconds, limits.hang_timeout_seconds)), default=math.inf)


class AnswerWatch:
    """Of one worker. Lives on the asyncio loop."""

    def __init__(
        self,
        instances: Sequence[Instance],
        limits: TimeLimits,
        process_state: Callable[[], ProcessState],
        on_silence: Callable[[Sequence[float]], None],
        on_hang: Callable[[str], None],
    ) -> None:
        """`on_silence`: takes the seconds for which each instance that is to be reported has been silent, whenever they
        change. `on_hang`: takes, once, the reason for which the worker is to be ended."""
        self._instances = [(instance, Silence(limits)) for instance in instances]
        self._process_state = process_state
        self._on_silence = on_silence
        self._on_hang = on_hang
        self._reported: list[float] = []
        self._pause = max(_SHORTEST_POLL_SECONDS, min(_POLL_SECONDS, shortest_limit(limits) / _CHECKS_WITHIN_LIMIT))
        self._loop = asyncio.get_running_loop()
        self._checked_at = self._loop.time()
        self._timer = self._next_check()

    def stop(self) -> None:
        self._timer.cancel()
        self._report([])

    def _next_check(self) -> asyncio.TimerHandle:
        # All workers are checked in the same moments: one wake-up of the loop for all of them.
        return self._loop.call_at((self._loop.time() // self._pause + 1) * self._pause, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        # When the server itself was stopped, workers may have answered and nobody has read it yet.
        passed = min(now - self._checked_at, 2 * self._pause)
        self._checked_at = now
        self._timer = self._next_check()
        owed = [instance.owed() for instance, _ in self._instances]
        is_due = any(one.batch or one.requests for one in owed)
        process = self._process_state() if is_due else ProcessState()
        for (instance, silence), one in zip(self._instances, owed, strict=True):
            silence.check(one, process, passed)
            excess = silence.excess
            if excess and not instance.has_unread():
                self.stop()
                self._on_hang(excess)
                return
        self._report([silence.seconds for _, silence in self._instances if silence.is_reported])

    def _report(self, seconds: list[float]) -> None:
        if seconds != self._reported:
            self._reported = seconds
            self._on_silence(seconds)


def process_state(pid: int) -> ProcessState:
    """What the kernel says of a process (proc(5), status)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return ProcessState()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return ProcessState(fields.get("State", "").strip().startswith("T"), fields.get("TracerPid", "0").strip() != "0")
