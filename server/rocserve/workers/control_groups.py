"""Bounds workers by cgroups (version 2), if the server's own cgroup is delegated to it. A cgroup that bounds memory and
tasks of its children must contain no process, so the server moves into a child cgroup first. Each worker with a bound
gets another child cgroup and enters it before its program begins. All processes that the worker starts stay in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_CONTROLLERS = frozenset({"memory", "pids"})
_PROCESSES, _KILL, _CHILDREN = "cgroup.procs", "cgroup.kill", "cgroup.subtree_control"
_SERVER_GROUP, _WORKER_GROUP = "server", "worker-"


class NotDelegated(Exception):
    """The server may make no cgroups; the text says why."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The cgroup of one worker. A bound of 0 means none."""

    folder: Path
    memory_bytes: int
    tasks: int

    def excess(self) -> str:
        if self.memory_bytes:
            events = _counts(self.folder / "memory.events")
            # "oom_kill" alone may also come from a limit of a cgroup above, which does not raise "oom" here.
            if events.get("oom") and (events.get("oom_kill") or events.get("oom_group_kill")):
                return f"memory limit of {self.memory_bytes} bytes exceeded"
        # Before Linux 6.11, pids.events includes refusals by the limits of cgroups above.
        if self.tasks and self.was_refused_tasks() and _number(self.folder / "pids.current") >= self.tasks:
            return f"limit of {self.tasks} tasks exceeded"
        return ""

    def was_refused_tasks(self) -> bool:
        return bool(self.tasks and _counts(self.folder / "pids.events").get("max"))

    def kill(self) -> None:
        """Kill all processes of the cgroup, even those in other sessions."""
        with suppress(OSError):
            _write(self.folder / _KILL, "1")

    def remove(self) -> bool:
        """Remove the cgroup. Returns False if processes are still in it."""
        with suppress(OSError):
            self.folder.rmdir()
        return not self.folder.exists()


class ControlGroups:
    """Makes the cgroups of a server's workers."""

    def __init__(self, folder: Path) -> None:
        """Use `take_delegation` instead."""
        self.folder = folder
        self._numbers = itertools.count(1)

    def create(self, memory_bytes: int, tasks: int) -> ControlGroup:
        """Make an empty cgroup with these bounds; 0 = no bound. Raises OSError if the kernel refuses."""
        # The process id distinguishes these cgroups from cgroups that a killed server has left.
        folder = self.folder / f"{_WORKER_GROUP}{os.getpid()}-{next(self._numbers)}"
        folder.mkdir()
        try:
            if memory_bytes:
                _write(folder / "memory.max", str(memory_bytes))
                # Otherwise memory above the bound would be swapped. A kernel without swap has no such file.
                with suppress(FileNotFoundError):
                    _write(folder / "memory.swap.max", "0")
                # Kill all processes together: if one of several is killed, the others may wait for it forever.
                _write(folder / "memory.oom.group", "1")
            if tasks:
                _write(folder / "pids.max", str(tasks))
        except BaseException:
            folder.rmdir()
            raise
        return ControlGroup(folder, memory_bytes, tasks)


def enter(folder: str) -> None:
    """Move this process into a cgroup. Raises OSError if the kernel refuses."""
    # 0 = the writing process.
    _write(Path(folder, _PROCESSES), "0")


def take_delegation(processes: Path = Path("/proc")) -> ControlGroups:
    """Move this process, which must have no children yet, into a child cgroup, next to which workers' cgroups can be
    made. Raises NotDelegated if that is not allowed; nothing has changed then."""
    folder = _own_folder(processes)
    # systemd marks a delegated cgroup with these. File permissions do not show it: root may write all files.
    for name in ("trusted.delegate", "user.delegate"):
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
    if not present <= {os.getpid()}:
        raise NotDelegated("other processes are in the server's cgroup")
    if not can_kill:
        raise NotDelegated("the kernel is older than Linux 5.14")
    server = folder / _SERVER_GROUP
    try:
        server.mkdir(exist_ok=True)
        enter(str(server))
        _write(folder / _CHILDREN, " ".join(f"+{name}" for name in sorted(_CONTROLLERS)))
    except OSError as error:
        with suppress(OSError):
            enter(str(folder))
            server.rmdir()
        raise NotDelegated(f"the server cannot make cgroups: {error}") from None
    for left in folder.glob(f"{_WORKER_GROUP}*"):
        # A killed server has left it, empty.
        with suppress(OSError):
            left.rmdir()
    return ControlGroups(folder)


def _own_folder(processes: Path) -> Path:
    """Raises NotDelegated if no cgroup is visible."""
    try:
        groups = (processes / "self/cgroup").read_text().splitlines()
        mounts = (processes / "self/mountinfo").read_text().splitlines()
    except OSError as error:
        raise NotDelegated(f"cgroups cannot be read here: {error}") from None
    group = next((line.removeprefix("0::") for line in groups if line.startswith("0::")), "")
    for words in map(str.split, mounts):
        # proc(5): the root within the file system, the mount point, and after a dash the file system's type.
        path, root = PurePosixPath(group), words[3]
        if words[words.index("-") + 1] == "cgroup2" and path.is_relative_to(root) and ".." not in path.parts:
            folder = Path(words[4]) / path.relative_to(root)
            if folder.is_dir():
                return folder
    raise NotDelegated("no cgroup of version 2 is visible here")


def _write(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _counts(file: Path) -> Mapping[str, int]:
    with suppress(OSError):
        return {name: int(count) for name, count in map(str.split, file.read_text().splitlines())}
    return {}


def _number(file: Path) -> int:
    with suppress(OSError):
        return int(file.read_text())
    return 0
