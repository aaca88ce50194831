"""Messages between the server and a worker's instance: entries of 32 bytes, in rings and in tables of a heap.

An entry is kind, flags (u8 each), count (u16), number (u32), and three numbers (u64 each) that depend on the kind.
Tensors and texts lie in slots of the sender's heap; (place) is a slot's offset. All of a batch lies in one
slot: a table of entries first, then what these name; (start) is a byte of that slot.

Tensors of one layout always lie as core.tensor_places has it, and behind them as many bytes of details as the entry
says: what belongs to the message beside them. Entries that name tensors: REQUEST, RESULT, RESPONSE, CALL, ANSWER.

From either end:

- LAYOUT: number; a = place (in a table: start), b = bytes of the layout in JSON: a RequestLayout in a table of
  requests, the tensors' heads elsewhere. It stands for that number from here on.
- RETURN: count = how many of a, b and c are places in the other's heap that have been read.

From the server, on the ring WORK:

- BATCH: number = its id; a = place, b = entries of its table: LAYOUT and REQUEST. flags GROUPED: the requests travel
  together, and run one by one. The server keeps the slot until the batch is DONE.
- REQUEST: number = its layout; a = its own number; b = start of its inputs, with flags PLACED a place of the heap that
  the server keeps too; c = bytes of its details (`request_details.py`), and in the upper half their start.

On the ring BACK, of models that see each request for itself, LAYOUT and:

- ANSWER: number = a call's; flags FINAL, NONE or ERROR; a = layout, b = place, c = bytes of the details: the parameters
  of the response in JSON. The worker gives the slot back by RETURN. With ERROR: count = a status code, c = bytes of its
  text.
- CANCELLED: a = a request's number. Nobody waits for its answer any more.

On the ring RETURNS: RETURN.

From the worker, beside LAYOUT and RETURN:

- DONE: number = a batch's id; a, b, c = time.monotonic_ns() when its inputs were there, its engine ended, its outputs
  were there. It is followed by RESULTS, or by FAILED.
- RESULTS: a = place, b = entries of its table, all RESULT, c = bytes of the slot.
- FAILED: count = a status code; a = place, b = bytes of a text: the batch as a whole has failed.
- RESULT: number = layout; a = the number of requests that have such a result, one behind the other; 0 = it is that
  of all requests together, to be cut by their rows; b = start, c = bytes of the details: as of ANSWER. flags ERROR: as
  of ANSWER. OPEN: the a requests are answered by RESPONSE.
- RESPONSE: number = layout; a = the request's number; b = place, c = bytes of the details, as of ANSWER, at any time.
  flags FINAL, NONE: the request ends without one more, ERROR, AGAIN: it ends here, and is to be sent again in a later
  batch.
- CALL: number = the call's; a = layout, b = place, c = bytes of the details: a ModelCall in JSON, without its inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

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

BATCH, LAYOUT, REQUEST, ANSWER, CANCELLED, RETURN = range(1, 7)
DONE, RESULTS, FAILED, RESULT, RESPONSE, CALL = range(16, 22)

GROUPED = PLACED = 1
FINAL, NONE, ERROR, AGAIN, OPEN = 2, 4, 8, 16, 32

LONGEST_TEXT_BYTES = 1 << 20
"""Of a layout, or of details: little enough to be read between two requests."""
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
