"""Heaps: places of tensors, who may write, and memory that is returned to the system."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.workers import open_descriptors

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensor_places import aligned
from rocserve.plane import anonymous_file
from rocserve.plane.heap import (
    COPIED_AT_ONCE,
    GIVEN_BACK_AT_ONCE,
    SMALLEST_SLOT,
    Heap,
    HeapFull,
    HeapReader,
    copied,
    copy_bytes,
    create_file,
)

LIMIT = 256 << 20


@pytest.fixture
def heap() -> Iterator[Heap]:
    heap = Heap("test", LIMIT)
    yield heap
    heap.close()


def memory_of(heap: Heap) -> int:
    """Bytes that the heap's file takes."""
    descriptor = heap.open_for_reading()
    try:
        return os.fstat(descriptor).st_blocks * 512
    finally:
        os.close(descriptor)


def trim(heap: Heap) -> int:
    """Trim; return the number of pieces."""
    return len(list(heap.trim()))


def test_tensors_never_overlap(heap: Heap) -> None:
    random = Random(5)
    live: dict[int, bytes] = {}
    for _ in range(4000):
        if live and random.random() < 0.45:
            offset = random.choice(list(live))
            data = live.pop(offset)
            assert bytes(heap.view(offset, len(data))) == data
            heap.free(offset)
            continue
        data = random.randbytes(random.choice((0, 1, 63, 64, 65, 128, 4095, 4096, 4097, 150_528)))
        offset = heap.allocate(len(data))[0]
        assert offset % SMALLEST_SLOT == 0
        assert offset not in live
        heap.view(offset, len(data))[:] = data
        live[offset] = data
        if random.random() < 0.01:
            trim(heap)
    assert len(live) > 100
    for offset, data in live.items():
        assert bytes(heap.view(offset, len(data))) == data


def test_all_of_a_heap_can_be_one_tensor_or_many(heap: Heap) -> None:
    offset = heap.allocate(LIMIT)[0]
    with pytest.raises(HeapFull, match=f"no room for {LIMIT} bytes of tensors in a heap of {LIMIT} bytes"):
        heap.allocate(LIMIT)
    with pytest.raises(HeapFull, match=f"no room for {LIMIT + 1} bytes"):
        heap.allocate(LIMIT + 1)
    # Another size has separate room.
    pages = [heap.allocate(1 << 20)[0] for _ in range(LIMIT >> 20)]
    assert len(set(pages)) == len(pages)
    with pytest.raises(HeapFull):
        heap.allocate(1 << 20)
    heap.free(offset)
    assert heap.allocate(LIMIT // 2 + 1)[0] == offset


@pytest.mark.parametrize("limit", [1, 4096, 4097, 100_000_000])
def test_a_limit_is_rounded_up(limit: int) -> None:
    heap = Heap("test", limit)
    assert limit <= heap.limit < max(2 * limit, 2 * mmap.PAGESIZE + 1)
    heap.view(heap.allocate(heap.limit)[0], heap.limit)[-1:] = b"x"
    heap.close()


def test_readers_see_what_is_written_and_cannot_write(heap: Heap) -> None:
    descriptor = heap.open_for_reading()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, mmap.PAGESIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    reader = HeapReader(descriptor)
    offset = heap.allocate(100_000)[0]
    heap.view(offset, 100_000)[:] = b"abcde" * 20_000
    assert bytes(reader.checked(offset, 100_000)) == b"abcde" * 20_000
    seen = reader.view(offset, 5)
    assert seen.readonly
    with pytest.raises(TypeError):
        seen[0] = 0
    heap.view(offset, 5)[:] = b"later"
    assert bytes(seen) == b"later"
    reader.close()
    assert bytes(seen) == b"later"


@pytest.mark.parametrize("shorter", [0, mmap.PAGESIZE, LIMIT])
def test_no_owner_can_cut_a_heap(heap: Heap, shorter: int) -> None:
    """A reader's mapping stays valid: touching removed memory would end its process."""
    with pytest.raises(PermissionError):
        os.ftruncate(heap._descriptor, shorter)


def test_what_was_not_written_is_not_read(heap: Heap) -> None:
    """Memory costs nothing until it is touched; a reader of everything that a worker names would pay for it."""
    reader = HeapReader(heap.open_for_reading())
    offset = heap.allocate(LIMIT)[0]
    heap.view(offset, 1 << 20)[:] = bytes(1 << 20)
    assert len(reader.checked(offset, 1 << 20)) == 1 << 20
    before = memory_of(heap)
    for nbytes in ((1 << 20) + 1, LIMIT):
        with pytest.raises(ValueError, match=f"a tensor of {nbytes} bytes at byte {offset} was not written to its end"):
            reader.checked(offset, nbytes)
    size = os.fstat(heap._descriptor).st_size
    for start, nbytes in ((size, 1), (size - 1, 2), (LIMIT - 1, 2), (-1, 1), (0, -1), (1 << 62, 1 << 62)):
        with pytest.raises(ValueError, match=f"a tensor of {nbytes} bytes at byte {start} lies outside of its heap"):
            reader.checked(start, nbytes)
    assert memory_of(heap) == before


def test_memory_that_nobody_needs_is_given_back(heap: Heap) -> None:
    size = 4 << 20
    offsets = [heap.allocate(size)[0] for _ in range(40)]
    for offset in offsets:
        heap.view(offset, size)[:] = bytes(size)
    for offset in offsets:
        heap.free(offset)
    # The round in which they were in use.
    assert trim(heap) == 0
    assert memory_of(heap) >= 40 * size
    busy = [heap.allocate(size)[0] for _ in range(3)]
    for offset in busy:
        heap.free(offset)
    # 37 that nobody has taken since then, a part in each step.
    assert trim(heap) == 37 * size // GIVEN_BACK_AT_ONCE
    assert memory_of(heap) <= 3 * size + mmap.PAGESIZE
    # Places with memory are taken first, then those without, then new ones.
    again = [heap.allocate(size)[0] for _ in range(41)]
    assert set(again[:3]) == set(busy)
    assert set(again[:40]) == set(offsets)
    assert again[40] not in offsets


def test_giving_back_one_large_tensor_takes_several_steps(heap: Heap) -> None:
    offset = heap.allocate(LIMIT)[0]
    heap.view(offset, LIMIT)[:] = bytes(LIMIT)
    heap.free(offset)
    trim(heap)
    steps = heap.trim()
    next(steps)
    # While its pages are being released, nobody can take it.
    with pytest.raises(HeapFull):
        heap.allocate(LIMIT)
    assert len(list(steps)) > 1
    assert memory_of(heap) == 0
    assert heap.allocate(LIMIT)[0] == offset


def test_a_heap_leaves_nothing_behind(heap: Heap) -> None:
    other = Heap("other", LIMIT)
    reader = HeapReader(other.open_for_reading())
    slot, written = other.place(100)
    view = reader.view(slot.offset, 1)
    for _ in range(2):
        reader.close()
        other.close()
    # Like a batch that ends late.
    del slot
    assert not trim(other)
    del view, written
    assert descriptors("other") == 0


def test_parts_are_mapped_when_they_are_used() -> None:
    heap = Heap("parts", LIMIT)
    reader = HeapReader(heap.open_for_reading())
    for used, size in enumerate((64, 4096, 1 << 20), 1):
        for _ in range(3):
            offset = heap.allocate(size)[0]
            heap.view(offset, size)[:] = bytes([used]) * size
            assert bytes(reader.view(offset, size)) == bytes([used]) * size
        assert mappings("parts") == 2 * used
        assert descriptors("parts") == 2
    heap.close()
    reader.close()
    assert mappings("parts") == descriptors("parts") == 0


def descriptors(name: str) -> int:
    """Descriptors of anonymous files with that name."""
    return sum(f"/memfd:{name} " in target for _, target in open_descriptors())


def mappings(name: str) -> int:
    """Mappings of anonymous files with that name."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name} ")


def test_a_slot_is_given_back_when_nobody_holds_it(heap: Heap) -> None:
    slot, view = heap.place(100)
    view[:] = b"x" * 100
    place = slot.offset
    other, _ = heap.place(100)
    assert other.offset != place
    kept = [slot]
    del slot
    assert heap.place(100)[0].offset not in (place, other.offset)
    kept.clear()
    again, _ = heap.place(64 + 1)
    assert again.offset == place


def test_a_heap_that_another_process_has_made(heap: Heap) -> None:
    """The server makes the file, so that it knows what it maps; the worker owns it."""
    descriptor = create_file("test", LIMIT)
    reader = HeapReader(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))
    owned = Heap.of_file(descriptor)
    assert owned.limit == heap.limit == LIMIT
    offset = owned.allocate(200_000)[0]
    owned.view(offset, 200_000)[:] = b"y" * 200_000
    assert bytes(reader.checked(offset, 200_000)) == b"y" * 200_000
    reader.close()
    owned.close()


@pytest.mark.parametrize("size", [0, 4096, LIMIT, (22 << 28) + 4096])
def test_a_file_of_another_size_is_no_heap(size: int) -> None:
    descriptor = anonymous_file.create("test", size)
    with pytest.raises(ValueError, match=f"a file of {size} bytes is not a heap"):
        Heap.of_file(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("nbytes", [1, 64 << 10, (64 << 10) + 1, 3 << 20])
def test_data_is_copied_to_its_place(heap: Heap, nbytes: int) -> None:
    data = Random(nbytes).randbytes(nbytes)
    for source in (data, bytearray(data), memoryview(data)):
        _slot, view = heap.place(nbytes + 200)
        view[:] = bytes(nbytes + 200)
        copy_bytes(view, 100, source)
        assert bytes(view[100:-100]) == data
        assert not any(view[:100]) and not any(view[-100:])


def test_tensors_are_copied_in_steps() -> None:
    sources = [bytes(range(256)) * (2 * COPIED_AT_ONCE // 256), b"", memoryview(b"ab")]
    steps, count = copied(sources), 0
    try:
        while True:
            next(steps)
            count += 1
    except StopIteration as end:
        assert list(map(bytes, end.value)) == list(map(bytes, sources))
    assert count == 3


def test_a_copy_that_there_is_no_memory_for_is_an_error() -> None:
    with pytest.raises(ServeError, match=f"no memory for an answer of {1 << 50} bytes") as raised:
        next(copied([memoryview(np.broadcast_to(np.uint8(0), 1 << 50))]))
    assert raised.value.code is StatusCode.RESOURCE_EXHAUSTED


def test_alignment() -> None:
    assert [aligned(offset) for offset in (0, 1, 64, 65)] == [0, 64, 64, 128]
