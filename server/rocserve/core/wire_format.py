"""Reads and writes protobuf's wire format without protobuf (https://protobuf.dev/programming-guides/encoding/)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Buffer = bytes | memoryview

VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, END_GROUP, FIXED32 = range(6)

_LONGEST_LENGTH = 5
"""Bytes of a length's varint: messages are smaller than 2 GiB."""
LONGEST_VARINT = 10
"""Bytes of the longest varint: 64 bits, seven in each byte."""


class WireError(ValueError):
    """Bytes that are not valid protobuf."""


@dataclass(frozen=True, slots=True)
class FieldSpan:
    """The position of a field in a serialised message."""

    number: int
    start: int
    """Position of its tag."""
    wire_type: int
    content: int
    """Position of its value, after the length if there is one."""
    end: int


def read_varint(data: Buffer, position: int, longest: int = _LONGEST_LENGTH) -> tuple[int, int]:
    """Return a varint and the position after it. Raises IndexError at the end of data, WireError if it is too long."""
    value = 0
    for shift in range(0, 7 * longest, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise WireError(f"a varint of more than {longest} bytes ends at byte {position}")


def varint(value: int) -> bytes:
    """Encode a number >= 0 as a varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def length_prefix(number: int, length: int) -> bytes:
    """Encode the tag and the length that precede a length-delimited field."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(length)


def field_spans(data: Buffer) -> Iterator[FieldSpan]:
    """Yield a message's top-level fields, up to the first group. Raises WireError for an invalid tag or length."""
    position, end = 0, len(data)
    while position < end:
        start = position
        try:
            tag, position = read_varint(data, start)
            number, wire_type = tag >> 3, tag & 7
            if number == 0 or wire_type > FIXED32 or wire_type == END_GROUP:
                raise WireError(f"byte {start} begins no field (number {number}, wire type {wire_type})")
            if wire_type == START_GROUP:
                return
            content = position
            if wire_type == VARINT:
                position = read_varint(data, position, LONGEST_VARINT)[1]
            elif wire_type == LENGTH_DELIMITED:
                length, content = read_varint(data, position)
                position = content + length
            else:
                position += 8 if wire_type == FIXED64 else 4
        except IndexError:
            raise WireError(f"the message ends within the field that begins at byte {start}") from None
        if position > end:
            raise WireError(
                f"field {number} at byte {start} runs {position - end} bytes past the end of the message ({end} bytes)"
            )
        yield FieldSpan(number, start, wire_type, content, position)
