"""Keeps workers within their memory and their number of tasks: checks the processes of each, and ends a worker that
has more, with all that it has started.

The kernel does this by itself only for a cgroup, which few servers may make (control_groups.py); there a check is only
for what it has refused. Its limits of a process (RLIMIT_AS) count what engines reserve, and those of a user
(RLIMIT_NPROC) what other models have.
"""

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
"""Between two checks: memory grows by some hundred megabytes meanwhile, processes by some hundred."""
_WAIT_PER_CHECK = 20
"""A check that took long, among thousands of processes, is followed by this many times its time of rest."""
_LAST_CHECKS = 10
"""At the end of the server: what was killed takes a moment to end."""
_LONGEST_STAT = 1024
"""Bytes of /proc/PID/stat: some fifty numbers."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    group: int
    tasks: int
    """Processes and threads: one for each of its threads."""
    started: int
    """With the number, it distinguishes a process from a later one of the same number."""
    is_zombie: bool


@dataclass(slots=True, eq=False)
class _Watched:
    worker: WorkerProcess
    memory_bytes: int
    tasks: int
    known: set[tuple[int, int]] = field(default_factory=set)
    """Its processes at the last check, by number and start: they stay its own when their parents end."""
    is_over: bool = False


class ResourceWatch:
    """All workers of a server that have bounds. Lives on the asyncio loop, costs nothing while there are none."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._grouped: dict[ControlGroup, WorkerProcess | None] = {}
        """Workers that the kernel keeps within their bounds; None: nobody waits for it any more."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, worker: WorkerProcess, memory_bytes: int, tasks: int) -> None:
        """Watch a worker until it ends; 0 = no bound."""
        if memory_bytes or tasks:
            self._watched.append(_Watched(worker, memory_bytes, tasks))
            self._check_later()

    def add_grouped(self, group: ControlGroup, worker: WorkerProcess | None) -> None:
        """Watch a worker in a cgroup of its own until it ends, and remove that; None = end its processes now."""
        self._grouped[group] = worker
        self._check_later()

    async def close(self) -> None:
        """The workers are to have been stopped."""
        self._watched.clear()
        self._grouped = dict.fromkeys(self._grouped)
        for _ in range(_LAST_CHECKS):
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
            # A server without a free descriptor cannot check; it may have one again the next time.
            with suppress(OSError):
                processes = read_processes()
                self._watched = [watched for watched in self._watched if self._goes_on(watched, processes)]
        if self._watched or self._grouped:
            self._check_later((time.monotonic() - began) * _WAIT_PER_CHECK)

    def _check_groups(self) -> None:
        for group, worker in list(self._grouped.items()):
            if worker is not None and not worker.has_ended:
                if not (excess := group.excess()):
                    continue
                worker.end_for(excess)
                self._grouped[group] = None
            # Each time: what was about to enter may be in it only now.
            group.kill()
            if group.remove():
                del self._grouped[group]

    def _goes_on(self, watched: _Watched, processes: Sequence[Process]) -> bool:
        """Whether a worker is to be checked again."""
        worker = watched.worker
        if worker.has_ended and not watched.is_over:
            return False
        own = _own(watched, processes)
        if not watched.is_over and (excess := _excess(watched, own)):
            _stop(watched)
            worker.end_for(excess)
            watched.is_over = True
        if watched.is_over:
            for pid, _ in watched.known:
                _signal(pid, signal.SIGKILL)
        return not worker.has_ended or bool(watched.known)


def _stop(watched: _Watched) -> None:
    """Stops a worker and all that it has started, until a check finds no new process: a fork between the check and the
    kill has a session of its own perhaps, no parent any more, and could not be distinguished from other processes. The
    worker's group is stopped as one, which no fork escapes: one that lives on in ever new processes is ahead of a
    check."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(watched.worker.pid, signal.SIGSTOP)
    stopped: set[tuple[int, int]] = set()
    while new := watched.known - stopped:
        for pid, _ in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
        _own(watched, read_processes())


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _own(watched: _Watched, processes: Sequence[Process]) -> Sequence[Process]:
    """Note the worker's processes: itself, its group, what it was seen to have, and all that these have started."""
    children: Mapping[int, list[Process]] = defaultdict(list)
    for process in processes:
        children[process.parent].append(process)
    leader = 0 if watched.worker.has_ended else watched.worker.pid
    waiting = [
        process
        for process in processes
        if (leader and leader in (process.pid, process.group)) or (process.pid, process.started) in watched.known
    ]
    own: dict[int, Process] = {}
    while waiting:
        process = waiting.pop()
        if process.pid not in own:
            own[process.pid] = process
            waiting += children.get(process.pid, ())
    watched.known = {(process.pid, process.started) for process in own.values() if not process.is_zombie}
    return list(own.values())


def _excess(watched: _Watched, own: Sequence[Process]) -> str:
    """By which bound a worker has too much, in words; "" = by none."""
    tasks = sum(process.tasks for process in own)
    if watched.tasks and tasks > watched.tasks:
        return f"limit of {watched.tasks} tasks exceeded (it had {tasks} processes and threads)"
    if watched.memory_bytes:
        pids = [process.pid for process in own]
        used = sum(map(memory_bytes, pids))
        if used > watched.memory_bytes and len(pids) > 1:
            # What a fork shares with its parent has been counted for each. The true shares take longer to find.
            used = sum(map(share_bytes, pids))
        if used > watched.memory_bytes:
            return f"memory limit of {watched.memory_bytes} bytes exceeded (it had {used})"
    return ""


def memory_bytes(pid: int) -> int:
    """What a process has of memory and of swap, files left out; 0 when it has ended."""
    return _sum(pid, "status", ("RssAnon:", "RssShmem:", "VmSwap:")) or 0


def share_bytes(pid: int) -> int:
    """The same with pages that several processes have divided between them; without, where only root may see that."""
    shares = _sum(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
    return memory_bytes(pid) if shares is None else shares


def _sum(pid: int, file: str, names: tuple[str, ...]) -> int | None:
    """In bytes, of lines "Name:   123 kB"; None = they cannot be seen."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        lines = Path(f"/proc/{pid}/{file}").read_text(errors="replace").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
    return None


def read_processes() -> Sequence[Process]:
    """All that this machine, or this container, shows."""
    found: list[Process] = []
    with os.scandir("/proc") as entries:
        for name in (entry.name for entry in entries if entry.name.isdecimal()):
            # It may have ended meanwhile, or be none of ours to see.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                # Not by pathlib: there may be thousands.
                descriptor = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    line = os.read(descriptor, _LONGEST_STAT)
                finally:
                    os.close(descriptor)
                # Behind the bracket that ends the name, which may hold anything, stand proc(5)'s fields from the third.
                state, parent, group, *rest = line[line.rindex(b")") + 1 :].split()
                found.append(
                    Process(int(name), int(parent), int(group), int(rest[14]), int(rest[16]), is_zombie=state == b"Z")
                )
    return found
