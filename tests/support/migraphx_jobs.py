"""Jobs that fail in all the ways in which MIGraphX can fail. The child imports this module from tests/, which is on its
PYTHONPATH."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.binding import Binding, MigraphxError
from rocserve.core.errors import invalid_argument
from rocserve.jobs.messages import Report

FOREVER_SECONDS = 1000


@dataclass(frozen=True, slots=True)
class StrangeResult:
    text: str


@dataclass(frozen=True, slots=True)
class StrangeJob:
    action: str
    argument: str = ""

    @property
    def title(self) -> str:
        return f"doing {self.action}"

    def perform(self, binding: Binding, report: Report) -> StrangeResult:
        report("beginning")
        return StrangeResult(_ACTIONS[self.action](self.argument, binding, report))


def _echo(argument: str, binding: Binding, report: Report) -> str:
    return f"{argument} by {binding.name} in {os.getpid()}"


def _refuse(argument: str, binding: Binding, report: Report) -> str:
    raise MigraphxError(argument)


def _refuse_by_itself(argument: str, binding: Binding, report: Report) -> str:
    raise invalid_argument(argument)


def _fail(argument: str, binding: Binding, report: Report) -> str:
    return str({}[argument])


def _write(argument: str, binding: Binding, report: Report) -> str:
    report("writing")
    os.write(1, argument.encode())
    return ""


def _abort(argument: str, binding: Binding, report: Report) -> str:
    os.write(2, argument.encode())
    os.abort()


def _crash(argument: str, binding: Binding, report: Report) -> str:
    ctypes.string_at(0)
    return ""


def _exit(argument: str, binding: Binding, report: Report) -> str:
    os.write(2, b"going\n")
    os._exit(int(argument))


def _kill_itself(argument: str, binding: Binding, report: Report) -> str:
    """Die when the parent has taken both reports and has made a file for each: it reads the child's memory after it has
    taken the first. `argument`: the files' folder."""
    for phase in ("one", "another"):
        report(phase)
        while not Path(argument, phase).exists():
            time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_SECONDS)
    return ""


def _hang(argument: str, binding: Binding, report: Report) -> str:
    """Hang in native code with the GIL held, next to a child process that hangs as well."""
    compiler = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_SECONDS})"])
    report(f"hanging as {os.getpid()} with {compiler.pid}")
    ctypes.PyDLL(None).sleep(FOREVER_SECONDS)
    return ""


def _leave_behind(argument: str, binding: Binding, report: Report) -> str:
    return str(subprocess.Popen(["sleep", str(FOREVER_SECONDS)]).pid)


def _descriptors(argument: str, binding: Binding, report: Report) -> str:
    return " ".join(sorted(str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()))


def _priority(argument: str, binding: Binding, report: Report) -> str:
    """The nice values of all threads, and the I/O priority."""
    nice = {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in Path("/proc/self/task").iterdir()}
    idle = subprocess.run(["ionice"], capture_output=True, text=True, check=False).stdout.strip()
    return f"nice {sorted(nice)}, {idle}"


def _environment(argument: str, binding: Binding, report: Report) -> str:
    return os.environ.get(argument, "")


def _dump(argument: str, binding: Binding, report: Report) -> str:
    """Fail as MIGraphX does since 2.15: with the program in a file among the temporary files."""
    dump = Path(tempfile.gettempdir(), "migraphx", "lowering1.mxr")
    dump.parent.mkdir()
    dump.write_bytes(bytes(1000))
    raise MigraphxError(f"{argument} {dump}")


def _limits(argument: str, binding: Binding, report: Report) -> str:
    name = Path("/proc/self/comm").read_text().strip()
    return f"core {resource.getrlimit(resource.RLIMIT_CORE)[0]}, {name}"


_ACTIONS = {
    "echo": _echo,
    "refuse": _refuse,
    "refuse by itself": _refuse_by_itself,
    "fail": _fail,
    "write": _write,
    "abort": _abort,
    "crash": _crash,
    "exit": _exit,
    "kill itself": _kill_itself,
    "hang": _hang,
    "leave behind": _leave_behind,
    "descriptors": _descriptors,
    "priority": _priority,
    "environment": _environment,
    "limits": _limits,
    "dump": _dump,
}
