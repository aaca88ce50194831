"""Defines the messages between the server and a worker's instance: entries of 32 bytes, in rings and in tables of a
heap.

An entry is: kind, flags (u8 each), count (u16), number (u32), and three numbers a, b, c (u64 each) that depend on the
kind. Tensors and texts lie in slots of the sender's heap. A place is a slot's offset in the heap. A batch has one slot:
a table of entries first, then all data that is not PLACED or IN_FILE. A start is an offset in that slot.

Tensors of one layout lie as core.tensor_places defines. They are followed by details, as many bytes as the entry says:
the part of the message that is not in tensors. An entry that names tensors has: number = their layout, a = their
request or call, b = their place, c = bytes of their details.

From both ends:

- LAYOUT: number; a = place (in a table: start), b = bytes of the layout in JSON: a RequestLayout in a table of
  requests, else the tensors' heads. The number means this layout from then on.
- RESPONSE: of layout number; to request or call a, at b, with c bytes of details: its parameters in JSON. Flags: FINAL;
  NONE: the request ends without another response; ERROR: count = a status code, c = bytes of its text; AGAIN, from the
  worker: the request ends here and must be sent again in a later batch; AGAIN, from the server: the call must be sent
  again without references. If none of these: count = how many of the first tensors are references to tensors on a GPU,
  which stay valid until the place is returned. The receiver returns the place by RETURN.
- RETURN: count = how many of a, b and c are places in the receiver's heap that the sender has read.

From the server, on the ring WORK:

- BATCH: number = its id; a = place, b = entries of its table: LAYOUT and REQUEST. Flag GROUPED: the requests travel
  together and run one by one. The server keeps the slot until the batch is DONE.
- REQUEST: of layout number; a = its number; b = start of its inputs; c = bytes of its details (RequestDetails), and in
  the upper half their start. Flag PLACED: b is a place that is not in the slot; the server keeps it too. Flag IN_FILE:
  b is an offset in a client's file or another worker's heap, which has the number a (`passed_files.py`).
- FORGET: number = a file that no further request uses.

On the ring BACK, for models that see each request separately, LAYOUT, RESPONSE to calls, and:

- CANCELLED: a = number of a request whose client no longer waits for the answer.

On the ring RETURNS: RETURN.

From the worker, in addition to LAYOUT and RETURN:

- DONE: number = a batch's id; a, b, c = time.monotonic_ns() when its inputs were ready, its engine ended, and its
  outputs were ready. The next entry is RESULTS.
- RESULTS: a = place, b = entries of its table, all RESULT, c = bytes of the slot.
- RESULT: of layout number; a = how many requests have such a result, one after the other; 0 = one result for all
  requests, to be cut by their rows; b = start, c = bytes of details. Flag ERROR: as in RESPONSE. Flag OPEN: a requests
  are answered by RESPONSE.
- RESPONSE to requests, at any time.
- CALL: of layout number; a = its number, at b, with c bytes of details: a ModelCall in JSON, without its inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from rocserve.core.requests import InferRequest
from rocserve.core.sequences import SequenceId

ATTACH = struct.Struct("<I")
"""An instance's first message: how often the worker polls for a batch before it sleeps. Descriptors come with it: the
files of the worker's ring and of the server's rings, the worker's heap, the heap of the version's inputs, the page in
which the server notes that it sleeps, and, if the model sees each request separately, the back channel's socket. From
then on both sockets are doorbells."""

ENTRY = struct.Struct("<BBHIQQQ")
"""Kind, flags, count, number, a, b, c."""
PADDING_ENTRY = bytes(ENTRY.size)
"""Fills up a table of an odd number of entries: two entries are as long as a tensor's alignment."""

WORK, BACK, RETURNS = range(3)
SERVER_RINGS = (128, 1024, 1024)
"""Entries of each ring. WORK is short, because few batches are in flight at a time."""
WORKER_RINGS = (1024,)

BATCH, LAYOUT, REQUEST, RESPONSE, CANCELLED, RETURN, FORGET = range(1, 8)
DONE, RESULTS, RESULT, CALL = range(16, 20)

GROUPED = PLACED = 1
IN_FILE = 2
FINAL, NONE, ERROR, AGAIN, OPEN = 2, 4, 8, 16, 32

LONGEST_TEXT_BYTES = 1 << 20
"""Bound for a layout or details: so many bytes can be parsed between two requests."""
LARGEST_REMEMBERED_LAYOUT = 32 << 10
"""Bytes of a layout in a table of requests. A larger layout, such as with thousands of parameters, is kept for its
batch only."""
REMEMBERED_LAYOUTS = 256
"""Number of layouts, the last ones sent, that a sender may refer to. The receiver keeps twice as many, because one
thread may post while another defines layouts. Numbers are not reused."""


def returned_places(entries: bytes) -> Iterator[int]:
    for _, _, count, _, *places in ENTRY.iter_unpack(entries):
        yield from places[:count]


def return_entries(places: list[int]) -> bytes:
    entries = b""
    for start in range(0, len(places), 3):
        three = places[start : start + 3]
        entries += ENTRY.pack(RETURN, 0, len(three), 0, *three, *(0,) * (3 - len(three)))
    return entries


_START = struct.Struct("<QBII")


class RequestDetails(NamedTuple):
    """The part of a request that is neither layout nor inputs, for a model that sees each request separately. It
    follows the inputs, little-endian: the number of the sequence (u64), the sequence's flags (u8), the lengths of the
    request's id and of the sequence's text id (u32 each), these two texts and the trace context, in UTF-8. No bytes if
    all fields have their defaults. A NamedTuple, because it is the fastest type to make for each request."""

    request_id: str = ""
    correlation_id: SequenceId = 0
    flags: int = 0
    trace_context: str = ""
    """The W3C trace context, in JSON."""


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
    """Raises ValueError if the details are too short."""
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
