"""What a request says of itself alone, on its way to a model that sees each request for itself.

It stands behind the request's inputs: the number of its sequence (u64), its flags (u8), the lengths of its id and of
the text that names its sequence (u32 each), these two and the trace context, in UTF-8. Little-endian. A request that
says nothing has none of it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId

_START = struct.Struct("<QBII")


class RequestDetails(NamedTuple):
    """A tuple, for one is made of each request."""

    request_id: str = ""
    correlation_id: SequenceId = 0
    flags: int = 0
    """Of a sequence."""
    trace_context: str = ""
    """W3C's, in JSON."""


NO_DETAILS = RequestDetails()


def write_details(request: InferRequest) -> bytes:
    context = request.trace.context if request.trace is not None else ""
    sequence = request.sequence
    if sequence is None:
        if not request.id and not context:
            return b""
        index, label, flags = 0, b"", 0
    elif isinstance(sequence.id, str):
        index, label, flags = 0, sequence.id.encode(errors="replace"), sequence.flags
    else:
        index, label, flags = sequence.id, b"", sequence.flags
    name = request.id.encode(errors="replace")
    return _START.pack(index, flags, len(name), len(label)) + name + label + context.encode()


def read_details(data: bytes) -> RequestDetails:
    """Raises: ValueError: it ends too early."""
    if not data:
        return NO_DETAILS
    if len(data) < _START.size:
        raise ValueError(f"the details of a request have {len(data)} bytes")
    index, flags, id_length, label_length = _START.unpack_from(data)
    id_end = _START.size + id_length
    label_end = id_end + label_length
    if label_end > len(data):
        raise ValueError(f"the names in the details of a request end at byte {label_end} of {len(data)}")
    sequence: SequenceId = data[id_end:label_end].decode() if label_length else index
    return RequestDetails(data[_START.size : id_end].decode(), sequence, flags, data[label_end:].decode())
