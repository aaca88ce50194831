"""Heaps with shares that others own: tensors in a share are read in place, and live as long as somebody holds them.
Mappings of files that their owners truncate: the missing part reads as zeros, and nothing else changes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.shared_memory import GUARD, SharedFile, shared_file
from support.waiting import wait_until

from rocserve.core.datatypes import DataType
from rocserve.core.tensor_places import PlacedTensors, TensorPlaces
from rocserve.core.tensors import TensorHead
from rocserve.plane.guarded_mapping import GuardedMapping
from rocserve.plane.heap import SHARES, Heap, HeapReader, HeapShare, SharedHeap

LIMIT = 1 << 20


@pytest.fixture
def heap() -> SharedHeap:
    return SharedHeap("test", LIMIT)


def lent(heap: SharedHeap) -> HeapShare:
    share = heap.lend()
    assert share is not None
    return share


def owner_of(share: HeapShare) -> Heap:
    return Heap.of_file(share.heap.open_for_writing(), share.number, SHARES)


def test_what_each_owner_writes_is_read_by_all_under_one_descriptor(heap: SharedHeap) -> None:
    reader = HeapReader(heap.open_for_reading(), SHARES)
    shares = [lent(heap) for _ in range(3)]
    owners = [heap, *map(owner_of, shares)]
    places = []
    for index, owner in enumerate(owners):
        for nbytes in (64, 5000, 300_000):
            slot, view = owner.place(nbytes)
            view[:] = bytes([index + 1]) * nbytes
            places.append((slot, index + 1, nbytes))
    assert len({slot.offset for slot, _, _ in places}) == len(places)
    for slot, value, nbytes in places:
        assert bytes(reader.view(slot.offset, nbytes)) == bytes([value]) * nbytes


def test_a_share_is_lent_anew_only_when_nobody_holds_it_nor_what_lies_in_it(heap: SharedHeap) -> None:
    shares = [lent(heap) for _ in range(SHARES - 1)]
    assert heap.lend() is None
    share = shares.pop()
    number, owner = share.number, owner_of(share)
    slot, view = owner.place(8)
    view[:] = b"12345678"
    places = TensorPlaces([TensorHead("X", DataType.INT32, (2,))])
    slot, view = owner.place(places.end)
    view[:8] = b"12345678"
    data = PlacedTensors(heap.reader.view, places.end, places, heap, slot.offset, share)
    del share
    gc.collect()
    assert heap.lend() is None
    assert [bytes(one) for one in data] == [b"12345678"]
    del data
    gc.collect()
    again = lent(heap)
    assert again.number == number
    # The memory of its last owner has been released.
    assert bytes(heap.reader.view(slot.offset, 8)) == bytes(8)


def test_what_lies_in_a_share_can_be_read_after_the_heap_was_closed(heap: SharedHeap) -> None:
    calls: list[str] = []
    share = lent(heap)
    heap.on_closed["me"] = lambda: calls.append("closed")
    slot, view = owner_of(share).place(8)
    heap.close()
    view[:] = b"12345678"
    assert calls == ["closed"]
    assert heap.lend() is None
    assert bytes(share.heap.reader.view(slot.offset, 8)) == b"12345678"


MIB = 1 << 20
SIZE = 300_000


@dataclass
class Mapped:
    file: SharedFile
    view: memoryview
    mapping: GuardedMapping


def mapped(file: SharedFile, size: int) -> Mapped:
    descriptor = os.open(file.path, os.O_RDWR)
    try:
        return Mapped(file, *GUARD.map(descriptor, size, to_write=True))
    finally:
        os.close(descriptor)


@pytest.fixture
def region() -> Iterator[Mapped]:
    with shared_file(SIZE, "guarded") as file:
        file.put(0, b"x" * SIZE)
        yield mapped(file, SIZE)


def without_the_gil(view: memoryview) -> bytes:
    copy = np.empty(len(view), np.uint8)
    copy[:] = np.frombuffer(view, np.uint8)
    return copy.tobytes()


@pytest.mark.parametrize("read", [bytes, without_the_gil])
@pytest.mark.parametrize("kept", [0, 4096, 123_456, SIZE])
def test_what_is_gone_reads_as_zeros(region: Mapped, kept: int, read: Callable[[memoryview], bytes]) -> None:
    region.file.cut(kept)
    # The rest of the last page is filled with zeros.
    assert read(region.view) == b"x" * kept + bytes(SIZE - kept)
    assert region.mapping.is_torn == (kept < SIZE)


def test_what_is_written_to_what_is_gone_goes_nowhere(region: Mapped) -> None:
    region.file.cut(100)
    region.view[:] = b"y" * SIZE
    assert region.mapping.is_torn
    assert region.file.path.read_bytes() == b"y" * 100


def test_a_file_that_stays_is_written_by_its_mapping(region: Mapped) -> None:
    region.view[1000:1004] = b"abcd"
    assert region.file.get(999, 6) == b"xabcdx"
    assert not region.mapping.is_torn


def test_another_mapping_of_the_file_is_whole_again(region: Mapped) -> None:
    region.file.cut(0)
    assert bytes(region.view[:1]) == b"\0"
    region.file.path.write_bytes(b"z" * SIZE)
    other = mapped(region.file, SIZE)
    assert bytes(other.view[:1]) == b"z"
    assert (region.mapping.is_torn, other.mapping.is_torn) == (True, False)
    assert bytes(region.view[:1]) == b"\0"


def test_more_than_is_replaced_at_once() -> None:
    with shared_file(0, "guarded-large") as file:
        file.cut(150 * MIB)
        region = mapped(file, 150 * MIB)
        file.cut(0)
        assert not any(np.frombuffer(region.view, np.uint64))


def test_memory_is_unmapped_with_the_last_view(region: Mapped) -> None:
    name = region.file.path.name
    part = region.view[4096:8192]
    region.view = memoryview(b"")
    assert name in Path("/proc/self/maps").read_text()
    region.file.cut(0)
    assert bytes(part) == bytes(4096)
    del part
    assert name not in Path("/proc/self/maps").read_text()


def test_a_file_that_is_cut_while_it_is_copied_again_and_again() -> None:
    stopped = threading.Event()
    with shared_file(0, "guarded-busy") as file:

        def cut() -> None:
            while not stopped.is_set():
                file.cut(5000)
                file.cut(16 * MIB)

        def hold_the_gil() -> None:
            while not stopped.is_set():
                sum(range(1000))

        threads = [threading.Thread(target=work) for work in (cut, hold_the_gil)]
        for thread in threads:
            thread.start()
        torn = {"read": 0, "written": 0}

        def was_torn_both_ways() -> bool:
            for way in torn:
                region = mapped(file, 16 * MIB)
                if way == "read":
                    without_the_gil(region.view)
                else:
                    np.frombuffer(region.view, np.uint8)[:] = 1
                torn[way] += region.mapping.is_torn
            return all(torn.values())

        for _ in range(8):
            was_torn_both_ways()
        wait_until(was_torn_both_ways, "cuts while the file was copied")
        stopped.set()
        for thread in threads:
            thread.join()


TOUCHES_ANOTHER = """
import mmap, os, sys
from rocserve.plane.guarded_mapping import FaultGuard

with open(sys.argv[1], "r+b") as file:
    guard = FaultGuard()
    view, _ = guard.map(file.fileno(), 8192, True)
    other = mmap.mmap(file.fileno(), 8192)
    os.ftruncate(file.fileno(), 0)
    print(bytes(view) == bytes(8192), flush=True)
    other[4096]
"""


def test_a_fault_elsewhere_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", TOUCHES_ANOTHER, str(path)], capture_output=True, text=True, env=environment, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "True\n")
