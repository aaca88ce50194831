"""Where tensors lie in a slot, and those of fixed sizes in one piece."""

from __future__ import annotations

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.tensor_places import PackedTensors, TensorPlaces
from rocserve.core.tensors import TensorHead

FIXED = TensorPlaces([TensorHead("A", DataType.UINT8, (1, 70)), TensorHead("B", DataType.INT32, (1, 2))])
DATA = [bytes(range(70)), b"12345678"]


def test_tensors_of_fixed_sizes_are_one_piece() -> None:
    pieces = FIXED.packed(DATA)
    assert pieces is not None
    block = b"".join(pieces)
    assert (len(block), FIXED.end) == (192, 192)
    packed = PackedTensors(memoryview(block), FIXED)
    assert ([bytes(each) for each in packed], len(packed), packed.sizes) == (DATA, 2, [70, 8])
    assert bytes(packed[1]) == DATA[1] and [bytes(each) for each in packed[:1]] == DATA[:1]
    assert FIXED.packed(packed) == (block,)
    assert FIXED.pieces(packed) == ((block,), 192)


def test_other_sizes_are_no_such_piece() -> None:
    assert FIXED.packed([DATA[0], b"1234"]) is None
    with pytest.raises(ServeError, match="'B' of shape \\[1, 2\\] needs 8 bytes, got 4"):
        FIXED.pieces([DATA[0], b"1234"])
    with pytest.raises(ValueError, match="in 128 bytes"):
        PackedTensors(memoryview(bytes(128)), FIXED)


def test_strings_stand_behind_their_sizes() -> None:
    places = TensorPlaces([TensorHead("S", DataType.BYTES, (1,)), TensorHead("B", DataType.INT32, (1, 2))])
    data = [b"\3\0\0\0abc", DATA[1]]
    assert places.packed(data) is None
    pieces, nbytes = places.pieces(data)
    slot = memoryview(b"".join(pieces))
    bounds, end = places.of(slot)
    assert ([bytes(slot[begin:finish]) for begin, finish in bounds], end, nbytes) == (data, 192, 192)
