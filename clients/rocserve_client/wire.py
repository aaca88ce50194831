"""Joins and splits protobuf messages with large fields, without copying the fields through protobuf.

protobuf's own objects would copy a tensor's bytes two or three times. Here protobuf encodes only the small rest of a
message; the bulk fields are joined to it, or cut out of it, by the rules of the encoding.
"""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.core.wire_format import LENGTH_DELIMITED, Buffer, field_spans, length_prefix


def join(head: bytes, field: int, contents: Iterable[Buffer]) -> bytes:
    """Return the message `head` with each of `contents` appended as bytes field `field`."""
    parts: list[Buffer] = [head]
    for content in contents:
        parts += (length_prefix(field, len(content)), content)
    return b"".join(parts)


def split(message: Buffer, field: int) -> tuple[bytes, list[memoryview]]:
    """Return the message without its bytes field `field`, and views on the field's contents in order. Raises WireError
    if the bytes are not a protobuf message."""
    view = memoryview(message)
    rest: list[Buffer] = []
    contents: list[memoryview] = []
    kept = 0
    for tag, start, content, end, _ in field_spans(view):
        if tag == field << 3 | LENGTH_DELIMITED:
            contents.append(view[content:end])
            rest.append(view[kept:start])
            kept = end
    rest.append(view[kept:])
    return b"".join(rest), contents
