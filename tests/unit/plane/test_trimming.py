"""The memory of many heaps, and what a burst of requests has freed, is returned to the system little by little."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hand_loop import HandLoop

from rocserve.plane import freed_memory
from rocserve.plane.freed_memory import FreedMemory
from rocserve.plane.heap import Heap
from rocserve.plane.loop import NEVER
from rocserve.plane.trimming import Trimmer

MIB = 1 << 20
SIZE = 32 * MIB


class StepLoop(HandLoop):
    """Takes the steps of long work one by one, and lets the time pass when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._long: list[Iterator[None]] = []
        self.on_step: Callable[[], None] = lambda: None

    def work_off(self, steps: Iterator[None]) -> None:
        self._long.append(steps)

    def pass_time(self) -> None:
        """Run the timers that are set, and the long work that they begin."""
        self.turn()
        due = []
        while (callback := self._timers.pop_due(NEVER)) is not None:
            due.append(callback)
        for callback in due:
            callback()
        while self._long:
            for _ in self._long.pop():
                self.on_step()


@pytest.fixture
def plane() -> StepLoop:
    return StepLoop()


@pytest.fixture
def trimmer(plane: StepLoop) -> Trimmer:
    return Trimmer(plane)  # type: ignore[arg-type]


def used_heap() -> Heap:
    """A heap with free memory."""
    heap = Heap("trimmed", SIZE)
    slot, view = heap.place(SIZE)
    view[:] = bytes(SIZE)
    del slot, view
    return heap


def held(heap: Heap) -> int:
    return os.fstat(heap._descriptor).st_blocks * 512


def test_the_memory_of_unused_heaps_goes_a_piece_a_step(plane: StepLoop, trimmer: Trimmer) -> None:
    heaps = [used_heap() for _ in range(3)]
    for heap in heaps:
        trimmer.trim_later(heap)
    left = [sum(map(held, heaps))]
    plane.on_step = lambda: left.append(sum(map(held, heaps)))
    while trimmer._used:
        plane.pass_time()
    assert left[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(left)) <= freed_memory.GIVEN_BACK_AT_ONCE
    plane.pass_time()
    # No timer runs for heaps that nobody uses.
    assert plane._timers.next_due == NEVER


def test_heaps_that_go_meanwhile_are_passed_over(plane: StepLoop, trimmer: Trimmer) -> None:
    first, last = used_heap(), used_heap()
    returns: list[Heap] = []
    for heap in (first, last):
        trimmer.trim_later(heap, lambda heap=heap: returns.append(heap))  # type: ignore[misc]
    plane.pass_time()
    assert returns == [first, last]

    def close() -> None:
        for heap in (first, last):
            trimmer.forget(heap)
            heap.close()

    # Within the first of several steps of the first heap.
    plane.on_step = close
    plane.pass_time()
    assert returns == [first, last, first]
    assert not trimmer._used


class Process:
    """Has memory of which requests hold a part. What is freed stays until it is given back."""

    def __init__(self) -> None:
        self.private = self.in_use = 70 * MIB
        self.requests = 0
        self.times = 0
        """How often it gave memory back."""

    def give_back(self) -> Iterator[None]:
        self.times += 1
        self.private = self.in_use
        yield


@pytest.fixture
def process(plane: StepLoop, trimmer: Trimmer, monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(freed_memory, "private_bytes", lambda: process.private)
    monkeypatch.setattr(FreedMemory, "give_back", lambda freed: process.give_back())
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")  # The operator's, so this process keeps its options.
    trimmer.trim_process(FreedMemory(), lambda: process.requests)
    return process


def rounds(plane: StepLoop, count: int) -> None:
    for _ in range(count):
        plane.pass_time()


def test_what_a_burst_leaves_behind_is_given_back_once_it_is_over(plane: StepLoop, process: Process) -> None:
    process.private, process.requests = 900 * MIB, 600 * MIB
    rounds(plane, 10)
    assert process.times == 0
    process.requests = MIB
    rounds(plane, 1)
    assert process.times == 0
    rounds(plane, 1)
    assert (process.times, process.private) == (1, 70 * MIB)
    rounds(plane, 20)
    assert process.times == 1


def test_pauses_of_traffic_that_goes_on_are_no_end(plane: StepLoop, process: Process) -> None:
    process.private = 300 * MIB
    for _ in range(10):
        process.requests = 0
        rounds(plane, 1)
        process.requests = 100 * MIB
        rounds(plane, 1)
    assert process.times == 0


def test_memory_that_stays_in_use_is_asked_for_now_and_then(plane: StepLoop, process: Process) -> None:
    process.private = process.in_use = 500 * MIB
    rounds(plane, 20)
    assert 2 <= process.times <= 4
    process.in_use = 70 * MIB
    rounds(plane, 10)
    assert process.private == 70 * MIB
    process.times = 0
    process.private += 20 * MIB
    rounds(plane, 20)
    assert process.times == 0, "20 MiB are not worth the time"


def test_rounds_go_on_after_one_for_which_there_was_no_descriptor(
    plane: StepLoop, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise OSError("Too many open files")

    process.private = 900 * MIB
    with monkeypatch.context() as patched:
        patched.setattr(freed_memory, "private_bytes", fail)
        rounds(plane, 3)
    assert process.times == 0
    rounds(plane, 2)
    assert process.times == 1
