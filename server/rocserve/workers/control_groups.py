"""Has the kernel keep workers within their bounds, by cgroups (version 2), where the server's own is delegated to it.

A cgroup that hands memory and tasks on to others may hold no process itself, so the server moves into one below it
first, and each worker with a bound gets one beside that: it enters before its program begins, and all that it starts
belongs to it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_CONTROLLERS = frozenset({"memory", "pids"})
_DELEGATION_MARKS = ("trusted.delegate", "user.delegate")
"""The attributes by which systemd marks a cgroup that it leaves to its service. The rights of the files are no mark:
root may write all of them."""
_PROCESSES, _KILL, _CHILDREN = "cgroup.procs", "cgroup.kill", "cgroup.subtree_control"
_SERVER_GROUP = "server"
_SELF = "0"
"""In cgroup.procs: the process that writes it."""


class NotDelegated(Exception):
    """Why the server may make no cgroups, in words."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The cgroup of one worker; 0 = no bound."""

    folder: Path
    memory_bytes: int
    tasks: int

    def excess(self) -> str:
        """By which bound the worker wanted too much, in words; "" = by none."""
        if self.memory_bytes:
            events = _counts(self.folder / "memory.events")
            # Its processes may also have been killed for a limit around it, which counts nothing as its own "oom".
            if events.get("oom") and (events.get("oom_kill") or events.get("oom_group_kill")):
                return f"memory limit of {self.memory_bytes} bytes exceeded"
        # Before Linux 6.11 a limit around it counts here, too.
        if self.tasks and self.was_refused_tasks() and _number(self.folder / "pids.current") >= self.tasks:
            return f"limit of {self.tasks} tasks exceeded"
        return ""

    def was_refused_tasks(self) -> bool:
        """Whether one of its processes could not start another, or a thread."""
        return bool(self.tasks and _counts(self.folder / "pids.events").get("max"))

    def kill(self) -> None:
        """End all its processes, in whatever session they are."""
        with suppress(OSError):
            _write(self.folder / _KILL, "1")

    def remove(self) -> bool:
        """False: there are still processes in it."""
        with suppress(OSError):
            self.folder.rmdir()
        return not self.folder.exists()


class ControlGroups:
    """Those of a server's workers."""

    def __init__(self, folder: Path) -> None:
        """Use `take_delegation`."""
        self.folder = folder
        self._numbers = itertools.count(1)

    def create(self, memory_bytes: int, tasks: int) -> ControlGroup:
        """A cgroup with these bounds, 0 = none, and no process yet. Raises: OSError: the kernel refuses."""
        # The process id: a server that was killed may have left some.
        folder = self.folder / f"worker-{os.getpid()}-{next(self._numbers)}"
        folder.mkdir()
        try:
            if memory_bytes:
                _write(folder / "memory.max", str(memory_bytes))
                # Else what it has too much would be swapped. A kernel without swap has no such file.
                with suppress(FileNotFoundError):
                    _write(folder / "memory.swap.max", "0")
                # Not one process of several, the others waiting for it.
                _write(folder / "memory.oom.group", "1")
            if tasks:
                _write(folder / "pids.max", str(tasks))
        except BaseException:
            folder.rmdir()
            raise
        return ControlGroup(folder, memory_bytes, tasks)

    def left(self) -> list[ControlGroup]:
        """Those that other servers have made."""
        own = f"worker-{os.getpid()}-"
        return [ControlGroup(each, 0, 0) for each in self.folder.glob("worker-*") if not each.name.startswith(own)]


def enter(folder: str) -> None:
    """Move this process into a cgroup. Raises: OSError: the kernel refuses."""
    _write(Path(folder, _PROCESSES), _SELF)


def _move(folder: Path, processes: Set[int]) -> None:
    """This process, and others."""
    for process in (_SELF, *map(str, processes - {os.getpid()})):
        _write(folder / _PROCESSES, process)


def take_delegation(processes: Path = Path("/proc")) -> ControlGroups:
    """Move this process, which is to have no children yet, and its supervisor to where workers' cgroups can be made
    beside them. Raises: NotDelegated: its cgroup is not left to it; nothing has changed."""
    folder = _own_folder(processes)
    for name in _DELEGATION_MARKS:
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                break
    else:
        raise NotDelegated("the server's cgroup is not delegated to it")
    try:
        lacking = _CONTROLLERS.difference((folder / "cgroup.controllers").read_text().split())
        present = {int(pid) for pid in (folder / _PROCESSES).read_text().split()}
        can_kill = (folder / _KILL).exists()
    except OSError as error:
        raise NotDelegated(f"the server's cgroup cannot be read: {error}") from None
    if lacking:
        raise NotDelegated(f"the server's cgroup lacks the controllers {', '.join(sorted(lacking))}")
    if not present <= {os.getpid(), os.getppid()}:
        raise NotDelegated("other processes are in the server's cgroup")
    if not can_kill:
        raise NotDelegated("the kernel is older than Linux 5.14")
    server = folder / _SERVER_GROUP
    try:
        server.mkdir(exist_ok=True)
        _move(server, present)
        _write(folder / _CHILDREN, " ".join(f"+{name}" for name in sorted(_CONTROLLERS)))
    except OSError as error:
        with suppress(OSError):
            _move(folder, present)
            server.rmdir()
        raise NotDelegated(f"the server cannot make cgroups: {error}") from None
    return ControlGroups(folder)


def _own_folder(processes: Path) -> Path:
    """Of this process' cgroup. Raises: NotDelegated: there is none to be seen."""
    try:
        groups = (processes / "self/cgroup").read_text().splitlines()
        mounts = (processes / "self/mountinfo").read_text().splitlines()
    except OSError as error:
        raise NotDelegated(f"cgroups are not to be seen here: {error}") from None
    group = next((line.removeprefix("0::") for line in groups if line.startswith("0::")), "")
    for words in map(str.split, mounts):
        # proc(5): the root within the file system, the mount point; behind a dash the file system's type.
        path, root = PurePosixPath(group), words[3]
        if words[words.index("-") + 1] == "cgroup2" and path.is_relative_to(root) and ".." not in path.parts:
            folder = Path(words[4]) / path.relative_to(root)
            if folder.is_dir():
                return folder
    raise NotDelegated("no cgroup of version 2 is to be seen here")


def _write(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _counts(file: Path) -> Mapping[str, int]:
    """Of lines "name 3"; empty where there are none."""
    with suppress(OSError):
        return {name: int(count) for name, count in map(str.split, file.read_text().splitlines())}
    return {}


def _number(file: Path) -> int:
    with suppress(OSError):
        return int(file.read_text())
    return 0
