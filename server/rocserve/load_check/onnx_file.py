"""Reads the graph of an ONNX file without its large weights, of which a file may have gigabytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rocserve.core.wire_format import LENGTH_DELIMITED, Buffer, field_spans, length_prefix

if TYPE_CHECKING:
    import onnx

_WEIGHTS = (7, 5)
"""The numbers of the fields `graph` in ModelProto and `initializer` in GraphProto (onnx.proto)."""
_LARGE = 1 << 19
"""Bytes of a field of an initializer that is left out: 2^16 numbers, the largest constant that anybody here looks at,
take no more."""


def read_without_weights(path: Path) -> onnx.ModelProto:
    """Return the model in a file; external data is not read. Raises OSError, ValueError or one of protobuf's errors if
    it cannot be read."""
    import onnx

    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return onnx.load_from_string(b"".join(_kept(data, _WEIGHTS)))


def _kept(message: memoryview, within: tuple[int, ...]) -> Iterator[Buffer]:
    """Yield a message's bytes, without the large fields of the messages in its field `within`; of the message itself if
    that is empty."""
    begin = 0
    for span in field_spans(message):
        if span.wire_type != LENGTH_DELIMITED or span.end - span.content <= _LARGE:
            continue
        if within and span.number != within[0]:
            continue
        yield message[begin : span.start]
        begin = span.end
        if within:
            content = b"".join(_kept(message[span.content : span.end], within[1:]))
            yield length_prefix(span.number, len(content)) + content
    yield message[begin:]
