"""Details of a request: its part that is neither in its text nor in its tensors."""

from __future__ import annotations

import struct
from typing import NamedTuple

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId
from rocserve.core.tensors import Buffer

_LENGTHS = struct.Struct("<QBIIII")


class RequestDetails(NamedTuple):
    """The details, little-endian: the number of the sequence (u64), the sequence's flags (u8), the lengths of the
    request's id, of the sequence's text id, of the trace context and of the origin (u32 each), then these texts in
    UTF-8. No bytes if all fields have their defaults. A NamedTuple, because it is the fastest type to make for each
    request."""

    request_id: str = ""
    correlation_id: SequenceId = 0
    flags: int = 0
    trace_context: str = ""
    """The W3C trace context, in JSON; only to models that see each request separately."""
    origin: bytes = b""
    """Who sent the request, in JSON; only from front ends, if the server wants it."""


NO_DETAILS = RequestDetails()


def write_details(request: InferRequest, origin: bytes = b"") -> bytes:
    context = request.trace.context if request.trace is not None else ""
    sequence = request.sequence
    if sequence is None:
        if not request.id and not context and not origin:
            return b""
        index, label, flags = 0, b"", 0
    elif isinstance(sequence.id, str):
        index, label, flags = 0, sequence.id.encode(errors="replace"), sequence.flags
    else:
        index, label, flags = sequence.id, b"", sequence.flags
    name, about = request.id.encode(errors="replace"), context.encode()
    lengths = _LENGTHS.pack(index, flags, len(name), len(label), len(about), len(origin))
    return lengths + name + label + about + origin


def read_details(data: Buffer) -> RequestDetails:
    """Read details from the beginning of `data`, which may be longer. Raises ValueError if they are cut off."""
    if not data:
        return NO_DETAILS
    if len(data) < _LENGTHS.size:
        raise ValueError(f"the details of a request have {len(data)} bytes")
    index, flags, *lengths = _LENGTHS.unpack_from(data)
    end = _LENGTHS.size
    texts: list[bytes] = []
    for length in lengths:
        texts.append(bytes(data[end : end + length]))
        end += length
    if end > len(data):
        raise ValueError(f"the names in the details of a request end at byte {end} of {len(data)}")
    name, label, about, origin = texts
    return RequestDetails(name.decode(), label.decode() if label else index, flags, about.decode(), origin)
