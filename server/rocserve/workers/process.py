"""The server's side of one worker process: its end, and why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING

from rocserve.workers.control_groups import ControlGroup
from rocserve.workers.worker_output import WorkerOutput

if TYPE_CHECKING:
    from rocserve.workers.session import WorkerSession

STATUS_WAIT_SECONDS = 1.0
"""A worker that has closed its socket is about to end; if it does not, it is ended."""


class WorkerProcess:
    """Serves one model version, or those of a group that share it. Lives on the asyncio loop."""

    def __init__(
        self,
        pid: int,
        pidfd: int | None,
        reception: socket.socket,
        output: WorkerOutput,
        group: ControlGroup | None = None,
        group_name: str = "",
    ) -> None:
        """`reception`: by it the process gets the sockets of its sessions. `group`: its cgroup, where it has one of its
        own. `group_name`: of the models that share it."""
        self.pid = pid
        self.reception = reception
        self.group_name = group_name
        self.sessions: list[WorkerSession] = []
        self._pidfd = pidfd
        self._group = group
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._is_killed = False
        self._end = ""
        self._broken = ""
        self._fault = ""
        self._status_timer: asyncio.TimerHandle | None = None

    @property
    def title(self) -> str:
        """What it is called in what others are told."""
        return f"shared worker '{self.group_name}'" if self.group_name else "worker"

    @property
    def reason(self) -> str:
        """How it ended, "killed by signal 9", "exited with status 3", and, where that is known, why."""
        end = self._end or "no exit status"
        return f"{self._broken}; {end}" if self._broken else end

    @property
    def fate(self) -> str:
        """Its end, as it is told to others."""
        return f"was killed: {self._fault}" if self._fault else f"ended unexpectedly ({self.reason})"

    @property
    def last_words(self) -> str:
        """What it wrote last, to stand behind the reason of its end."""
        line = self._output.last_line
        return f"; it last wrote: {line}" if line else ""

    @property
    def has_ended(self) -> bool:
        return self._exited.is_set()

    @property
    def takes_sessions(self) -> bool:
        """Whether it goes on."""
        return not self._is_killed and not self._exited.is_set()

    async def wait_killed(self) -> None:
        """Until it has ended, after `kill`."""
        try:
            async with asyncio.timeout(STATUS_WAIT_SECONDS):
                await self._exited.wait()
        except TimeoutError:
            self.has_exited(None)  # Nothing survives SIGKILL; it is the zygote that is stuck.

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._exited.is_set():
            return
        self._is_killed = True
        kill(self.pid, self._pidfd)

    def end_for(self, reason: str) -> None:
        """It does what it may not, or not what it should: kill it."""
        self._fault = reason
        self.break_off(reason)

    def break_off(self, reason: str) -> None:
        """It talks nonsense, or not at all: kill it."""
        self._broken = reason
        self.kill()
        self._status_timer = self._loop.call_later(STATUS_WAIT_SECONDS, self.has_exited, None)

    def zygote_gone(self) -> None:
        """Nobody will tell of its end any more, nor end what it leaves behind: watch for it."""
        if self._exited.is_set():
            return
        if self._pidfd is None:
            self.kill()
            self._exited_alone()
        else:
            self._loop.add_reader(self._pidfd, self._exited_alone)

    def _exited_alone(self) -> None:
        """Without the zygote, which would have ended its process group. The group's number is no other's as long as one
        of its processes is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.has_exited(None)

    def has_exited(self, wait_status: int | None) -> None:
        """It is gone; None = nobody knows how."""
        if self._exited.is_set():
            return
        self._end = _describe(wait_status)
        if self._group is not None:
            self._end_group(self._group)
        if self._status_timer is not None:
            self._status_timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.reception.close()
        self._output.close()
        self._exited.set()
        for session in list(self.sessions):
            session.end()

    def _end_group(self, group: ControlGroup) -> None:
        """Tell what the kernel has ended it for, and end what it leaves behind."""
        if not self._fault and (excess := group.excess()):
            self._fault = self._broken = excess
        elif not self._fault and group.was_refused_tasks():
            self._end += f"; it was refused more than {group.tasks} tasks"
        group.kill()


def kill(pid: int, pidfd: int | None) -> None:
    """Kills a worker that the zygote has not yet told the end of; by its pidfd where there is one."""
    with contextlib.suppress(ProcessLookupError):
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _describe(wait_status: int | None) -> str:
    if wait_status is None:
        return "its exit status is not known"
    code = os.waitstatus_to_exitcode(wait_status)
    return f"killed by signal {-code}" if code < 0 else f"exited with status {code}"
