"""Heaps of which others own shares: what lies in one is read where it is, and lives as long as somebody holds it."""

from __future__ import annotations

import gc

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.tensor_places import PlacedTensors, TensorPlaces
from rocserve.core.tensors import TensorHead
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
    assert [bytes(each) for each in data] == [b"12345678"]
    del data
    gc.collect()
    again = lent(heap)
    assert again.number == number
    # The memory of its last owner has been given back.
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
