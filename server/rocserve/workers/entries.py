"""Defines the messages between the server and a worker's instance: entries of 32 bytes, in rings and in tables of a
heap.

An entry has the fields of ENTRY: kind, last, count, layout, number, place, nbytes. Each kind has one meaning, and uses
the fields that are named with it; the others are 0. Tensors and texts lie in slots of the sender's heap: `place` is a
slot's offset in the heap. A batch has one slot, and so have its results: a table of entries first, then all data. In
such a table `place` is an offset in the slot.

Tensors of one layout lie as core.tensor_places defines. They are followed by details, the part of the message that is
not in tensors. A message that names tensors has the number of their `layout`, and `nbytes` of details.

From both ends:

- LAYOUT (layout, place, nbytes): the layout's number means this JSON from then on: the tensors' heads.
- RESPONSE (last, count, layout, number, place, nbytes): to the request or call of this number; details: parameters in
  JSON. `count`: how many of the first tensors are references to tensors on a GPU, which stay valid until the place is
  returned. `last`: no further response follows.
- FAILURE (last, count, number, place, nbytes): a response that is an error: its status code (`count`) and text.
- END (number): the request or call ends without another response.
- AGAIN (number): the request ends here and must be sent again in a later batch; the call must be sent again without
  references.
- RETURN (count): the first `count` of the fields number, place and nbytes are places in the receiver's heap that the
  sender has read, such as those of LAYOUT, RESPONSE and FAILURE.

From the server, on the ring WORK:

- BATCH (number, place, nbytes): `number` names the batch. Its table, of entries with the fields of REQUEST_ENTRY, has
  `nbytes`. The server keeps the slot until the batch is DONE.
- GROUPED_BATCH: as BATCH, but its requests only travel together, and run one by one.
- FORGET (number): no further request uses the file of this number.

In the table of a batch:

- LAYOUTS (layout, text start and bytes): new layouts. The text has a line for each, a RequestLayout in JSON; `layout`
  is the number of the first. This is the table's first entry. If there are no new layouts, that entry is empty.
- REQUEST (layout, number, place, text start and bytes): the text is its details (RequestDetails).
- PLACED_REQUEST: as REQUEST, but `place` is a place in the heap, outside of the slot; the server keeps it too.
- FILE_REQUEST: `place` is an offset in a client's file or another worker's heap, which has this number
  (`passed_files.py`).

On the ring BACK, for models that see each request separately: LAYOUT; RESPONSE, FAILURE, END and AGAIN to calls; and

- CANCELLED (number): the request's client no longer waits for the answer.

On the ring RETURNS: RETURN.

From the worker: LAYOUT; RETURN; RESPONSE, FAILURE, END and AGAIN to requests, at any time; and

- DONE (number, place, nbytes): the batch's results lie in a slot of `nbytes`, which begins with RESULTS_HEADER and a
  table.
- CALL (layout, number, place, nbytes): details: a ModelCall in JSON, without its inputs.

In the table of results, each for the next requests of the batch, whose count is `number`:

- RESULT (layout, number, place, nbytes): each request has such a result, one after the other.
- BATCH_RESULT: all requests have one result, to be cut by their rows.
- FAILURE (count, number, place, nbytes): the request has failed.
- BATCH_FAILURE: the batch has failed.
- OPEN (number): the requests are answered by messages.
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
"""Kind, last, count, layout, number, place, nbytes."""
REQUEST_ENTRY = struct.Struct("<B3xIQQII")
"""In the table of a batch: kind, layout, number, place, start and bytes of a text."""
RESULTS_HEADER = struct.Struct("<QQQQ")
"""The entries of the table that follows, and time.monotonic_ns() when the batch's inputs were ready, its engine ended,
and its outputs were ready."""
PADDING_ENTRY = bytes(ENTRY.size)
"""Fills up a table of an odd number of entries: two entries are as long as a tensor's alignment."""

WORK, BACK, RETURNS = range(3)
SERVER_RINGS = (128, 1024, 1024)
"""Entries of each ring. WORK is short, because few batches are in flight at a time."""
WORKER_RINGS = (1024,)

LAYOUT, RESPONSE, FAILURE, END, AGAIN, RETURN = range(1, 7)
ANSWERS = frozenset((RESPONSE, FAILURE, END, AGAIN))
"""Kinds of answers to a request or call."""
BATCH, GROUPED_BATCH, LAYOUTS, REQUEST, PLACED_REQUEST, FILE_REQUEST, CANCELLED, FORGET = range(16, 24)
DONE, RESULT, BATCH_RESULT, BATCH_FAILURE, OPEN, CALL = range(32, 38)

LONGEST_TEXT_BYTES = 1 << 20
"""Bound for a layout or details: so many bytes can be parsed between two requests."""
LARGEST_REMEMBERED_LAYOUT = 32 << 10
"""Bytes of a layout in a table of requests. A larger layout, such as with thousands of parameters, is kept for its
batch only."""
REMEMBERED_LAYOUTS = 1024
"""Number of layouts, the last ones sent, that a sender may refer to: each length of a text has one. The receiver keeps
twice as many, and all that were defined since it last read tensors: a batch may need more."""
LARGEST_LAYOUT = (1 << 32) - 1
"""An entry has no room for a larger number of a layout; the next one gets the number 0."""


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
