"""What a request is beside its tensors, on its way to a model that sees each request for itself.

It travels as one more input of the batch, BYTES with one element a request: the request's number on the conversation
(u64), the length of its id (u32), its id in UTF-8, and a RequestDetails in JSON. Little-endian. The JSON comes
again and again and is made and read once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from rocserve.core.plain import to_json
from rocserve.core.requests import ParameterValue, RequestHead
from rocserve.core.validation import RequestPlan
from rocserve.workers.messages import RequestDetails
from rocserve.workers.wire import REMEMBERED, LayoutReader

_START = struct.Struct("<QI")
_ELEMENT = struct.Struct("<IQI")
"""The length of a BYTES element, and what such an element begins with."""

SEQUENCE_START = 1
SEQUENCE_END = 2
"""Triton's flags."""

RESERVED = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"})
"""Parameters that the protocol reads; so are those that begin with "triton_"."""


class DetailsWriter:
    """Writes the details of requests. May be called from several threads."""

    def __init__(self) -> None:
        self._written: dict[RequestPlan, bytes] = {}

    def write(self, number: int, request_id: str, head: RequestHead, plan: RequestPlan) -> bytes:
        """The element of one request, behind its length. `plan` is that of `head`."""
        text = self._written.get(plan)
        if text is None:
            text = to_json(details_of(head, plan))
            if len(self._written) >= REMEMBERED:
                self._written.clear()
            self._written[plan] = text
        name = request_id.encode(errors="replace")
        return _ELEMENT.pack(_START.size + len(name) + len(text), number, len(name)) + name + text


class DetailsReader:
    """Reads them again."""

    def __init__(self) -> None:
        self._reader = LayoutReader(RequestDetails)

    def read(self, data: bytes) -> Iterator[tuple[int, str, RequestDetails]]:
        """The number, the id and the rest of each request of a batch, from the data of the input that carries them.

        Raises:
            ValueError: the data ends within an element.
        """
        position = 0
        while position < len(data):
            id_start = position + _ELEMENT.size
            if id_start > len(data):
                raise ValueError(f"the details of a request have {len(data) - position} bytes")
            length, number, id_length = _ELEMENT.unpack_from(data, position)
            id_end = id_start + id_length
            position = id_start - _START.size + length
            if not id_end <= position <= len(data):
                raise ValueError(f"the details of a request end at byte {position}, its id at {id_end}, of {len(data)}")
            yield number, data[id_start:id_end].decode(), self._reader.read(data[id_end:position])


def details_of(head: RequestHead, plan: RequestPlan) -> RequestDetails:
    """What a client says in the head of its request."""
    parameters = head.parameters
    starts, ends = parameters.get("sequence_start") is True, parameters.get("sequence_end") is True
    return RequestDetails(
        requested_outputs=plan.outputs,
        correlation_id=_correlation_id(parameters.get("sequence_id", 0)),
        flags=SEQUENCE_START * starts + SEQUENCE_END * ends,
        priority=plan.priority,
        timeout_microseconds=plan.timeout_microseconds,
        parameters={
            name: value for name, value in parameters.items() if name not in RESERVED and not name.startswith("triton_")
        },
    )


def _correlation_id(value: ParameterValue) -> int | str:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else 0
