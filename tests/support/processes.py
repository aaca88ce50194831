"""Questions and signals to processes that may end at any moment."""

from __future__ import annotations

import signal
from contextlib import suppress

import psutil


def has_ended(pid: int) -> bool:
    """Whether the process has ended; a zombie, which nobody has reaped yet, has."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


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


def children_of(process: psutil.Process) -> set[psutil.Process]:
    """The children; none once the process has ended."""
    try:
        return set(process.children())
    except psutil.NoSuchProcess:
        return set()


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
