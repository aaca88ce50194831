"""Detects workers that do not answer, by comparing what each instance has in flight at two checks. Neither the worker
nor a request spends time on it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path

from rocserve.settings import TimeLimits
from rocserve.workers.instance import Instance, PendingAnswers


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the kernel says about a process."""

    is_stopped: bool = False
    is_traced: bool = False


class Silence:
    """Measures how long one instance has had the same pending answers."""

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._last = (PendingAnswers(), ProcessState())
        self.seconds = 0.0

    def check(self, pending_answers: PendingAnswers, process: ProcessState, seconds_since_last: float) -> None:
        # While a model waits for another model, no answer is due, unless its process is stopped and cannot use the
        # answer.
        waits = pending_answers.open_calls > 0 and not process.is_stopped
        is_due = (pending_answers.batch or pending_answers.open_requests) and not waits and not process.is_traced
        is_unchanged = self._last == (pending_answers, process)
        self.seconds = self.seconds + seconds_since_last if is_due and is_unchanged else 0.0
        self._last = (pending_answers, process)

    @property
    def excess(self) -> str:
        """Why the worker must be ended: the limit that has passed; "" = none."""
        limits, seconds, (pending_answers, process) = self._limits, self.seconds, self._last
        if limits.request_timeout_seconds and seconds >= limits.request_timeout_seconds:
            return f"it had not answered for {limits.request_timeout_seconds:g} s (request_timeout_secs)"
        # An open request may wait for an event that comes once a day, but a batch always blocks its model.
        if not limits.hang_timeout_seconds or seconds < limits.hang_timeout_seconds:
            return ""
        if process.is_stopped:
            return f"its process was stopped for {limits.hang_timeout_seconds:g} s (hang_timeout_secs)"
        return f"it hung for {limits.hang_timeout_seconds:g} s (hang_timeout_secs)" if pending_answers.batch else ""

    @property
    def is_reported(self) -> bool:
        """Whether the repository index shows the silence: after 10 s, or half of the shortest limit."""
        pending_answers, process = self._last
        is_stuck = pending_answers.batch > 0 or process.is_stopped
        return is_stuck and self.seconds >= min(10.0, shortest_limit(self._limits) / 2)


def shortest_limit(limits: TimeLimits) -> float:
    """Return the shorter limit for answers, in seconds; infinite if there is none."""
    return min(filter(None, (limits.request_timeout_seconds, limits.hang_timeout_seconds)), default=math.inf)


@dataclass(eq=False, repr=False)
class AnswerWatch:
    """Checks the instances of one worker for silence. Lives on the asyncio loop."""

    instances: InitVar[Sequence[Instance]]
    limits: InitVar[TimeLimits]
    _process_state: Callable[[], ProcessState]
    _on_silence: Callable[[Sequence[float]], None]
    """Called with the seconds of silence of all instances that are reported, whenever the seconds change."""
    _on_hang: Callable[[str], None]
    """Called once, with the reason why the worker must be ended."""

    def __post_init__(self, instances: Sequence[Instance], limits: TimeLimits) -> None:
        self._instances = [(instance, Silence(limits)) for instance in instances]
        self._reported: list[float] = []
        # Five checks within a limit; 0.05 s bounds the loop's load, however short a limit a model asks for.
        self._pause = max(0.05, min(1.0, shortest_limit(limits) / 5))
        self._loop = asyncio.get_running_loop()
        self._checked_at = self._loop.time()
        self._timer = self._next_check()

    def stop(self) -> None:
        self._timer.cancel()
        self._report([])

    def _next_check(self) -> asyncio.TimerHandle:
        # Workers with equal limits are checked at the same moments, so that the loop wakes once for all of them.
        return self._loop.call_at((self._loop.time() // self._pause + 1) * self._pause, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        # If the server itself was stopped for a while, workers may have answered, but the server has not read the
        # answers yet. So the time counts as two pauses at most.
        passed = min(now - self._checked_at, 2 * self._pause)
        self._checked_at = now
        self._timer = self._next_check()
        pending_answers = [instance.pending_answers() for instance, _ in self._instances]
        is_due = any(one.batch or one.open_requests for one in pending_answers)
        process = self._process_state() if is_due else ProcessState()
        for (instance, silence), one in zip(self._instances, pending_answers, strict=True):
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
    """Read the state of a process from the kernel (proc(5), status)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return ProcessState()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return ProcessState(fields.get("State", "").strip().startswith("T"), fields.get("TracerPid", "0").strip() != "0")
