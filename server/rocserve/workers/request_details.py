"""What a request is beside its tensors, on its way to a model that sees each request for itself.

It travels as one more input of the batch, BYTES with one element a request: the request's number on the conversation
(u64), the number of its sequence (u64), its flags (u8), the lengths of its id and of the text that names its sequence
(u32 each), these two in UTF-8, and a RequestDetails in JSON. Little-endian. The JSON comes again and again and is made
and read once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rocserve.core.plain import to_json
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.sequences import SequenceId, SequenceTag
from rocserve.core.validation import RequestPlan
from rocserve.workers.messages import RequestDetails
from rocserve.workers.wire import REMEMBERED, LayoutReader

_START = struct.Struct("<QQBII")
_ELEMENT = struct.Struct("<IQQBII")
"""The length of a BYTES element, and what such an element begins with."""

_NO_SEQUENCE = SequenceTag()

RESERVED = frozenset({"priority", "timeout"})
"""Parameters that the protocol reads; so are those that begin with "triton_"."""


class DetailsWriter:
    """Writes the details of requests. May be called from several threads."""

    def __init__(self) -> None:
        self._written: dict[RequestPlan, bytes] = {}

    def write(self, number: int, request: InferRequest, plan: RequestPlan) -> bytes:
        """The element of one request, behind its length. `plan` is that of its head."""
        text = self._written.get(plan)
        if request.trace is not None and request.trace.context:
            text = to_json(replace(details_of(request.head, plan), trace_context=request.trace.context))
        elif text is None:
            text = to_json(details_of(request.head, plan))
            if len(self._written) >= REMEMBERED:
                self._written.clear()
            self._written[plan] = text
        name = request.id.encode(errors="replace")
        sequence = request.sequence
        if sequence is None:
            return _ELEMENT.pack(_START.size + len(name) + len(text), number, 0, 0, len(name), 0) + name + text
        label = sequence.id.encode(errors="replace") if isinstance(sequence.id, str) else b""
        index = 0 if isinstance(sequence.id, str) else sequence.id
        length = _START.size + len(name) + len(label) + len(text)
        return _ELEMENT.pack(length, number, index, sequence.flags, len(name), len(label)) + name + label + text


class WrittenDetails(NamedTuple):
    """What the element of one request says. A tuple, for one is made of each request."""

    number: int
    request_id: str
    correlation_id: SequenceId
    flags: int
    details: RequestDetails


class DetailsReader:
    """Reads them again."""

    def __init__(self) -> None:
        self._reader = LayoutReader(RequestDetails)

    def read(self, data: bytes) -> Iterator[WrittenDetails]:
        """Those of each request of a batch, from the data of the input that carries them.

        Raises:
            ValueError: the data ends within an element.
        """
        position = 0
        while position < len(data):
            id_start = position + _ELEMENT.size
            if id_start > len(data):
                raise ValueError(f"the details of a request have {len(data) - position} bytes")
            length, number, index, flags, id_length, label_length = _ELEMENT.unpack_from(data, position)
            id_end = id_start + id_length
            label_end = id_end + label_length
            position = id_start - _START.size + length
            if not label_end <= position <= len(data):
                raise ValueError(
                    f"the details of a request end at byte {position}, its names at {label_end}, of {len(data)}"
                )
            sequence: SequenceId = data[id_end:label_end].decode() if label_length else index
            details = self._reader.read(data[label_end:position])
            yield WrittenDetails(number, data[id_start:id_end].decode(), sequence, flags, details)


def details_of(head: RequestHead, plan: RequestPlan) -> RequestDetails:
    """What a client says in the head of its request."""
    return RequestDetails(
        requested_outputs=plan.outputs,
        priority=plan.priority,
        timeout_microseconds=plan.timeout_microseconds,
        parameters={
            name: value
            for name, value in head.parameters.items()
            if name not in RESERVED and not name.startswith("triton_")
        },
    )
