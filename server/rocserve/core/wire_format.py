"""Reads and writes protobuf's wire format without protobuf (https://protobuf.dev/programming-guides/encoding/)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

Buffer = bytes | memoryview

VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, END_GROUP, FIXED32 = range(6)

LONGEST_VARINT = 10
"""Bytes of the longest varint: 64 bits, seven in each byte."""
_MOST = (1 << 64) - 1


class WireError(ValueError):
    """Bytes that are not valid protobuf."""


def read_varint(data: Buffer, position: int, longest: int = 5) -> tuple[int, int]:
    """Return a varint and the position after it. Raises IndexError at the end of data, WireError if it is too long: a
    length has five bytes at most, because messages are smaller than 2 GiB."""
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


def field_spans(data: Buffer) -> Iterator[tuple[int, int, int, int, int | None]]:
    """Yield a message's top-level fields: tag, position of the tag, position of the value (after the length if there is
    one), end, and the value if it is a varint. Raises WireError if the message ends within a field, has bytes that are
    not a field, or holds a group (long obsolete)."""
    position, end = 0, len(data)
    while position < end:
        start, value = position, None
        try:
            # Numbers of one byte, which most are, are read here: calls would take most of the time of a large graph.
            tag = data[position]
            position += 1
            if tag > 0x7F:
                tag, position = read_varint(data, start)
            content = position
            wire_type = tag & 7
            if wire_type == LENGTH_DELIMITED:
                length = data[position]
                content += 1
                if length > 0x7F:
                    length, content = read_varint(data, position)
                position = content + length
            elif wire_type == VARINT:
                value = data[position]
                position += 1
                if value > 0x7F:
                    value, position = read_varint(data, content, LONGEST_VARINT)
                    value &= _MOST
            elif wire_type in (FIXED32, FIXED64):
                position += 4 if wire_type == FIXED32 else 8
            if tag < 8 or wire_type > FIXED32 or wire_type == END_GROUP:
                raise WireError(f"byte {start} begins no field (number {tag >> 3}, wire type {wire_type})")
            if wire_type == START_GROUP:
                raise WireError(f"a group begins at byte {start}")
        except IndexError:
            raise WireError(f"the message ends within the field that begins at byte {start}") from None
        if position > end:
            past = f"{position - end} bytes past the end of the message ({end} bytes)"
            raise WireError(f"field {tag >> 3} at byte {start} runs {past}")
        yield tag, start, content, position, value


class WireMessage:
    """A message taken apart without its schema: each field's values by its number. A value is an unsigned number, or
    the bytes of a text, a message, a packed list or a fixed-size number: a part of the same kind, bytes or memoryview,
    as the message. Raises WireError as `field_spans`."""

    def __init__(self, message: Buffer) -> None:
        self.values: defaultdict[int, list[int | Buffer]] = defaultdict(list)
        for tag, _, content, end, value in field_spans(message):
            self.values[tag >> 3].append(message[content:end] if value is None else value)

    def parts(self, number: int) -> list[Buffer]:
        """Return the texts or messages of a field. Raises WireError if it has a number."""
        found = [value for value in self.values[number] if not isinstance(value, int)]
        if len(found) < len(self.values[number]):
            raise WireError("expected a message, got a number")
        return found

    def message(self, number: int) -> Buffer:
        """Return the field's message, joined if there are several, as protobuf merges them; empty = absent."""
        found = self.parts(number)
        return found[0] if len(found) == 1 else b"".join(found)

    def text(self, number: int) -> str:
        """Return the field's text, the last if there are several; "" = absent."""
        return str(self.parts(number)[-1], "utf-8") if self.values[number] else ""

    def number(self, number: int) -> int:
        """Return the field's unsigned number, the last if there are several; 0 = absent."""
        return next((value for value in reversed(self.values[number]) if isinstance(value, int)), 0)

    def signed(self, number: int) -> list[int]:
        """Return the field's signed numbers, packed or not."""
        found: list[int] = []
        for value in self.values[number]:
            if isinstance(value, int):
                found.append(value)
                continue
            position = 0
            while position < len(value):
                one, position = read_varint(value, position, LONGEST_VARINT)
                found.append(one & _MOST)
        return [one - (1 << 64) if one >= 1 << 63 else one for one in found]
