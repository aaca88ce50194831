"""Does a job in a child process, watches it and ends it when it takes too long.

Compiling, loading a program from a file and running it for the first time may take hours, abort or never come back.
The process that answers requests never does any of it before a child has.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rocserve.core.errors import StatusCode
from rocserve.core.plain import from_json, to_json
from rocserve.core.printable import printable
from rocserve.jobs.hints import with_hint
from rocserve.jobs.messages import FailureKind, Job, JobError, JobOrder, JobReply
from rocserve.jobs.process import JobProcess, describe_end

_FIRST_REPORT_SECONDS = 5.0
"""Within a phase. The next ones come more and more rarely, as each differs less from the one before."""
_RAREST_REPORT_SECONDS = 60.0
_REPORT_GROWTH = 1.5
_LONGEST_MESSAGE = 160
_START = "starting"
_MOST_LINES = 500
"""Of one job in the log."""


class JobWatch:
    """What one job is at. Made when it starts."""

    def __init__(
        self,
        title: str,
        report: Callable[[str], None],
        log: logging.Logger,
        engine: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = _START
        self._title = title
        self._report = report
        self._log = log
        self._clock = clock
        self._engine = engine
        self._started = clock()
        self._pause = _FIRST_REPORT_SECONDS
        self._next_report = self._started + self._pause
        self._message = ""
        self._lines_left = _MOST_LINES

    @property
    def elapsed_seconds(self) -> float:
        return self._clock() - self._started

    def enters(self, phase: str) -> None:
        self.phase = phase
        self._message = ""
        self._pause = _FIRST_REPORT_SECONDS
        self._next_report = self._clock()
        self.report_when_due()

    def takes_lines(self, lines: Sequence[str]) -> None:
        """What the engine wrote."""
        for line in lines:
            self._message = line.strip()
            self._lines_left -= 1
            if self._lines_left > 0:
                level = logging.WARNING if "[WARNING]" in line or "[ERROR]" in line else logging.INFO
                self._log.log(level, "%s: %s", self._title, line)
            elif self._lines_left == 0:
                self._log.warning("%s: writes very much; the rest is left out", self._title)

    def report_when_due(self) -> None:
        """Report, where it is time again."""
        now = self._clock()
        if now < self._next_report:
            return
        self._next_report = now + self._pause
        self._pause = min(self._pause * _REPORT_GROWTH, _RAREST_REPORT_SECONDS)
        text = f"{self._title}: {self.phase}"
        if self.elapsed_seconds >= 1:
            text += f" ({_duration(self.elapsed_seconds)} so far)"
        if self._message:
            text += f"; {self._engine}: {self._message[:_LONGEST_MESSAGE]}"
        self._report(text)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


Result = TypeVar("Result")

_CHILD = "rocserve.jobs.child"
_POLL_SECONDS = 0.25
"""How often what the child has written is read, and the time checked."""
_NO_VARIABLES: Mapping[str, str] = {}
_LIMIT = "compile_timeout_secs"


@dataclass(frozen=True, slots=True)
class JobEngine:
    """What all jobs with an engine have in common."""

    name: str
    child: str = "rocserve.jobs.child"
    """The module that a child process runs."""
    python: tuple[str, ...] = (sys.executable,)
    """The words that start Python there."""
    context: str = ""
    """What that module opens before it does a job, as JSON."""
    with_hint: Callable[[str], str] = with_hint
    """What the engine said, with what to do about it."""


class JobRunner:
    """Runs jobs, each in the thread that calls; `call_off` from any."""

    def __init__(self, engine: JobEngine, report: Callable[[str], None], log: logging.Logger) -> None:
        """`report` takes what a job is at, as a line; `log` what the engine writes."""
        self.report = report
        self._engine = engine
        self._log = log
        self._lock = threading.Lock()
        self._running: set[JobProcess] = set()
        self._called_off = False

    def run(
        self,
        job: Job,
        result_type: type[Result],
        *,
        timeout_seconds: float,
        low_priority: bool = False,
        environment: Mapping[str, str] = _NO_VARIABLES,
        limit_name: str = _LIMIT,
        remedy: str = "",
        report: Callable[[str], None] | None = None,
    ) -> Result:
        """What the job's `perform` returned. `timeout_seconds`: 0 = no limit. `environment` is set on top of this
        process's. `limit_name` is what an operator calls the limit, `remedy` what else than raising it helps. `report`:
        instead of the runner's. Raises: JobError: why not; its `kind` says of what kind that is."""
        watch = JobWatch(job.title, report or self.report, self._log, self._engine.name)
        failed = f"{job.title} failed while"
        with self._start(job, low_priority, environment) as process:
            try:
                reply, peak_bytes = _follow(process, watch, timeout_seconds)
                if reply is None:
                    raise JobError(
                        FailureKind.TIMED_OUT,
                        StatusCode.UNAVAILABLE,
                        f"{job.title} took longer than {limit_name} ({timeout_seconds:g} s) and was stopped while"
                        f" {watch.phase}; raise {limit_name} (0 = no limit){f', or {remedy}' if remedy else ''}",
                    )
                status = process.wait()
                watch.takes_lines(process.output.take_lines(ended=True))
                if (failure := reply.failure) is not None:
                    text = f"{failed} {watch.phase}: {printable(failure.text)}"
                    raise JobError(failure.kind, StatusCode(failure.code), text)
                if reply.result is None:
                    end = describe_end(status, process.output.last_lines, peak_bytes, self._engine.name)
                    text = f"{failed} {watch.phase}: {printable(self._engine.with_hint(end))}"
                    raise JobError(_kind_of_end(status, watch), StatusCode.UNAVAILABLE, text)
            except JobError:
                self.check_called_off(job.title)
                raise
            finally:
                with self._lock:
                    self._running.discard(process)
        return from_json(result_type, reply.result.encode())

    def call_off(self) -> None:
        """End what runs and refuse what comes."""
        with self._lock:
            self._called_off = True
            for process in self._running:
                process.kill()

    def check_called_off(self, title: str) -> None:
        """Raises: JobError: `call_off` has been called."""
        if self._called_off:
            raise JobError(FailureKind.CALLED_OFF, StatusCode.CANCELLED, f"{title} was called off")

    def _start(self, job: Job, low_priority: bool, environment: Mapping[str, str]) -> JobProcess:
        kind = type(job)
        order = JobOrder(self._engine.context, to_json(job).decode(), low_priority)
        # -P: modules of the working directory do not come before Python's own.
        command = [*self._engine.python, "-P", "-m", self._engine.child, kind.__module__, kind.__name__]
        with self._lock:
            self.check_called_off(job.title)
            try:
                process = JobProcess(command, {**os.environ, **environment}, to_json(order))
            except OSError as error:
                raise JobError(
                    FailureKind.BROKEN, StatusCode.INTERNAL, f"{job.title} failed: no process could be started: {error}"
                ) from error
            self._running.add(process)
        return process


def _follow(process: JobProcess, watch: JobWatch, timeout_seconds: float) -> tuple[JobReply | None, int]:
    """The child's last reply, once it replies no more, and the most memory that it had. The reply is None where the
    child took too long and was killed."""
    last, peak_bytes = JobReply(), 0
    poll = select.poll()
    poll.register(process.replies, select.POLLIN)
    while True:
        poll.poll(_POLL_SECONDS * 1000)
        replies = process.take_replies()
        watch.takes_lines(process.output.take_lines())
        if replies is None:
            return last, peak_bytes
        for line in replies:
            last = from_json(JobReply, line)
            if last.phase is not None:
                watch.enters(last.phase)
        watch.report_when_due()
        peak_bytes = max(peak_bytes, process.peak_bytes)
        if 0 < timeout_seconds <= watch.elapsed_seconds:
            process.kill()
            return None, peak_bytes


def _kind_of_end(status: int, watch: JobWatch) -> FailureKind:
    if status == -signal.SIGKILL:
        return FailureKind.KILLED
    # Before its work begins the job is not to blame, but the installation.
    return FailureKind.BROKEN if watch.phase == _START else FailureKind.CRASHED
