"""Questions and signals to processes that may end at any moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from support.waiting import wait_until


def has_ended(pid: int) -> bool:
    """Whether the process has ended; a zombie, which nobody has reaped yet, has."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until_ended(processes: Iterable[psutil.Process]) -> None:
    """Wait until all have ended. An orphan is a zombie until the machine's first process, which may be slow, reaps
    it."""
    left = list(processes)

    def have_ended() -> bool:
        left[:] = [process for process in left if process.is_running() and not has_ended(process.pid)]
        return not left

    wait_until(have_ended, f"the end of {left}")


def name_of(process: psutil.Process) -> str:
    """The name, of which the kernel keeps 15 bytes; "" once the process has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def command_of(process: psutil.Process) -> str:
    """The command line; "" once the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: a signal takes effect when they run next."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states_of_threads(pid) == {"T"}, f"the stop of process {pid}")


def _states_of_threads(pid: int) -> set[str]:
    states = set()
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended since.
            states.add(file.read_text().rpartition(")")[2].split()[0])
    return states


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
