"""Looks into messages in protobuf's wire format without knowing their types: their fields, in their order.

Bounded by the bytes that there are: nothing is followed, allocated or repeated because a message says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from rocserve.core.wire_format import LONGEST_VARINT, VARINT, WireError, field_spans, read_varint

_MOST = (1 << 64) - 1


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The number and value of each field: an unsigned number, or the bytes of text, of a message, of a packed list or
    of a number of fixed size.

    Raises:
        WireError: the message ends within a field, or has what is none, or a group, which nobody writes any more.
    """
    end = 0
    for span in field_spans(message):
        end = span.end
        if span.wire_type == VARINT:
            yield span.number, read_varint(message, span.content, LONGEST_VARINT)[0] & _MOST
        else:
            yield span.number, message[span.content : end]
    if end < len(message):
        raise WireError(f"a group begins at byte {end}")
