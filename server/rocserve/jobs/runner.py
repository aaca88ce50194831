"""Runs a job in a child process, watches it, and kills it after a timeout. Compiling, loading a program from a file and
running it for the first time may take hours, abort, or hang. So a child process does each of these first, and a process
that answers requests only after that."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

from rocserve.cache.temporary_folder import temporary_folder
from rocserve.core.errors import StatusCode
from rocserve.core.plain import from_json, to_json
from rocserve.core.printable import printable, printable_line
from rocserve.jobs.hints import with_hint
from rocserve.jobs.messages import Job, JobError, JobOrder, JobReply


class JobOutput:
    """Reads the output of a child process. Used on one thread at a time."""

    def __init__(self) -> None:
        memory = os.memfd_create("rocserve:job", os.MFD_CLOEXEC)
        try:
            # Opened again to append: after the file has been emptied, the child's writes still go to its end.
            self.descriptor = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        finally:
            os.close(memory)
        self._read = 0
        self._begun = b""
        self.last_lines: deque[str] = deque(maxlen=12)
        """The last 12 lines that are not empty."""

    def take_lines(self, *, ended: bool = False) -> list[str]:
        """Return the lines since the last call; with `ended`, also a last line without a newline."""
        lines = []
        output_bytes = 256 * 1024
        longest_line = 2000
        while data := os.pread(self.descriptor, output_bytes, self._read):
            self._read += len(data)
            *complete, self._begun = (self._begun + data).split(b"\n")
            lines += complete
            if len(self._begun) > output_bytes:
                self._begun = self._begun[:longest_line]
        # An engine's traces may have gigabytes.
        if self._read > 16 << 20:
            os.ftruncate(self.descriptor, 0)
            self._read = 0
        if ended:
            lines.append(self._begun)
            self._begun = b""
        readable = [printable_line(line, longest_line) for line in lines if line.strip()]
        self.last_lines.extend(readable)
        return readable

    def close(self) -> None:
        os.close(self.descriptor)


class JobProcess:
    """A child process; leaving the context kills it. Used on one thread, except `kill`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], order: bytes) -> None:
        """Appends the descriptors of replies and parent pipe to `command`. `order`: the child's standard input. Raises
        OSError if the process cannot be started."""
        self._begun = b""
        self._status: int | None = None
        self._lock = threading.Lock()
        self._at_the_end = ExitStack()
        with ExitStack() as on_failure, ExitStack() as once_started:
            on_failure.callback(self._at_the_end.close)
            self.output = JobOutput()
            self._at_the_end.callback(self.output.close)
            self.replies, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._at_the_end.callback(os.close, self.replies)
            once_started.callback(os.close, writer)
            os.set_blocking(writer, True)
            parent_pipe, parent_end = os.pipe2(os.O_CLOEXEC)
            self._at_the_end.callback(os.close, parent_end)
            once_started.callback(os.close, parent_pipe)
            standard_input = os.memfd_create("rocserve:order", os.MFD_CLOEXEC)
            once_started.callback(os.close, standard_input)
            os.pwrite(standard_input, order, 0)
            # A process group, but not a session, within which alone niceness would have an effect (sched(7)).
            self._process = subprocess.Popen(
                [*command, str(writer), str(parent_pipe)],
                stdin=standard_input,
                stdout=self.output.descriptor,
                stderr=self.output.descriptor,
                pass_fds=(writer, parent_pipe),
                env=environment,
                process_group=0,
            )
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self._at_the_end.close()

    @property
    def peak_bytes(self) -> int:
        """Return the child's peak memory so far; 0 after its end."""
        with suppress(OSError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    def take_replies(self) -> list[bytes] | None:
        """Return the new lines; None if the child has closed its replies and will end."""
        try:
            data = os.read(self.replies, 64 * 1024)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._begun = (self._begun + data).split(b"\n")
        return lines

    def kill(self) -> None:
        """Send SIGKILL to the child's process group, which also ends stopped processes."""
        with self._lock:
            if self._status is None:
                # Not reaped yet, so no other process can have its number.
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the child's end and kill its process group. Returns the child's exit status; negative = the number
        of the signal that killed the child."""
        # A child that has closed its replies should end at once.
        deadline = time.monotonic() + 10.0
        pid = self._process.pid
        while self._status is None:
            with self._lock:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    os.killpg(pid, signal.SIGKILL)
                    self._status = self._process.wait()
                    break
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.01)
        return self._status


def describe_end(status: int, last_lines: Iterable[str], peak_bytes: int, who: str) -> str:
    """Describe the end of a child without a last reply, to follow "while compiling: ". `status`: the exit status, or
    the signal's negative number. `who`: the child's name in the text."""
    # The log has the whole output.
    message = "; ".join(line.strip() for line in [*last_lines][-4:])
    if len(message) > 600:
        message = "..." + message[-600:]
    if status == -signal.SIGKILL:
        held = f" (it had {peak_bytes / 2**20:.0f} MiB)" if peak_bytes else ""
        end = f"it was killed by signal 9 (SIGKILL) from outside{held}"
        return f"{end}: {message}" if message else end
    if status < 0:
        name = next((one.name for one in signal.Signals if one == -status), "unknown")
        end = f"{who} ended by signal {-status} ({name})"
    else:
        end = f"the process ended with exit status {status}"
    return f"{end}: {message}" if message else f"{end} without a message"


_FIRST_REPORT_SECONDS = 5.0
"""The time before a job's first report, and between the first two reports of a phase. Later reports are less frequent,
because less changes between them."""


class JobWatch:
    """Reports a job's phase and progress, and logs its output. Created when the job starts."""

    def __init__(
        self,
        title: str,
        report: Callable[[str], None],
        log: logging.Logger,
        engine: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = "starting"
        self._title = title
        self._report = report
        self._log = log
        self._clock = clock
        self._engine = engine
        self._started = clock()
        self._pause = _FIRST_REPORT_SECONDS
        self._next_report = self._started + self._pause
        self._message = ""
        self._lines_left = 500

    @property
    def elapsed_seconds(self) -> float:
        return self._clock() - self._started

    def enter_phase(self, phase: str) -> None:
        self.phase = phase
        self._message = ""
        self._pause = _FIRST_REPORT_SECONDS
        self._next_report = self._clock()
        self.report_when_due()

    def log_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._message = line.strip()
            self._lines_left -= 1
            if self._lines_left > 0:
                is_warning = any(mark in line for mark in ("[WARNING]", "[WARN]", "[ERROR]"))
                self._log.log(logging.WARNING if is_warning else logging.INFO, "%s: %s", self._title, line)
            elif self._lines_left == 0:
                self._log.warning("%s: writes too much; the rest is dropped", self._title)

    def report_when_due(self) -> None:
        now = self._clock()
        if now < self._next_report:
            return
        self._next_report = now + self._pause
        self._pause = min(self._pause * 1.5, 60.0)
        text = f"{self._title}: {self.phase}"
        if self.elapsed_seconds >= 1:
            text += f" ({_duration(self.elapsed_seconds)} so far)"
        if self._message:
            text += f"; {self._engine}: {self._message[:160]}"
        self._report(text)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


Result = TypeVar("Result")

TEMPORARY_PREFIX = "rocserve-job-"
"""Begins the names of the folders for engines' temporary files."""


@dataclass(frozen=True, slots=True)
class JobEngine:
    """The program that runs the jobs of an engine."""

    name: str
    child: str = "rocserve.jobs.child"
    """The module that the child process runs."""
    python: tuple[str, ...] = (sys.executable,)
    """The command that starts Python in the child process."""
    context: str = ""
    """JSON for the module: the resources to open before it runs a job."""
    with_hint: Callable[[str], str] = with_hint


class JobRunner:
    """Runs jobs, each on the caller's thread. `call_off` is safe on any thread."""

    def __init__(self, engine: JobEngine, report: Callable[[str], None], log: logging.Logger) -> None:
        """`report` gets lines about a job's progress; `log` gets the engine's output."""
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
        environment: Mapping[str, str] = MappingProxyType({}),
        limit_name: str = "compile_timeout_secs",
        remedy: str = "",
        report: Callable[[str], None] | None = None,
    ) -> Result:
        """Run a job and return its result. `timeout_seconds`: 0 = none; its error suggests to raise the limit
        `limit_name`, or `remedy`. `environment` is added to this process's environment. Raises JobError."""
        watch = JobWatch(job.title, report or self.report, self._log, self._engine.name)
        failed = f"{job.title} failed while"
        with (
            _temporary_folder(job.title) as temporary,
            self._start(job, low_priority, {**environment, "TMPDIR": temporary}) as process,
        ):
            try:
                reply, peak_bytes = _follow(process, watch, timeout_seconds)
                if reply is None:
                    raise JobError(
                        StatusCode.UNAVAILABLE,
                        f"{job.title} took longer than {limit_name} ({timeout_seconds:g} s) and was stopped while"
                        f" {watch.phase}; raise {limit_name} (0 = no limit){f', or {remedy}' if remedy else ''}",
                    )
                status = process.wait()
                watch.log_lines(process.output.take_lines(ended=True))
                if reply.failure is not None:
                    error = JobError(StatusCode(reply.code), f"{failed} {watch.phase}: {printable(reply.failure)}")
                    raise error.passing() if reply.can_pass else error.lasting()
                if reply.result is None:
                    end = describe_end(status, process.output.last_lines, peak_bytes, self._engine.name)
                    text = f"{failed} {watch.phase}: {printable(self._engine.with_hint(end))}"
                    # A child that dies before its work begins shows a fault of the installation, not of the job.
                    # SIGKILL comes from outside, for example from the kernel when memory runs out.
                    is_crash = watch.phase != "starting" and status != -signal.SIGKILL
                    raise JobError(StatusCode.UNAVAILABLE, text, is_crash)
            except JobError:
                self.check_called_off(job.title)
                raise
            finally:
                with self._lock:
                    self._running.discard(process)
        return from_json(result_type, reply.result.encode())

    def run_check(self, job: Job, result_type: type[Result], seconds: float) -> Result:
        """Run a job of the load check, which has this time. The process may take a minute more to start, to import its
        engine and to open the model. Raises JobError."""
        return self.run(job, result_type, timeout_seconds=seconds + 60, limit_name="load_check_seconds")

    def call_off(self) -> None:
        """Kill all running jobs and refuse new ones."""
        with self._lock:
            self._called_off = True
            for process in self._running:
                process.kill()

    def check_called_off(self, title: str) -> None:
        """Raises JobError after `call_off`."""
        if self._called_off:
            raise JobError(StatusCode.CANCELLED, f"{title} was called off")

    def _start(self, job: Job, low_priority: bool, environment: Mapping[str, str]) -> JobProcess:
        kind = type(job)
        order = JobOrder(self._engine.context, to_json(job).decode(), low_priority)
        # -P: modules in the working directory must not hide Python's own.
        command = [*self._engine.python, "-P", "-m", self._engine.child, kind.__module__, kind.__name__]
        with self._lock:
            self.check_called_off(job.title)
            try:
                process = JobProcess(command, {**os.environ, **environment}, to_json(order))
            except OSError as error:
                text = f"{job.title} failed: no process could be started: {error}"
                raise JobError(StatusCode.INTERNAL, text) from error
            self._running.add(process)
        return process


@contextmanager
def _temporary_folder(title: str) -> Iterator[str]:
    """Yield a folder for the child's temporary files, and remove it with the engine's leftovers: MIGraphX (2.15 and
    later) leaves a program with all its weights when a compile fails. Raises JobError."""
    with ExitStack() as at_the_end:
        try:
            folder = at_the_end.enter_context(temporary_folder(TEMPORARY_PREFIX))
        except OSError as error:
            text = f"{title} failed: no temporary folder could be made: {error}"
            raise JobError(StatusCode.UNAVAILABLE, text) from None
        yield str(folder)


def _follow(process: JobProcess, watch: JobWatch, timeout_seconds: float) -> tuple[JobReply | None, int]:
    """Return the child's last reply and its peak memory. The reply is None if the child took too long and
    was killed."""
    last, peak_bytes = JobReply(), 0
    poll = select.poll()
    poll.register(process.replies, select.POLLIN)
    while True:
        poll.poll(250)
        replies = process.take_replies()
        watch.log_lines(process.output.take_lines())
        if replies is None:
            return last, peak_bytes
        for line in replies:
            last = from_json(JobReply, line)
            if last.phase is not None:
                watch.enter_phase(last.phase)
        watch.report_when_due()
        peak_bytes = max(peak_bytes, process.peak_bytes)
        if 0 < timeout_seconds <= watch.elapsed_seconds:
            process.kill()
            return None, peak_bytes
