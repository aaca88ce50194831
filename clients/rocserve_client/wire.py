"""Protobuf messages whose large fields stay where they are.

A tensor's bytes pass through protobuf's own objects at the price of two or three copies. Here the small rest of a
message goes through protobuf, and its bulk fields are joined to it or cut out of it by the rules of the encoding
(protobuf.dev/programming-guides/encoding): a tag (field number * 8 + wire type) and, for bytes, a length and the
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

Buffer = bytes | memoryview

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


def join(head: bytes, field: int, contents: Iterable[Buffer]) -> bytes:
    """The message `head` with each of `contents` appended as bytes field `field`."""
    tag = _varint(field << 3 | _LENGTH_DELIMITED)
    parts: list[Buffer] = [head]
    for content in contents:
        parts += (tag + _varint(len(content)), content)
    return b"".join(parts)


def split(message: Buffer, field: int) -> tuple[bytes, list[memoryview]]:
    """The message without its bytes field `field`, and views on the field's contents in their order.

    Raises:
        ValueError: the message ends inside a field, or holds a wire type that protobuf no longer has.
    """
    view = memoryview(message)
    rest: list[Buffer] = []
    contents: list[memoryview] = []
    kept, position, end = 0, 0, len(view)
    while position < end:
        start = position
        tag, position = _read_varint(view, position)
        content, position = _read_content(view, position, tag & 7)
        if tag == field << 3 | _LENGTH_DELIMITED:
            contents.append(content)
            rest.append(view[kept:start])
            kept = position
    rest.append(view[kept:])
    return b"".join(rest), contents


def _read_content(view: memoryview, position: int, wire_type: int) -> tuple[memoryview, int]:
    """A field's content and the position behind it."""
    start = position
    if wire_type == _LENGTH_DELIMITED:
        length, start = _read_varint(view, position)
        position = start + length
    elif wire_type == _VARINT:
        _, position = _read_varint(view, position)
    elif wire_type == _FIXED64:
        position += 8
    elif wire_type == _FIXED32:
        position += 4
    else:
        raise ValueError(f"wire type {wire_type} is not one of protobuf's")
    if position > len(view):
        raise ValueError(f"the message ends {position - len(view)} bytes before its last field does")
    return view[start:position], position


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    if position < len(view) and view[position] < 0x80:  # Nearly all numbers of a message are this small.
        return view[position], position + 1
    value = shift = 0
    for byte in view[position : position + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position + shift // 7
    raise ValueError("the message ends inside a number")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
