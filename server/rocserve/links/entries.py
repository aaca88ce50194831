"""Defines the messages of every link: entries of 32 bytes, in rings and in tables of a heap. KINDS.md has the table of
their kinds: who writes each, its fields, and when its memory is freed."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from rocserve.core.errors import ServeError, status_code
from rocserve.core.request_memory import MemoryFull
from rocserve.core.tensor_places import ALIGNMENT
from rocserve.links.rings import RingWriter

ENTRY = struct.Struct("<BBHIQQQ")
"""Kind, flags, count, text, number, place, nbytes. An entry uses the fields that KINDS.md names; the others are 0."""
BATCH_ENTRY = struct.Struct("<BBHIQQII")
"""An entry in a batch's table: `nbytes` is divided into the start and the bytes of a text or of details."""
RESULTS_HEADER = struct.Struct("<QQQQ")
"""The number of entries of the following table, and time.monotonic_ns() when the batch's inputs were ready, its engine
ended, and its outputs were ready."""

# Both links.
TEXT, REQUEST, CALL, RESPONSE, FAILURE, END, CANCEL, FORGET, RETURN = range(1, 10)
# Server and worker.
AGAIN, BATCH, DONE, OPEN, INPUT = range(16, 21)
# Front end and server.
RESPONSES, MANY, LENT, OUTPUTS, ORIGINS, REFUSED, LISTENING, WORKED, EXIT, STOP = range(32, 42)

STAY, CLOSE, RETIRE, END_STREAMS = range(4)
"""The number of an EXIT."""

ANSWERS = frozenset((RESPONSE, FAILURE, END, AGAIN))
"""Kinds of answers to one exchange."""

LAST = 1
"""The exchange ends with this answer."""
SIZED = 2
"""A table of the tensors' sizes precedes them, because these do not follow from the text."""
DETAILED = 4
"""Of a REQUEST in a ring: details follow the tensors."""
IN_TURN, SINGLE = 8, 16
"""Of a REQUEST in a ring: it belongs to a stream; its client can take only one answer."""
PLACED = 32
"""The tensors lie outside of the slot or heap in which other messages of the kind have them."""
IN_FILE = 64
"""Of a request in a batch: its tensors lie in a passed file."""
HTTP = 64
"""Of a REQUEST in a ring: its client speaks HTTP, not gRPC."""
WHOLE = 128
"""Of a BATCH: its requests run one by one, and only travel together. Of a result: it belongs to the whole batch."""
REFUSAL, OVERLOAD, MEMORY_FULL = 8, 16, 32
"""Of a FAILURE: no model has had the request; too many requests wait; it is a MemoryFull."""

HEAP_SHIFT = 48
"""Bits of a place from this one on are the number of its heap; 0 = the sender's own heap."""
OFFSET = (1 << HEAP_SHIFT) - 1

LONGEST_TEXT = 8192
"""Characters of an error, or of a fault in a received message."""

_MICROSECONDS = 1e6


def data_start(entries: int) -> int:
    """Return where the data begin after a table of so many entries in a slot."""
    return entries * ENTRY.size + ALIGNMENT - 1 & -ALIGNMENT


def returned_places(mail: bytes) -> Iterator[int]:
    for _, _, count, _, *places in ENTRY.iter_unpack(mail):
        yield from places[:count]


def return_entries(places: list[int]) -> bytes:
    mail = b""
    for start in range(0, len(places), 3):
        three = places[start : start + 3]
        mail += ENTRY.pack(RETURN, 0, len(three), 0, *three, *(0,) * (3 - len(three)))
    return mail


def post_returns(ring: RingWriter, places: list[int]) -> None:
    """Post the places for which the ring has room, and remove them from the list; a later call posts the rest."""
    count = min(ring.room, -(-len(places) // 3))
    ring.post(return_entries(places[: 3 * count]))
    del places[: 3 * count]


def failure_entry(error: ServeError, last: bool, is_refusal: bool, number: int, place: int, nbytes: int) -> bytes:
    """Return the entry of an error whose text lies at `place`. The text's field has the microseconds until a retry."""
    flags = (LAST if last else 0) | (REFUSAL if is_refusal else 0) | (OVERLOAD if error.is_overload else 0)
    if isinstance(error, MemoryFull):
        flags |= MEMORY_FULL
    # The field has 32 bits.
    retry = min(round(error.retry_seconds * _MICROSECONDS), (1 << 32) - 1)
    return ENTRY.pack(FAILURE, flags, int(error.code), retry, number, place, nbytes)


def read_failure(flags: int, code: int, retry: int, text: bytes) -> ServeError:
    """Return the error of an entry of a trusted sender."""
    error = MemoryFull(text.decode()) if flags & MEMORY_FULL else ServeError(status_code(code), text.decode())
    error.retry_seconds = retry / _MICROSECONDS
    error.is_refusal, error.is_overload = bool(flags & REFUSAL), bool(flags & OVERLOAD)
    return error
