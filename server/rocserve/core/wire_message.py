"""Takes a protobuf message apart without its schema: each field's values by its number."""

from __future__ import annotations

from collections import defaultdict

from rocserve.core.wire_format import (
    FIXED32,
    FIXED64,
    LENGTH_DELIMITED,
    LONGEST_VARINT,
    START_GROUP,
    VARINT,
    Buffer,
    WireError,
    read_varint,
)

_MOST = (1 << 64) - 1


class WireMessage:
    """A value is an unsigned number, or the bytes of a text, a message, a packed list or a fixed-size number: a part of
    the same kind, bytes or memoryview, as the message. Raises WireError if the message ends within a field, has bytes
    that are not a field, or holds a group (long obsolete)."""

    def __init__(self, message: Buffer) -> None:
        self.values: defaultdict[int, list[int | Buffer]] = defaultdict(list)
        position, end, values = 0, len(message), self.values
        try:
            # Numbers of one byte, which most are, are read here: calls would take most of the time of a large graph.
            while position < end:
                start = position
                tag = message[position]
                position += 1
                if tag > 0x7F:
                    tag, position = read_varint(message, start)
                wire_type = tag & 7
                if wire_type == LENGTH_DELIMITED:
                    length = message[position]
                    position += 1
                    if length > 0x7F:
                        length, position = read_varint(message, position - 1)
                    value: int | Buffer = message[position : position + length]
                    position += length
                elif wire_type == VARINT:
                    value = message[position]
                    position += 1
                    if value > 0x7F:
                        value, position = read_varint(message, position - 1, LONGEST_VARINT)
                        value &= _MOST
                elif wire_type in (FIXED32, FIXED64):
                    length = 4 if wire_type == FIXED32 else 8
                    value = message[position : position + length]
                    position += length
                elif wire_type == START_GROUP:
                    raise WireError(f"a group begins at byte {start}")
                else:
                    raise _no_field(start, tag)
                if tag < 8:
                    raise _no_field(start, tag)
                values[tag >> 3].append(value)
        except IndexError:
            position = end + 1
        if position > end:
            raise WireError(f"the message ends within the field that begins at byte {start}")

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


def _no_field(start: int, tag: int) -> WireError:
    return WireError(f"byte {start} begins no field (number {tag >> 3}, wire type {tag & 7})")
