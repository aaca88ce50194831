"""Keeps workers within their bounds of memory and tasks: checks the processes of each, and ends a worker that exceeds a
bound, with all its processes. For a cgroup, which few servers may make (control_groups.py), the kernel enforces bounds,
and a check only reads the kernel's counters. The kernel's limits for a process (RLIMIT_AS) count memory that engines
only reserve, and those for a user (RLIMIT_NPROC) count other models' processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.workers.control_groups import ControlGroup
from rocserve.workers.process import WorkerProcess

_POLL_SECONDS = 0.1
"""Between two checks, memory grows by some hundred megabytes, and processes by some hundred."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as /proc shows it."""

    pid: int
    parent: int
    group: int
    tasks: int
    """Threads; a process with one thread counts as one."""
    start_time: int
    """Distinguishes the process from a later one with the same number."""
    is_zombie: bool


@dataclass(slots=True, eq=False)
class _Watched:
    """A worker whose memory and tasks are bounded by checks."""

    worker: WorkerProcess
    memory_bytes: int
    tasks: int
    known_processes: set[tuple[int, int]] = field(default_factory=set)
    """Number and start time of each process at the last check; kept even if the process's parent has ended."""
    is_killed: bool = False


class ResourceWatch:
    """Checks all workers of a server that have bounds. Lives on the asyncio loop; idle while there are none."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._grouped: dict[ControlGroup, WorkerProcess | None] = {}
        """Workers whose bounds the kernel enforces; None = the cgroup's processes must end."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, worker: WorkerProcess, memory_bytes: int, tasks: int) -> None:
        """Watch a worker until it ends; 0 = no bound."""
        if memory_bytes or tasks:
            self._watched.append(_Watched(worker, memory_bytes, tasks))
            self._check_later()

    def add_grouped(self, group: ControlGroup, worker: WorkerProcess | None) -> None:
        """Watch a worker until it ends, then remove its cgroup; None = end all processes in it at the next check."""
        self._grouped[group] = worker
        self._check_later()

    async def close(self) -> None:
        """End the watch. All workers must have been stopped."""
        self._watched.clear()
        self._grouped = dict.fromkeys(self._grouped)
        # Killed processes take a moment to end.
        for _ in range(10):
            self._check_groups()
            if not self._grouped:
                break
            await asyncio.sleep(_POLL_SECONDS)
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self, rest_seconds: float = 0.0) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(_POLL_SECONDS, rest_seconds), self._check)

    def _check(self) -> None:
        began = time.monotonic()
        self._timer = None
        self._check_groups()
        if self._watched:
            # A server without a free descriptor cannot check now, but perhaps the next time.
            with suppress(OSError):
                processes = read_processes()
                self._watched = [watched for watched in self._watched if self._check_worker(watched, processes)]
        if self._watched or self._grouped:
            # A twentieth of the time at most: a check takes long if there are thousands of processes.
            self._check_later((time.monotonic() - began) * 20)

    def _check_groups(self) -> None:
        for group, worker in list(self._grouped.items()):
            if worker is not None and not worker.has_ended:
                if not (excess := group.excess()):
                    continue
                worker.end_because(excess, exceeds_limit=True)
                self._grouped[group] = None
            # Killed at each check, because a process may enter the cgroup late.
            group.kill()
            if group.remove():
                del self._grouped[group]

    def _check_worker(self, watched: _Watched, processes: Sequence[Process]) -> bool:
        """Returns whether the worker must be checked again."""
        worker = watched.worker
        if worker.has_ended and not watched.is_killed:
            return False
        own = _find_processes(watched, processes)
        if not watched.is_killed and (excess := _excess(watched, own)):
            _stop(watched)
            worker.end_because(excess, exceeds_limit=True)
            watched.is_killed = True
        if watched.is_killed:
            for pid, _ in watched.known_processes:
                _signal(pid, signal.SIGKILL)
        return not worker.has_ended or bool(watched.known_processes)


def _stop(watched: _Watched) -> None:
    """Stop all processes of a worker, until a check finds no new one. A process forked between check and kill may have
    a new session and no parent left; nothing would show that it belongs to the worker. One call stops the worker's
    whole group, because a process that keeps forking and ending would escape every check."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(watched.worker.pid, signal.SIGSTOP)
    stopped: set[tuple[int, int]] = set()
    while new := watched.known_processes - stopped:
        for pid, _ in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
        _find_processes(watched, read_processes())


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _find_processes(watched: _Watched, processes: Sequence[Process]) -> Sequence[Process]:
    """Find the worker's processes: itself, its group, those seen before, and all their descendants."""
    children: Mapping[int, list[Process]] = defaultdict(list)
    for process in processes:
        children[process.parent].append(process)
    leader = 0 if watched.worker.has_ended else watched.worker.pid
    waiting = [
        process
        for process in processes
        if (leader and leader in (process.pid, process.group))
        or (process.pid, process.start_time) in watched.known_processes
    ]
    own: dict[int, Process] = {}
    while waiting:
        process = waiting.pop()
        if process.pid not in own:
            own[process.pid] = process
            waiting += children.get(process.pid, ())
    watched.known_processes = {(process.pid, process.start_time) for process in own.values() if not process.is_zombie}
    return list(own.values())


def _excess(watched: _Watched, own: Sequence[Process]) -> str:
    tasks = sum(process.tasks for process in own)
    if watched.tasks and tasks > watched.tasks:
        return f"limit of {watched.tasks} tasks exceeded (it had {tasks} processes and threads)"
    if watched.memory_bytes:
        pids = [process.pid for process in own]
        used = sum(map(memory_bytes, pids))
        if used > watched.memory_bytes and len(pids) > 1:
            # Memory that a fork shares with its parent was counted twice. Finding the true shares takes longer.
            used = sum(map(share_bytes, pids))
        if used > watched.memory_bytes:
            return f"memory limit of {watched.memory_bytes} bytes exceeded (it had {used})"
    return ""


def memory_bytes(pid: int) -> int:
    """Return a process's memory and swap in bytes, without files; 0 if it has ended."""
    return _sum(pid, "status", ("RssAnon:", "RssShmem:", "VmSwap:")) or 0


def share_bytes(pid: int) -> int:
    """Return a process's memory and swap in bytes, with shared pages divided among their users if that is visible."""
    shares = _sum(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
    return memory_bytes(pid) if shares is None else shares


def _sum(pid: int, file: str, names: tuple[str, ...]) -> int | None:
    """Return the sum, in bytes, of lines such as "Name:   123 kB"; None = the file cannot be read."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        lines = Path(f"/proc/{pid}/{file}").read_text(errors="replace").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
    return None


def read_processes() -> Sequence[Process]:
    found: list[Process] = []
    with os.scandir("/proc") as entries:
        for name in (entry.name for entry in entries if entry.name.isdecimal()):
            # The process may have ended, or belong to another user.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                # Without pathlib, which is slow for thousands of processes.
                descriptor = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    # 1024 bytes: some fifty numbers.
                    line = os.read(descriptor, 1024)
                finally:
                    os.close(descriptor)
                # The name, which may contain anything, ends with the last bracket; proc(5)'s third field follows.
                state, parent, group, *rest = line[line.rindex(b")") + 1 :].split()
                found.append(
                    Process(int(name), int(parent), int(group), int(rest[14]), int(rest[16]), is_zombie=state == b"Z")
                )
    return found
