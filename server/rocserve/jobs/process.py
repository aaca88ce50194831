"""A job's child process as its parent holds it: started with nothing of the parent's, ended with all it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from rocserve.core.printable import printable

_OUTPUT_BYTES = 256 * 1024
_MOST_KEPT_BYTES = 16 << 20
"""The file is emptied beyond this; an engine's traces may run to gigabytes."""
_LONGEST_LINE = 2000
_KEPT_LINES = 12


class JobOutput:
    """Reads what one child writes. One thread at a time."""

    def __init__(self) -> None:
        memory = os.memfd_create("rocserve:job", os.MFD_CLOEXEC)
        try:
            # Opened anew to append: writing then goes on at the end also after the file has been emptied.
            self.descriptor = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        finally:
            os.close(memory)
        self._read = 0
        self._begun = b""
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def last_lines(self) -> Sequence[str]:
        """The last that were not empty."""
        return tuple(self._last)

    def take_lines(self, *, ended: bool = False) -> list[str]:
        """The lines that have come since; with `ended` also one without an end."""
        lines = []
        while data := os.pread(self.descriptor, _OUTPUT_BYTES, self._read):
            self._read += len(data)
            *complete, self._begun = (self._begun + data).split(b"\n")
            lines += complete
            if len(self._begun) > _OUTPUT_BYTES:
                self._begun = self._begun[:_LONGEST_LINE]
        if self._read > _MOST_KEPT_BYTES:
            os.ftruncate(self.descriptor, 0)
            self._read = 0
        if ended:
            lines.append(self._begun)
            self._begun = b""
        readable = [
            printable(line[:_LONGEST_LINE].decode("utf-8", "backslashreplace").rstrip())
            + (" ... (cut)" if len(line) > _LONGEST_LINE else "")
            for line in lines
            if line.strip()
        ]
        self._last.extend(readable)
        return readable

    def close(self) -> None:
        os.close(self.descriptor)


_END_SECONDS = 10.0
"""A child that has said its last word and does not end is ended."""
_POLL_SECONDS = 0.01
_READ_BYTES = 64 * 1024


class JobProcess:
    """A context: the child is gone when it is left. One thread; `kill` from any."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], order: bytes | None = None) -> None:
        """`command` is followed by the descriptors for replies and the parent's pipe. `order`: the child's standard
        input; None = what `send` sends. Raises: OSError: it cannot be started."""
        self.output = JobOutput()
        self._begun = b""
        self._status: int | None = None
        self._lock = threading.Lock()
        self.replies, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writer, True)
        parent_pipe, self._parent_pipe = os.pipe2(os.O_CLOEXEC)
        self._orders: int | None = None
        if order is None:
            standard_input, self._orders = os.pipe2(os.O_CLOEXEC)
        else:
            standard_input = os.memfd_create("rocserve:order", os.MFD_CLOEXEC)
            os.pwrite(standard_input, order, 0)
        try:
            # A group, not a session: in a session, niceness would only count among its own processes (sched(7)).
            self._process = subprocess.Popen(
                [*command, str(writer), str(parent_pipe)],
                stdin=standard_input,
                stdout=self.output.descriptor,
                stderr=self.output.descriptor,
                pass_fds=(writer, parent_pipe),
                env=environment,
                process_group=0,
            )
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in (writer, parent_pipe, standard_input):
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self._close()

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has had so far; 0 once it has ended."""
        return peak_bytes(self._process.pid)

    def send(self, order: bytes) -> None:
        """One more line for the child. Raises: BrokenPipeError: it has ended."""
        assert self._orders is not None, "the order was given at the start"
        order += b"\n"
        while order:
            order = order[os.write(self._orders, order) :]

    def take_replies(self) -> list[bytes] | None:
        """The lines that have come; None when there are no more and the child is about to end."""
        try:
            data = os.read(self.replies, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._begun = (self._begun + data).split(b"\n")
        return lines

    def kill(self) -> None:
        """SIGKILL to it and to all that it has started, also where they are stopped."""
        with self._lock:
            if self._status is None:
                # Not reaped yet, so its number is surely its own.
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Until it has ended, which it is about to do; what it has left behind ends then. The exit status; below 0,
        less the number of the signal that ended it."""
        deadline = time.monotonic() + _END_SECONDS
        pid = self._process.pid
        while self._status is None:
            with self._lock:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    os.killpg(pid, signal.SIGKILL)
                    self._status = self._process.wait()
                    break
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(_POLL_SECONDS)
        return self._status

    def _close(self) -> None:
        for descriptor in (self.replies, self._parent_pipe, self._orders):
            if descriptor is not None:
                os.close(descriptor)
        self.output.close()


_PEAK = "VmHWM:"


def peak_bytes(pid: int | None = None) -> int:
    """Of the process (None = this one), without what the process that started it had; 0 where it is not known. Not from
    getrusage(2), whose maximum a new process inherits."""
    try:
        text = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(_PEAK):
            return int(line.split()[1]) * 1024
    return 0


_MESSAGE_LINES = 4
"""So many of what it wrote last go into an error; all are in the log."""
_LONGEST_MESSAGE = 600


def describe_end(status: int, last_lines: Sequence[str], peak_bytes: int, who: str) -> str:
    """For a child that ended without a word; goes on after "while compiling: ". `status`: the exit status; below 0,
    less the signal's number. `who`: what a signal ended."""
    message = last_words(last_lines)
    if status == -signal.SIGKILL:
        held = f" (it had {peak_bytes / 2**20:.0f} MiB)" if peak_bytes else ""
        end = f"it was killed by signal 9 (SIGKILL) from outside{held}"
        return f"{end}: {message}" if message else end
    if status < 0:
        end = f"{who} ended by signal {-status} ({_signal_name(-status)})"
    else:
        end = f"the process ended with exit status {status}"
    return f"{end}: {message}" if message else f"{end} without a word"


def last_words(lines: Sequence[str]) -> str:
    """What was written last, in one line."""
    message = "; ".join(line.strip() for line in lines[-_MESSAGE_LINES:])
    return message if len(message) <= _LONGEST_MESSAGE else "..." + message[-_LONGEST_MESSAGE:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
