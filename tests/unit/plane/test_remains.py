"""The memory of a large closed heap is released some megabytes a step, after its last reader has released it."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.workers import open_descriptors

from rocserve.plane import anonymous_file
from rocserve.plane.anonymous_file import GIVEN_BACK_AT_ONCE
from rocserve.plane.heap import Heap, HeapReader, SharedHeap, Slot, create_file

LIMIT = 256 << 20
LARGE = 64 << 20


class Steps:
    """Steps that have not been taken."""

    def __init__(self) -> None:
        self._tasks: deque[Iterator[None]] = deque()

    def later(self, steps: Iterator[None]) -> None:
        self._tasks.append(steps)

    def take(self, measure: Callable[[], int]) -> list[int]:
        """How much each step has taken off the measure."""
        taken = []
        while self._tasks:
            before = measure()
            if next(self._tasks[0], self) is self:
                self._tasks.popleft()
            taken.append(before - measure())
        return taken


@pytest.fixture
def steps() -> Steps:
    return Steps()


def mappings_of(name: str) -> int:
    """This process's mappings of the files with this name."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name} ")


def descriptors_of(name: str) -> int:
    """This process's descriptors of the files with this name; others may be closed at any time."""
    return sum(f"/memfd:{name} " in target for _, target in open_descriptors())


class Watch:
    """Keeps a file open; reports the bytes that it takes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self) -> int:
        return os.fstat(self._descriptor).st_blocks * 512


@pytest.fixture
def watched() -> Iterator[Callable[[Heap], Watch]]:
    opened: list[int] = []

    def watch(heap: Heap) -> Watch:
        opened.append(heap.open_for_reading())
        return Watch(opened[-1])

    yield watch
    for descriptor in opened:
        os.close(descriptor)


def filled(heap: Heap, nbytes: int = LARGE) -> tuple[Slot, memoryview]:
    slot, view = heap.place(nbytes)
    view[:] = b"x" * nbytes
    return slot, view


def test_memory_of_a_closed_heap_goes_a_piece_a_step(steps: Steps, watched: Callable[[Heap], Watch]) -> None:
    heap = Heap("closed", LIMIT, later=steps.later)
    memory = watched(heap)
    before = descriptors_of("closed")
    filled(heap)
    heap.close()
    assert memory() == LARGE
    taken = steps.take(memory)
    assert sum(taken) == LARGE
    assert max(taken) <= GIVEN_BACK_AT_ONCE
    assert mappings_of("closed") == 0
    assert descriptors_of("closed") == before - 1


def test_small_tensors_in_large_numbers_go_in_pieces_too(steps: Steps, watched: Callable[[Heap], Watch]) -> None:
    heap = Heap("small", LIMIT, later=steps.later)
    memory = watched(heap)
    slots = [filled(heap, 1024)[0] for _ in range(3 * GIVEN_BACK_AT_ONCE // 1024)]
    slots.clear()
    heap.close()
    taken = steps.take(memory)
    assert sum(taken) == 3 * GIVEN_BACK_AT_ONCE
    assert len(taken) >= 3
    assert max(taken) <= GIVEN_BACK_AT_ONCE


@pytest.mark.parametrize("held_is", ["slot", "view"])
def test_what_is_still_held_stays_though_the_heap_is_closed(
    steps: Steps, watched: Callable[[Heap], Watch], held_is: str
) -> None:
    heap = Heap("held", LIMIT, later=steps.later)
    memory = watched(heap)
    slot, view = filled(heap)
    held: list[object] = [slot if held_is == "slot" else view]
    del slot, view
    heap.close()
    assert steps.take(memory) == []
    assert memory() == LARGE
    # Without the end of the heap object itself, and without the garbage collector.
    gc.disable()
    try:
        held.clear()
    finally:
        gc.enable()
    assert sum(steps.take(memory)) == LARGE
    assert not list(heap.trim())


def test_what_a_dead_owner_has_left_goes_a_piece_a_step(steps: Steps, watched: Callable[[Heap], Watch]) -> None:
    """Like an instance's outputs when its worker dies."""
    descriptor = create_file("dead", LIMIT)
    reader = HeapReader(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY), later=steps.later)
    owner = Heap.of_file(descriptor)
    memory = watched(owner)
    offset, written = owner.allocate(LARGE)
    written[:] = b"x" * LARGE
    view = reader.view(offset, LARGE)
    assert bytes(view) == bytes(written)
    del written
    owner.close()
    slot = Slot(lambda place: None, offset, reader, reader.remains)
    before = descriptors_of("dead")
    reader.close(is_last=True)
    del view
    assert steps.take(memory) == []
    del slot
    taken = steps.take(memory)
    assert sum(taken) == LARGE
    assert max(taken) <= GIVEN_BACK_AT_ONCE
    assert descriptors_of("dead") == before - 1


def test_mappings_of_files_that_stay_go_a_piece_a_step(
    steps: Steps, watched: Callable[[Heap], Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, unmap = [LIMIT], anonymous_file.unmap

    def count(address: int, nbytes: int) -> None:
        left[0] -= nbytes
        unmap(address, nbytes)

    monkeypatch.setattr(anonymous_file, "unmap", count)
    heap = Heap("stays", LIMIT)
    memory = watched(heap)
    slot, view = filled(heap)
    reader = HeapReader(heap.open_for_reading(), later=steps.later)
    assert sum(reader.view(slot.offset, LARGE)[::4096]) == LARGE // 4096 * ord("x")
    reader.close()
    assert mappings_of("stays") == 2
    taken = steps.take(lambda: left[0])
    assert sum(taken) >= LARGE
    assert max(taken) <= GIVEN_BACK_AT_ONCE
    assert mappings_of("stays") == 1
    assert memory() == LARGE
    assert view[-1] == ord("x")
    heap.close()


def test_a_share_is_emptied_a_piece_a_step_before_it_is_lent_again(
    steps: Steps, watched: Callable[[Heap], Watch]
) -> None:
    heap = SharedHeap("share", LIMIT, steps.later)
    memory = watched(heap)
    share = heap.lend()
    assert share is not None
    number = share.number
    owner = Heap.of_file(heap.open_for_writing(), number, 64)
    filled(owner)
    owner.close()
    del share
    other = heap.lend()
    assert other is not None
    assert other.number != number
    taken = steps.take(memory)
    assert sum(taken) == LARGE
    assert max(taken) <= GIVEN_BACK_AT_ONCE
    again = heap.lend()
    assert again is not None
    assert again.number == number
    del other, again
    heap.close()
    steps.take(memory)


def test_a_heap_that_is_closed_while_a_share_is_emptied(steps: Steps, watched: Callable[[Heap], Watch]) -> None:
    heap = SharedHeap("both", LIMIT, steps.later)
    memory = watched(heap)
    before = descriptors_of("both")
    filled(heap)
    share = heap.lend()
    assert share is not None
    owner = Heap.of_file(heap.open_for_writing(), share.number, 64)
    filled(owner)
    owner.close()
    del share
    heap.close()
    assert sum(steps.take(memory)) == 2 * LARGE
    assert descriptors_of("both") == before - 1
