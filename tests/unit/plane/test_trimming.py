"""The memory of many heaps is returned to the system little by little."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.hand_loop import HandLoop

from rocserve.plane import trimming
from rocserve.plane.loop import NEVER
from rocserve.plane.trimming import HeapTrimmer


class TimerLoop(HandLoop):
    """Runs its timers when the test says so, and counts them."""

    callbacks = 0

    def call_at(self, when: float, callback: Any) -> Any:
        def counted() -> None:
            self.callbacks += 1
            callback()

        return super().call_at(when, counted)

    def pass_time(self) -> None:
        """Run the timers that are set."""
        due = []
        while (callback := self._timers.pop_due(NEVER)) is not None:
            due.append(callback)
        for callback in due:
            callback()


class FullHeap:
    """Has this many pieces to release in its first round."""

    def __init__(self, plane: TimerLoop, pieces: int, seconds: float = 0.0) -> None:
        self._plane = plane
        self._pieces = pieces
        self._seconds = seconds
        self.given_at: list[int] = []
        """The callback in which each piece was released."""

    def trim(self) -> bool:
        time.sleep(self._seconds)
        if self._pieces:
            self.given_at.append(self._plane.callbacks)
            self._pieces -= 1
        return self._pieces > 0


@pytest.fixture
def plane() -> TimerLoop:
    return TimerLoop()


def test_other_callbacks_run_after_each_piece_whatever_heap_it_is_of(plane: TimerLoop) -> None:
    trimmer = HeapTrimmer(plane)  # type: ignore[arg-type]
    heaps = [FullHeap(plane, 4) for _ in range(5)]
    for heap in heaps:
        trimmer.trim_later(heap)  # type: ignore[arg-type]
    while trimmer._used:
        plane.pass_time()
    assert [len(heap.given_at) for heap in heaps] == [4] * 5
    whole_pieces = [turn for heap in heaps for turn in heap.given_at[:-1]]
    assert len(set(whole_pieces)) == len(whole_pieces)


def test_other_callbacks_run_between_heaps_that_have_little_each(plane: TimerLoop) -> None:
    trimmer = HeapTrimmer(plane)  # type: ignore[arg-type]
    heaps = [FullHeap(plane, 1, 2 * trimming._AT_ONCE_SECONDS) for _ in range(5)]
    for heap in heaps:
        trimmer.trim_later(heap)  # type: ignore[arg-type]
    while trimmer._used:
        plane.pass_time()
    assert len({turn for heap in heaps for turn in heap.given_at}) == 5


def test_a_heap_that_goes_meanwhile_is_passed_over(plane: TimerLoop) -> None:
    trimmer = HeapTrimmer(plane)  # type: ignore[arg-type]
    first, last = FullHeap(plane, 2), FullHeap(plane, 3)
    for heap in (first, last):
        trimmer.trim_later(heap)  # type: ignore[arg-type]
    while not last.given_at:
        plane.pass_time()
    for heap in (first, last):
        trimmer.forget(heap)  # type: ignore[arg-type]
    for _ in range(10):
        plane.pass_time()
    assert (len(first.given_at), len(last.given_at)) == (0, 1)
    trimmer.trim_later(first)  # type: ignore[arg-type]
    while trimmer._used:
        plane.pass_time()
    assert len(first.given_at) == 2
