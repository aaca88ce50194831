"""Front ends that cannot be started: nothing of them is left, and a later start succeeds."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.waiting import until
from support.workers import open_descriptors

from rocserve.core.request_memory import RequestMemory, table_bytes
from rocserve.frontends.grpc.service import ServerRoutes
from rocserve.frontends.processes.supervisor import FrontEndParts, FrontEndProcesses
from rocserve.frontends.shared_ports import SharedPorts
from rocserve.plane.loop import PlaneLoop

LOG = logging.getLogger("rocserve.test.failed_starts")
MOST_NEEDED = 32
"""More descriptors than the start of a front end takes."""


@pytest.fixture
def front_ends(plane: PlaneLoop, monkeypatch: pytest.MonkeyPatch) -> FrontEndProcesses:
    """Front ends on a machine that starts no process."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    memory = RequestMemory(1 << 20)
    memory.share(memoryview(bytearray(table_bytes(2))), 0)
    parts = FrontEndParts((), object(), plane, memory, 0, ())  # type: ignore[arg-type]
    return FrontEndProcesses(SharedPorts([]), 1, ServerRoutes({}, {}), parts, LOG)


@pytest.fixture
def few_descriptors() -> Iterator[ExitStack]:
    """What it holds is closed at the end; the limit of this process's descriptors is restored then."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        yield stack
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def fail_once(front_ends: FrontEndProcesses) -> int | None:
    with pytest.raises(OSError) as caught:
        front_ends._spawn(0)
    return caught.value.errno


async def test_a_process_that_cannot_be_started_leaves_no_descriptor(front_ends: FrontEndProcesses) -> None:
    before = open_descriptors()
    for _ in range(3):
        assert fail_once(front_ends) == errno.EAGAIN
    await until(lambda: open_descriptors() <= before)
    await front_ends.stop(0.0)


async def test_a_start_that_finds_too_few_descriptors_leaves_none(
    front_ends: FrontEndProcesses, few_descriptors: ExitStack
) -> None:
    before = open_descriptors()
    top = max(number for number, _ in before) + 1
    while (number := os.open("/dev/null", os.O_RDONLY)) <= top:
        few_descriptors.callback(os.close, number)
    os.close(number)
    filled = open_descriptors()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = set()
    for free in range(MOST_NEEDED):
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + free, most))
        seen.add(fail_once(front_ends))
        # To look at the descriptors takes one too.
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + MOST_NEEDED, most))
        await until(lambda: open_descriptors() <= filled)
    assert seen == {errno.EMFILE, errno.EAGAIN}, "with enough of them only the process is missing"
    await front_ends.stop(0.0)
