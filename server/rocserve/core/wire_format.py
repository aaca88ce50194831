"""Protobuf's wire format, as far as it is read and written by hand, without protobuf.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Buffer = bytes | memoryview

VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, END_GROUP, FIXED32 = range(6)

_LONGEST_LENGTH = 5
"""Bytes of the longest varint that states a length: messages end below 2 GiB."""
LONGEST_VARINT = 10
"""Bytes of one; each holds seven bits of 64."""


class WireError(ValueError):
    """The bytes are not what they were read as."""


@dataclass(frozen=True, slots=True)
class FieldSpan:
    """Where a field of a serialised message is."""

    number: int
    start: int
    """The first byte of its tag."""
    wire_type: int
    content: int
    """The first byte of its value, behind the length where it has one."""
    end: int


def read_varint(data: Buffer, position: int, longest: int = _LONGEST_LENGTH) -> tuple[int, int]:
    """A varint and the position behind it. Raises: IndexError: the data ends within the varint; WireError: it has more
    than `longest` bytes."""
    value = 0
    for shift in range(0, 7 * longest, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise WireError(f"a varint of more than {longest} bytes ends at byte {position}")


def varint(value: int) -> bytes:
    """A number >= 0 as a varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def length_prefix(number: int, length: int) -> bytes:
    """The tag and the length before the bytes of a length-delimited field."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(length)


def field_spans(data: Buffer) -> Iterator[FieldSpan]:
    """The top-level fields of a serialised message, up to the first group. Raises: WireError: a field has no legal tag
    or does not end within the data."""
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
