"""Signals of a process that has no server yet, or one that does not take them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support.waiting import PATIENCE_SECONDS

SCRIPT = """
import asyncio
import os
import signal
import sys

for name in sys.argv[2:]:
    signal.signal(signal.Signals[name], signal.SIG_IGN)

from rocserve.signals import Signals

signals = Signals()
for name in sys.argv[1].split(","):
    os.kill(os.getpid(), signal.Signals[name])


async def take():
    taken = []
    signals.watch(taken.append, asyncio.get_running_loop())
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    print(*[signal.Signals(number).name for number in taken])
    child = await asyncio.create_subprocess_exec("false")
    print(await child.wait())


asyncio.run(take())
os.kill(os.getpid(), signal.SIGHUP)
"""


def run(sent: str, *ignored: str) -> tuple[int, list[str]]:
    """The exit status, and what was printed. `sent`: names, with commas, of the signals before a server takes them."""
    command = [sys.executable, "-c", SCRIPT, sent, *ignored]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert ran.stderr == ""
    return ran.returncode, ran.stdout.splitlines()


def test_signals_that_come_early_are_taken_later() -> None:
    assert run("SIGINT,SIGHUP,SIGTERM") == (0, ["SIGINT SIGHUP SIGTERM SIGHUP", "1"])


def test_an_ignored_signal_stays_ignored_except_the_end_of_a_child() -> None:
    assert run("SIGHUP,SIGINT", "SIGHUP", "SIGCHLD") == (0, ["SIGINT", "1"])


@pytest.mark.parametrize("third", ["SIGTERM", "SIGINT"])
def test_the_third_signal_ends_a_process_that_takes_none(third: str) -> None:
    assert run(f"SIGTERM,SIGHUP,SIGINT,{third}") == (-signal.Signals[third], [])
