"""What the server and a worker's instance tell each other: entries of 32 bytes, in rings and in tables of a heap.

An entry is kind, flags (u8 each), count (u16), number (u32), and three numbers (u64 each) that depend on the kind.
Tensors and texts lie in slots of the heap of whoever sends them; (place) is a slot's offset. All of a batch lies in one
slot: a table of entries first, then what these tell of; (start) is a byte of that slot.

From the server, on the ring WORK:

- BATCH: number = its id; a = place, b = entries of its table: LAYOUT and REQUEST. flags GROUPED: the requests travel
  together, and run one by one. The server keeps the slot until the batch is DONE.
- LAYOUT: number; a = start, b = bytes of a RequestLayout in JSON. It stands for that number from here on.
- REQUEST: number = its layout; a = its own number; b = start of its inputs, with flags PLACED a place of the heap that
  the server keeps too; c = bytes of its details (`request_details.py`), and in the upper half their start.

On the ring BACK, of models that see each request for itself:

- ANSWER: number = a call's; flags FINAL, NONE or ERROR. Otherwise as CALL, with a ResultLayout. The worker gives the
  slot back by RETURN.
- CANCELLED: a = a request's number. Nobody waits for its answer any more.

On the ring RETURNS: RETURN, count = how many of a, b and c are places in the worker's heap that the server has read.

From the worker:

- DONE: number = a batch's id; a, b, c = time.monotonic_ns() when its inputs were there, its engine ended, its outputs
  were there. It is followed by RESULTS, or by FAILED.
- RESULTS: a = place, b = entries of its table, c = bytes of the slot: RESULT_LAYOUT and RESULT. flags EACH: one result
  for each request, otherwise one for the whole batch.
- FAILED: count = a status code; a = place, b = bytes of a text: the batch as a whole has failed.
- RESULT_LAYOUT: number; a = place, b = bytes of a ResultLayout in JSON. flags ONCE: the next result's alone. In a table
  it is always that, and a is a start.
- RESULT: number = its layout; b = start of numbers (u64 each) and of the outputs behind them, c = how many numbers.
  Where there is one for each request, a = so many requests have such a result, with the same numbers, one behind the
  other, each at a multiple of 64. flags ERROR: count = a status code, b = start, c = bytes of its text. OPEN: the a
  requests are answered by RESPONSE.
- RESPONSE: as RESULT, at any time, in a slot of its own; a = the request's number, b = place. flags FINAL, NONE: the
  request ends without one more, AGAIN: it ends here, and is to be sent again in a later batch.
- CALL: number = the call's; b = place of numbers, a text and tensors, c = how many numbers: the first is the length of
  the text, a CallLayout in JSON, the others are those of the tensors.
- RETURN: as on RETURNS.

The numbers of a result are, for each tensor, where it begins behind them, counted from their own first byte, and how
many bytes it has; then, for each tensor of BYTES of several requests, where each request's part begins in it, and the
end of the last.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator

ENTRY = struct.Struct("<BBHIQQQ")
"""Kind, flags, count, number, a, b, c."""

WORK, BACK, RETURNS = range(3)
"""The server's rings."""
SERVER_RINGS = (128, 1024, 1024)
"""Their entries: there are only a few batches at a time."""
WORKER_RINGS = (1024,)

BATCH, LAYOUT, REQUEST, ANSWER, CANCELLED, RETURN = range(1, 7)
DONE, RESULTS, FAILED, RESULT_LAYOUT, RESULT, RESPONSE, CALL = range(16, 23)

GROUPED = EACH = PLACED = 1
FINAL, NONE, ERROR, AGAIN, OPEN, ONCE = 2, 4, 8, 16, 32, 64

LONGEST_TEXT_BYTES = 1 << 20
"""Of a layout, or of what a call says of itself: little enough to be read between two requests."""
REMEMBERED_LAYOUTS = 256
"""Of either kind: whoever tells of layouts refers to the last so many, and the other end keeps twice as many, for what
is posted by one thread while another tells of more. Numbers are not used again."""


@functools.lru_cache(256)
def numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def returned_places(entries: bytes) -> Iterator[int]:
    """Those that RETURNs tell of."""
    for _, _, count, _, *places in ENTRY.iter_unpack(entries):
        yield from places[:count]


def return_entries(places: list[int]) -> bytes:
    """RETURN for so many places."""
    entries = b""
    for start in range(0, len(places), 3):
        three = places[start : start + 3]
        entries += ENTRY.pack(RETURN, 0, len(three), 0, *three, *(0,) * (3 - len(three)))
    return entries
