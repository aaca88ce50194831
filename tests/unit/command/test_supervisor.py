"""The supervisor alone, with servers that only die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.waiting import PATIENCE_SECONDS

SCRIPT = """
import os
import signal
import sys

from rocserve import supervisor
from rocserve.core.passed_descriptors import send_with_descriptors

started = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR | os.O_APPEND)
most, refused = int(sys.argv[2]), list(map(int, sys.argv[3:]))
fork, forks = os.fork, 0


def fork_at_times():
    global forks
    forks += 1
    if forks in refused:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()


def serve(post):
    os.write(started, b".")
    starts = os.fstat(started).st_size
    if starts == 1:
        send_with_descriptors(post.connection, b"left", (started,))
        os.kill(os.getpid(), signal.SIGKILL)
    if starts == most:
        os.kill(os.getppid(), signal.SIGTERM)
    os._exit(1)


os.fork = fork_at_times
supervisor._FIRST_PAUSE_SECONDS = supervisor._LONGEST_PAUSE_SECONDS = 1e-6
sys.exit(supervisor.Supervisor(serve).run())
"""


def run(started: Path, most: int, *refused: int) -> tuple[int, str]:
    """The exit status and the output of a supervisor whose servers die until `most` have been started. `refused`: the
    numbers of the forks that fail."""
    command = [sys.executable, "-c", SCRIPT, *map(str, (started, most, *refused))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    return ran.returncode, ran.stderr


def test_servers_may_die_without_number(tmp_path: Path) -> None:
    assert run(tmp_path / "started", 1100) == (1, "")
    assert (tmp_path / "started").stat().st_size == 1100


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    assert run(tmp_path / "started", 3, 2, 3, 5) == (1, "")
    assert (tmp_path / "started").stat().st_size == 3


def test_the_first_that_cannot_be_started_is_the_end(tmp_path: Path) -> None:
    written = "rocserve serve: the server's process cannot be started: Resource temporarily unavailable\n"
    assert run(tmp_path / "started", 3, 1) == (1, written)
