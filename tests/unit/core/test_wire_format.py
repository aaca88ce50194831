"""Taking protobuf messages apart without their schema."""

from __future__ import annotations

import pytest

from rocserve.core.wire_format import Buffer, WireError, WireMessage, length_prefix, varint


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_fields_of_all_kinds(kind: type[Buffer]) -> None:
    long = b"x" * 300
    message = varint(1 << 3) + varint(5) + varint(1 << 3) + varint((1 << 64) - 2)
    message += length_prefix(2, 300) + long + length_prefix(200, 2) + b"hi"
    message += varint(3 << 3 | 5) + b"abcd" + varint(4 << 3 | 1) + b"abcdefgh"
    read = WireMessage(kind(message))
    assert (read.number(1), read.signed(1)) == ((1 << 64) - 2, [5, -2])
    assert (read.parts(2), read.text(200)) == ([long], "hi")
    assert (read.parts(3), read.parts(4)) == ([b"abcd"], [b"abcdefgh"])
    assert (read.number(9), read.signed(9), read.text(9), read.message(9), read.parts(9)) == (0, [], "", b"", [])


def test_the_last_text_counts_and_messages_are_joined() -> None:
    read = WireMessage(length_prefix(1, 2) + b"ab" + length_prefix(1, 1) + b"c")
    assert (read.text(1), read.message(1)) == ("c", b"abc")


def test_packed_numbers() -> None:
    packed = varint(1) + varint(300) + varint((1 << 64) - 1)
    assert WireMessage(length_prefix(1, len(packed)) + packed).signed(1) == [1, 300, -1]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (b"\x0a\x05ab", r"field 1 at byte 0 runs 3 bytes past the end of the message \(4 bytes\)"),
        (b"\x08\x01\x0d\x00", r"field 1 at byte 2 runs 3 bytes past the end of the message \(4 bytes\)"),
        (b"\x08\x80", "ends within the field that begins at byte 0"),
        (b"\x0a", "ends within the field that begins at byte 0"),
        (b"\x08\x01\x0b\x0c", "a group begins at byte 2"),
        (b"\x0e", r"byte 0 begins no field \(number 1, wire type 6\)"),
        (b"\x00\x01", r"byte 0 begins no field \(number 0, wire type 0\)"),
        (b"\x08" + b"\xff" * 11, "a varint of more than 10 bytes"),
    ],
)
def test_damaged_messages(message: bytes, fault: str) -> None:
    with pytest.raises(WireError, match=fault):
        WireMessage(message)


def test_a_number_is_not_taken_for_a_message() -> None:
    with pytest.raises(WireError, match="expected a message, got a number"):
        WireMessage(b"\x08\x01").message(1)
