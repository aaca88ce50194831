"""References to tensors on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.device_references import (
    DeviceReference,
    References,
    in_rows,
    of_one_row_each,
    references_of,
    referred,
    referring,
    whole,
)
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import Tensor, encode_bytes_elements

PLACES = [DeviceReference(bytes(range(66)), 1024, 4096, 24 * row, DataType.FP32, (2, 3)) for row in range(3)]


def test_what_is_told_is_read() -> None:
    told = referring("x", PLACES)
    assert (told.name, told.datatype, told.shape) == ("x", DataType.BYTES, (3,))
    assert references_of(told) == PLACES
    rows = referred(told, batching=True)
    assert (rows.name, rows.datatype, rows.shape, type(rows.data)) == ("x", DataType.FP32, (3, 2, 3), References)
    assert references_of(rows) == PLACES
    assert referred(referring("x", PLACES[:1]), batching=False).shape == (2, 3)
    assert PLACES[0].nbytes == 24


def test_a_tensor_is_told_by_its_rows_and_as_a_whole() -> None:
    one = DeviceReference(bytes(64), 1024, 4096, 0, DataType.FP32, (3, 2, 3))
    rows = in_rows(referring("x", [one]))
    assert references_of(rows) == [replace(one, offset=24 * row, shape=(2, 3)) for row in range(3)]
    again = whole(of_one_row_each(rows))
    assert (again.shape, again.datatype, type(again.data)) == ((3, 2, 3), DataType.FP32, References)
    assert whole(referring("x", [one])).shape == (3, 2, 3)
    scalar = replace(one, shape=())
    assert whole(referring("x", [scalar])).shape == ()
    assert references_of(in_rows(referring("x", [scalar]))) == []
    with pytest.raises(ServeError, match="has no references"):
        whole(referring("x", []))


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
        referred(Tensor("x", DataType.BYTES, (1,), data), batching=True)
    assert raised.value.code is StatusCode.INTERNAL
