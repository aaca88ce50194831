"""The watch of workers' processes, over real ones: what it does when it cannot look, and whom it stops."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGKILL

import psutil
import pytest
from support.waiting import until

from rocserve.workers.resource_watch import ResourceWatch, read_processes

ROW_COUNT = 10
# Each process lives until the next one has been forked; several such rows, for half a minute at most.
ROWS = f"""
import os, time
end = time.monotonic() + 30
for row in range({ROW_COUNT}):
    if os.fork() == 0:
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
        os._exit(0)
time.sleep(30)
"""
SLEEPERS = "import os, time; [os.fork() or time.sleep(30) for number in range(5)]; time.sleep(30)"


class Worker:
    """A process with a group of its own, which is killed when it is to end."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-S", "-c", code], process_group=0)
        self.pid = self._process.pid
        self.reasons: list[str] = []
        self.states: list[str] = []
        """Of its group's processes when it was to end, zombies left out."""

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end_for(self, reason: str) -> None:
        self.reasons.append(reason)
        group = [process.pid for process in read_processes() if process.group == self.pid and not process.is_zombie]
        self.states = [psutil.Process(pid).status() for pid in group]
        self.end()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, SIGKILL)
        self._process.wait()


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = Worker(request.param)
    yield worker
    worker.end()


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """This process can open that many files at once meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1], ids=["for nothing", "for the folder of processes"])
@pytest.mark.parametrize("worker", [SLEEPERS], indirect=True, ids=["sleepers"])
async def test_a_watch_goes_on_when_the_server_has_descriptors_again(worker: Worker, left: int) -> None:
    watch = ResourceWatch()
    with descriptors_left(left):
        watch.add(worker, 0, 3)
        await asyncio.sleep(0.4)
        assert not worker.reasons
    await until(lambda: worker.reasons)
    assert worker.reasons == ["limit of 3 tasks exceeded (it had 6 processes and threads)"]
    await watch.close()


@pytest.mark.parametrize("worker", [ROWS], indirect=True, ids=["rows"])
async def test_processes_that_fork_without_end_are_all_stopped_before_they_are_killed(worker: Worker) -> None:
    watch = ResourceWatch()
    watch.add(worker, 0, 3)
    await until(lambda: worker.reasons)
    assert worker.reasons[0].startswith("limit of 3 tasks exceeded")
    assert len(worker.states) > ROW_COUNT and set(worker.states) == {psutil.STATUS_STOPPED}
    await watch.close()
