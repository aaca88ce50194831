"""Messages between the server and a worker's instance: entries of 32 bytes, in rings and in tables of a heap.

An entry is kind, flags (u8 each), count (u16), number (u32), and three numbers (u64 each) that depend on the kind.
Tensors and texts lie in slots of the sender's heap; (place) is a slot's offset. All of a batch lies in one
slot: a table of entries first, then what these name; (start) is a byte of that slot.

Tensors of one layout always lie as core.tensor_places has it, and behind them as many bytes of details as the entry
says: what belongs to the message beside them. Entries that name tensors have their layout as number, their request or
call as a, their place as b, and the bytes of their details as c.

From either end:

- LAYOUT: number; a = place (in a table: start), b = bytes of the layout in JSON: a RequestLayout in a table of
  requests, the tensors' heads elsewhere. It stands for that number from here on.
- RESPONSE: of layout number; to request or call a, at b, with c bytes of details: its parameters in JSON. flags FINAL;
  NONE: the request ends without one more; ERROR: count = a status code, c = bytes of its text; AGAIN, from the worker:
  the request ends here, and is to be sent again in a later batch; from the server: the call is to be sent again without
  references. Else count = how many of the first tensors are references to tensors on a GPU, which stay until the place
  is given back. The receiver gives the place back by RETURN.
- RETURN: count = how many of a, b and c are places in the other's heap that have been read.

From the server, on the ring WORK:

- BATCH: number = its id; a = place, b = entries of its table: LAYOUT and REQUEST. flags GROUPED: the requests travel
  together, and run one by one. The server keeps the slot until the batch is DONE.
- REQUEST: of layout number; its own number a; b = start of its inputs, with flags PLACED a place of the heap that the
  server keeps too, with IN_FILE one of the client's file, or the other worker's heap, of number a (`given_files.py`);
  c = bytes of its details (RequestDetails), and in the upper half their start.
- FORGET: number = a file's, of which no request comes any more.

On the ring BACK, of models that see each request for itself, LAYOUT, RESPONSE to calls, and:

- CANCELLED: a = a request's number. Nobody waits for its answer any more.

On the ring RETURNS: RETURN.

From the worker, beside LAYOUT and RETURN:

- DONE: number = a batch's id; a, b, c = time.monotonic_ns() when its inputs were there, its engine ended, its outputs
  were there. It is followed by RESULTS.
- RESULTS: a = place, b = entries of its table, all RESULT, c = bytes of the slot.
- RESULT: of layout number; a = the number of requests that have such a result, one behind the other; 0 = it is that of
  all requests together, to be cut by their rows; b = start, c = bytes of details, and flags ERROR as of RESPONSE. OPEN:
  the a requests are answered by RESPONSE.
- RESPONSE to requests, at any time.
- CALL: of layout number; its own number a, at b, with c bytes of details: a ModelCall in JSON, without its inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId

ATTACH = struct.Struct("<I")
"""What the server says over an instance's socket: how often the worker looks for a batch before it sleeps. With it
come, as descriptors, the worker's ring and the server's, the worker's heap, the heap of the version's inputs, the page
where the server says that it sleeps, and the socket of its back channel where the model sees each request for itself.
From then on the sockets are the doorbells of both."""

ENTRY = struct.Struct("<BBHIQQQ")
"""Kind, flags, count, number, a, b, c."""
NO_ENTRY = bytes(ENTRY.size)
"""Fills up a table of an odd number of entries: two take as much as tensors are aligned to."""

WORK, BACK, RETURNS = range(3)
"""The server's rings."""
SERVER_RINGS = (128, 1024, 1024)
"""Their entries: there are only a few batches at a time."""
WORKER_RINGS = (1024,)

BATCH, LAYOUT, REQUEST, RESPONSE, CANCELLED, RETURN, FORGET = range(1, 8)
DONE, RESULTS, RESULT, CALL = range(16, 20)

GROUPED = PLACED = 1
IN_FILE = 2
FINAL, NONE, ERROR, AGAIN, OPEN = 2, 4, 8, 16, 32

LONGEST_TEXT_BYTES = 1 << 20
"""Of a layout, or of details: little enough to be read between two requests."""
LARGEST_REMEMBERED_LAYOUT = 32 << 10
"""Bytes of a layout in a table of requests. A larger one, with thousands of a client's parameters say, stands for its
number in that batch only."""
REMEMBERED_LAYOUTS = 256
"""A sender refers to its last ones, this many, and the other end keeps twice as many, for what one thread posts while
another defines more. Numbers are not used again."""


def returned_places(entries: bytes) -> Iterator[int]:
    """Those that RETURNs name."""
    for _, _, count, _, *places in ENTRY.iter_unpack(entries):
        yield from places[:count]


def return_entries(places: list[int]) -> bytes:
    """RETURNs for places."""
    entries = b""
    for start in range(0, len(places), 3):
        three = places[start : start + 3]
        entries += ENTRY.pack(RETURN, 0, len(three), 0, *three, *(0,) * (3 - len(three)))
    return entries


_START = struct.Struct("<QBII")


class RequestDetails(NamedTuple):
    """What a request says of itself alone, on its way to a model that sees each request for itself.

    It stands behind the request's inputs: the number of its sequence (u64), its flags (u8), the lengths of its id and
    of the text that names its sequence (u32 each), these two and the trace context, in UTF-8. Little-endian. A request
    that says nothing has none of it. A tuple, for one is made of each request.
    """

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
