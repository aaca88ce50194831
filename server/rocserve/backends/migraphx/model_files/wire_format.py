"""Reads protobuf's wire format, as far as looking into a message takes: its fields, in their order.

Bounded by the bytes that there are: nothing is followed, allocated or repeated because a message says so.
"""

from __future__ import annotations

from collections.abc import Iterator

_LONGEST_VARINT = 10
"""Bytes of one; each holds seven bits of 64."""


class WireError(ValueError):
    """The bytes are no message."""


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The number and value of each field: an unsigned number, or the bytes of text, of a message, of a packed list or
    of a number of fixed size.

    Raises:
        WireError: the message ends within a field, or has what is none.
    """
    position, end = 0, len(message)
    while position < end:
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError(f"a field without a number before byte {position}")
        if kind == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        if kind == 2:
            length, position = _varint(message, position)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise WireError(f"a field of unknown kind {kind} before byte {position}")
        if length > end - position:
            raise WireError(f"it ends within a field of {length} bytes at byte {position}")
        yield number, message[position : position + length]
        position += length


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """A number, and where the next field's byte is."""
    value = 0
    for index, byte in enumerate(message[position : position + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + index + 1
    raise WireError(f"no number at byte {position}")
