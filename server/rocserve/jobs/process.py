"""A job's child process as its parent holds it: started with nothing of the parent's, ended with all it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

from rocserve.core.plain import from_json
from rocserve.jobs.messages import JobReply
from rocserve.jobs.output import JobOutput
from rocserve.jobs.peak import peak_bytes

_END_SECONDS = 10.0
"""A child that has said its last word and does not end is ended."""
_POLL_SECONDS = 0.01
_READ_BYTES = 64 * 1024


class JobProcess:
    """A context: the child is gone when it is left. One thread; `kill` from any."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], order: bytes) -> None:
        """`command` is followed by the descriptors for replies and lifeline; `order` is the child's standard input.

        Raises:
            OSError: it cannot be started.
        """
        self.output = JobOutput()
        self._begun = b""
        self._status: int | None = None
        self._lock = threading.Lock()
        self.replies, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writer, True)
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        standard_input = os.memfd_create("rocserve:order", os.MFD_CLOEXEC)
        try:
            os.pwrite(standard_input, order, 0)
            # A group, not a session: in a session, niceness would only count among its own processes (sched(7)).
            self._process = subprocess.Popen(
                [*command, str(writer), str(lifeline)],
                stdin=standard_input,
                stdout=self.output.descriptor,
                stderr=self.output.descriptor,
                pass_fds=(writer, lifeline),
                env=environment,
                process_group=0,
            )
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in (writer, lifeline, standard_input):
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

    def take_replies(self) -> list[JobReply] | None:
        """Those that have come; None when there are no more and the child is about to end.

        Raises:
            ValueError: it wrote something else.
        """
        try:
            data = os.read(self.replies, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._begun = (self._begun + data).split(b"\n")
        return [from_json(JobReply, line) for line in lines]

    def kill(self) -> None:
        """SIGKILL to it and to all that it has started, also where they are stopped."""
        with self._lock:
            if self._status is None:
                # Not reaped yet, so its number is surely its own.
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Until it has ended, which it is about to do; what it has left behind ends then.

        The exit status; below 0, less the number of the signal that ended it.
        """
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
        os.close(self.replies)
        os.close(self._lifeline)
        self.output.close()
