"""When memory is given back: after a peak, once requests hold little of it, and not for what is in use."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys

import pytest
from support.waiting import until

from rocserve.core import heap_trim
from rocserve.core.heap_trim import HeapTrim

MIB = 1 << 20


class Process:
    """What a process has and what its requests hold; a trim leaves what is in use."""

    def __init__(self) -> None:
        self.private = self.in_use = 70 * MIB
        self.requests = 0
        self.trims = 0
        self.heap = HeapTrim(lambda: self.requests, self.trim, lambda: self.private)

    def trim(self) -> None:
        self.trims += 1
        self.private = self.in_use

    def checks(self, count: int) -> None:
        for _ in range(count):
            if self.heap.check():
                self.heap.trim()


def test_what_a_peak_leaves_behind_is_given_back_once_it_is_over() -> None:
    process = Process()
    process.private, process.requests = 900 * MIB, 600 * MIB
    process.checks(10)
    assert process.trims == 0
    process.requests = MIB
    process.checks(2)
    assert process.trims == 0
    process.checks(1)
    assert (process.trims, process.private) == (1, 70 * MIB)
    process.checks(10)
    assert process.trims == 1


def test_pauses_of_traffic_that_goes_on_are_no_end() -> None:
    process = Process()
    process.private = 300 * MIB
    for _ in range(10):
        process.requests = 0
        process.checks(2)
        process.requests = 100 * MIB
        process.checks(1)
    assert process.trims == 0


def test_what_is_in_use_is_asked_for_now_and_then() -> None:
    process = Process()
    process.private = process.in_use = 500 * MIB
    process.checks(17)
    assert process.trims == 1
    process.checks(60)
    assert process.trims == 5


def test_what_is_freed_after_a_trim_is_given_back_though_nothing_has_grown_since() -> None:
    process = Process()
    process.private, process.in_use = 130 * MIB, 100 * MIB
    process.checks(3)
    assert process.private == 100 * MIB
    process.private, process.in_use = 120 * MIB, 70 * MIB
    process.checks(15)
    assert process.private == 70 * MIB
    trims = process.trims
    process.private += 20 * MIB
    process.checks(60)
    assert process.trims == trims


async def test_checks_go_on_after_one_for_which_there_was_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_trim, "_CHECK_SECONDS", 0.001)
    checks: list[int] = []

    def private() -> int:
        checks.append(MIB)
        if len(checks) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return MIB

    running = asyncio.ensure_future(HeapTrim(lambda: 0, lambda: None, private).run())
    await until(lambda: len(checks) > 3)
    running.cancel()


KEPT = """
import sys
import threading
from rocserve.core.heap_trim import keep_freed_memory, private_bytes

count, mib, of_any_size = map(int, sys.argv[1:])
trim = keep_freed_memory(bool(of_any_size))

def run():
    messages = [bytearray(b"x") * (mib << 20) for _ in range(count)]
    full = private_bytes()
    messages.clear()
    kept = private_bytes()
    trim()
    print(full, kept, private_bytes())

thread = threading.Thread(target=run)
thread.start() if of_any_size else run()
"""


def sizes(count: int = 20, mib: int = 4, of_any_size: bool = False, **environment: str) -> tuple[int, ...]:
    """Bytes of a process that has messages, has freed them, and has trimmed; on a further thread where they may be of
    any size. The setting stays, so it is one of its own."""
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", KEPT, *map(str, (count, mib, int(of_any_size)))]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return tuple(map(int, shown.stdout.split()))


@pytest.mark.parametrize("arguments", [(20, 4), (2, 40, True)])
def test_what_is_freed_is_kept_until_it_is_given_back(arguments: tuple[int, ...]) -> None:
    full, kept, left = sizes(*arguments)
    assert kept > full - 10 * MIB
    assert left < full - 70 * MIB


def test_what_the_operator_has_told_glibc_stays() -> None:
    full, kept, _ = sizes(MALLOC_MMAP_THRESHOLD_="65536")
    assert kept < full - 70 * MIB
