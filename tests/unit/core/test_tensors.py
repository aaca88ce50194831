"""BYTES elements are counted in steps, and errors in them are reported; places of tensors in a slot; references to
tensors on a GPU; the classification extension."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.device_references import (
    DeviceReference,
    References,
    as_single_row_batches,
    join_references,
    pack_references,
    references_of,
    split_into_rows,
)
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensor_places import PackedTensors, TensorPlaces
from rocserve.core.tensors import (
    COUNTED_AT_ONCE,
    Tensor,
    TensorHead,
    bytes_elements,
    classify,
    count_elements,
    element_fault,
    encode_bytes_elements,
    tensor_from_numpy,
)


@pytest.mark.parametrize(
    ("data", "expected", "fault"),
    [
        (b"", 0, ""),
        (encode_bytes_elements([b"ab", b"", b"c"]), 3, ""),
        (encode_bytes_elements([b"ab", b""]), 3, "expected 3 string elements for {where}, got 2"),
        (
            encode_bytes_elements([b"ab", b"", b"c"]),
            2,
            "unexpected number of string elements 3 for {where}, expecting 2",
        ),
        (bytes(4), 0, "unexpected number of string elements 1 for {where}, expecting 0"),
        (b"\x05\0\0\0abc", 1, "incomplete string data for {where}, expecting string of length 5 but only 3"),
        (b"\x05\0\0\0abc", 2, "incomplete string data for {where}, expecting string of length 5 but only 3"),
        (b"\x01\0\0\0a\0\0", 1, "incomplete string length indicator for {where}, expecting 4 bytes but only 2"),
        (b"\x01\0\0\0a\0\0", 2, "incomplete string length indicator for {where}, expecting 4 bytes but only 2"),
    ],
)
def test_faults_of_elements(data: bytes, expected: int, fault: str) -> None:
    found = element_fault(data, expected)
    assert found.startswith(fault) if fault else not found


def test_views_of_elements() -> None:
    assert [*map(bytes, bytes_elements(encode_bytes_elements([b"ab", b"", b"c"]), 3, "TEXT"))] == [b"ab", b"", b"c"]


def test_many_elements_are_counted_in_steps() -> None:
    count = 2 * COUNTED_AT_ONCE + 1
    assert len(list(count_elements(bytes(4 * count), count))) == 3
    assert element_fault(bytes(4 * count), count) == ""
    assert element_fault(bytes(4 * count), count + 1).endswith(f"got {count}")


FIXED = TensorPlaces([TensorHead("A", DataType.UINT8, (1, 70)), TensorHead("B", DataType.INT32, (1, 2))])
DATA = [bytes(range(70)), b"12345678"]


def test_tensors_of_fixed_sizes_are_one_piece() -> None:
    pieces = FIXED.packed(DATA)
    assert pieces is not None
    block = b"".join(pieces)
    assert (len(block), FIXED.end) == (192, 192)
    packed = PackedTensors(memoryview(block), FIXED)
    assert ([bytes(one) for one in packed], len(packed), packed.sizes) == (DATA, 2, [70, 8])
    assert bytes(packed[1]) == DATA[1] and [bytes(one) for one in packed[:1]] == DATA[:1]
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


PLACES = [DeviceReference(bytes(range(66)), 1024, 4096, 24 * row, DataType.FP32, (2, 3)) for row in range(3)]


def test_packed_references_are_read() -> None:
    told = pack_references("x", PLACES)
    assert (told.name, told.datatype, told.shape) == ("x", DataType.BYTES, (3,))
    assert references_of(told) == PLACES
    rows = join_references(told, are_rows=True)
    assert (rows.name, rows.datatype, rows.shape, type(rows.data)) == ("x", DataType.FP32, (3, 2, 3), References)
    assert references_of(rows) == PLACES
    assert join_references(pack_references("x", PLACES[:1])).shape == (2, 3)
    assert PLACES[0].nbytes == 24


def test_references_name_the_rows_of_a_tensor_or_the_whole() -> None:
    one = DeviceReference(bytes(64), 1024, 4096, 0, DataType.FP32, (3, 2, 3))
    rows = split_into_rows(pack_references("x", [one]))
    assert references_of(rows) == [replace(one, offset=24 * row, shape=(2, 3)) for row in range(3)]
    again = join_references(as_single_row_batches(rows))
    assert (again.shape, again.datatype, type(again.data)) == ((3, 2, 3), DataType.FP32, References)
    assert join_references(pack_references("x", [one])).shape == (3, 2, 3)
    scalar = replace(one, shape=())
    assert join_references(pack_references("x", [scalar])).shape == ()
    assert references_of(split_into_rows(pack_references("x", [scalar]))) == []
    with pytest.raises(ServeError, match="has no references"):
        join_references(pack_references("x", []))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1",
        encode_bytes_elements([b"short"]),
        encode_bytes_elements([PLACES[0].packed()[:30]]),
        encode_bytes_elements([PLACES[0].packed()])[:40],
        encode_bytes_elements([bytes(24) + b"\xff" + PLACES[0].packed()[25:]]),
    ],
)
def test_what_is_damaged_is_refused(data: bytes) -> None:
    with pytest.raises(ServeError, match="tensor 'x' on a GPU has") as raised:
        join_references(Tensor("x", DataType.BYTES, (1,), data), are_rows=True)
    assert raised.value.code is StatusCode.INTERNAL


def test_the_highest_first_with_labels():
    tensor = tensor_from_numpy("P", np.array([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25]], np.float32))
    ranked = classify(tensor, 2, ("zero", "one"), batching=True)
    assert ranked.datatype is DataType.BYTES
    assert ranked.shape == (2, 2)
    assert ranked.numpy().tolist() == [[b"0.700000:1:one", b"0.200000:2"], [b"0.500000:0:zero", b"0.250000:1:one"]]


def test_more_classes_than_there_are_and_no_batching():
    tensor = tensor_from_numpy("P", np.array([3, 9], np.int64))
    ranked = classify(tensor, 5, (), batching=False)
    assert ranked.shape == (2,)
    assert ranked.numpy().tolist() == [b"9:1", b"3:0"]


@pytest.mark.parametrize(
    ("shape", "batching", "ranked"), [((0, 2), True, (0, 2)), ((2, 0), True, (2, 0)), ((0,), False, (0,))]
)
def test_nothing_has_no_classes(shape, batching, ranked):
    assert classify(tensor_from_numpy("P", np.zeros(shape, np.float32)), 5, (), batching).shape == ranked


def test_texts_have_no_rank():
    tensor = tensor_from_numpy("P", np.array([b"a"], np.object_))
    with pytest.raises(ServeError, match="class result not available for output due to unsupported type 'BYTES'"):
        classify(tensor, 1, (), batching=False)


def test_neither_more_values_nor_more_classes_than_others_can_wait_for():
    with pytest.raises(ServeError, match="with 1048577 values and 1 classes, at most 1048576 and 65536 can be"):
        classify(tensor_from_numpy("P", np.zeros((1 << 20) + 1, np.float32)), 1, (), batching=False)
    with pytest.raises(ServeError, match="with 131072 values and 131072 classes"):
        classify(tensor_from_numpy("P", np.zeros((2, 1 << 16), np.float32)), 1 << 16, (), batching=True)
