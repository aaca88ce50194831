"""What a request is beside its tensors, on its way to a model that sees each request for itself.

It travels as one more input of the batch, BYTES with one element a request: the request's number on the conversation
(u64), the length of its id (u32), its id in UTF-8, and a RequestDetails in JSON. Little-endian. The JSON comes
again and again and is made and read once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rocserve.core.requests import ParameterValue, RequestHead
from rocserve.core.tensors import encode_bytes_elements
from rocserve.core.validation import RequestPlan
from rocserve.workers.messages import RequestDetails
from rocserve.workers.plain import to_json
from rocserve.workers.wire import REMEMBERED, LayoutReader

_START = struct.Struct("<QI")

SEQUENCE_START = 1
SEQUENCE_END = 2
"""Triton's flags."""

RESERVED = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"})
"""Parameters that the protocol reads; so are those that begin with "triton_"."""


@dataclass(frozen=True, slots=True)
class ReceivedDetails:
    number: int
    id: str
    details: RequestDetails


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
        return encode_bytes_elements([_START.pack(number, len(name)) + name + text])


class DetailsReader:
    """Reads them again."""

    def __init__(self) -> None:
        self._reader = LayoutReader(RequestDetails)

    def read(self, element: memoryview) -> ReceivedDetails:
        """Raises: ValueError."""
        if len(element) < _START.size:
            raise ValueError(f"the details of a request have {len(element)} bytes")
        number, length = _START.unpack_from(element)
        end = _START.size + length
        return ReceivedDetails(
            number, bytes(element[_START.size : end]).decode(), self._reader.read(bytes(element[end:]))
        )


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
