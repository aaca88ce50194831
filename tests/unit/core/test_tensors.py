"""Elements of BYTES are counted in steps, and what is wrong with them is told."""

from __future__ import annotations

import pytest

from rocserve.core.tensors import COUNTED_AT_ONCE, bytes_elements, count_elements, element_fault, encode_bytes_elements


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
