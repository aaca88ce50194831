"""Defines the messages between a front end and the server: entries of 32 bytes (`workers/entries.py`) in the rings of a
link. Both ends use this module to lay out tensors and texts, to post entries (later if a ring is full), and to return
places that have been read.

Tensors and texts lie in the sender's heap. A place holds the sizes (u64 each) of its contents, then the contents,
each at a multiple of 64. With the flag PACKED it holds only tensors, whose sizes follow from their head. A token names
a request until its last answer. A number names a call until its end.

From the front end, on the ring REQUESTS:

- HEAD: number = the name of this head from now on; a = place, b = bytes: a RequestHead in JSON. count = 1: only one
  REQUEST uses the head.
- DETAILS: a = place, b = bytes: the details (`workers/entries.py`) and the origin of the next REQUEST.
- REQUEST: number = its token; a = the number of its head, and in the upper half the bytes of its slot; b = place of its
  inputs; c = its deadline in time.monotonic_ns(), 0 = no deadline. Flag IN_TURN: the request belongs to a stream. Flag
  SINGLE: the client can take only one answer.
- LEFT: number = the token of a request whose client has gone.
- UNUSED: number = a heap that the server has ENDED, and into which the front end puts nothing more.
- REFUSED: count = a status code; a = place, b = bytes: two texts, the error's and the request's id. The front end could
  not make a request of a message, and has answered the client.
- CALL: number = the call; a = place, b = bytes, c = three contents: the method's full name, the metadata and the
  client's address in JSON, and the client's message. For every method but inference.
- CALL_LEFT: number = a call whose client has gone.
- LISTENING: the front end serves clients. NOT_LISTENING: the front end cannot listen, and ends; count = the system's
  error number, 0 = a different error; a = place, b = bytes, c = one text, the reason.

From the server, on the ring ANSWERS:

- ANSWER_HEAD: number; a = place, b = bytes: an AnswerHead in JSON. count = 1: only one answer uses the head.
- ANSWER: number = a token; a = the number of its head; b = place, c = bytes of its outputs; count = 1: the answer is
  large. Flag FINAL: the last answer. Flag NONE: no further answer comes. Flag ERROR: count = a status code, the place
  holds the text, a = milliseconds after which the client may retry, 0 = not known; with REFUSAL no model has had the
  request; with FULL there is no memory for it (MemoryFull). Flag KEPT: the front end returns the place when it no
  longer needs the outputs; without the flag it need not return the place. Flag PLACED, only with KEPT: the outputs lie
  in the output heap whose number is the upper half of a, b is what the front end returns, and place c holds the offset
  and the bytes of each output (u64).
- ANSWERS_TOGETHER: the only answers to count requests; a = the number of their head, and in the upper half the number
  of the output heap; b = what the front end returns when it no longer needs any of the outputs. Place c holds (u64
  each) the place and the bytes of the slot with the outputs; then for each request its token, and where in the slot
  each of its outputs begins.
- RETURN: as on the ring RETURNS, but for places in the server's own heap that only the entries before it use.
- MANY: number = a token: the request may have any number of answers.
- WATCH: number = a token: send LEFT when its client goes.
- LENT: number = a head: put the inputs of its requests into heap a, of which the front end has share b. If the front
  end does not know the heap yet, the socket brings its descriptor.
- OUTPUTS: number = an output heap, whose descriptor the socket brings. OUTPUTS_ENDED: no further outputs will lie
  there.
- ENDED: number = a heap into which nothing more may be put.
- ORIGINS: with FINAL, requests must come with their origin from now on; without FINAL, they need not.
- CALL_MESSAGE, CALL_REPLY, CALL_END: number = a call; a = place, b = bytes: a message of a stream, the reply of a
  unary call, or the text of a call's end, with count = a status code.
- EXIT: the server ends, and clients must hear of it.
- STOP: number = milliseconds in which to answer calls in flight; the front end refuses new ones, then ends.

The place of a request is an offset in the front end's own heap, or in its share of a version's heap (`SharedHeap` in
`plane/heap.py`), whose number is then in the upper 16 bits.

On both sides' ring RETURNS:

- RETURN: count = how many of a, b and c are places in the other side's heap that nobody reads any more.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct

from rocserve.core.datatypes import DataType
from rocserve.core.requests import NO_PARAMETERS, InputHead, Parameters, RequestedOutput, RequestHead, ResponseHead
from rocserve.core.steps import Steps
from rocserve.core.tensor_places import TensorPlaces, lay_out, padded
from rocserve.core.tensors import Buffer, TensorHead
from rocserve.plane.heap import COPIED_AT_ONCE, Heap, copy_in_steps, fill
from rocserve.plane.link import ENTRY_BYTES, LinkEnd
from rocserve.plane.loop import PlaneLoop
from rocserve.plane.trimming import HeapTrimmer
from rocserve.workers.entries import ENTRY, return_entries, returned_places

REQUESTS = ANSWERS = 0
RETURNS = 1
RINGS = (4096, 1024)
"""Entries in the two rings of each side."""
HEAP_BYTES = 1 << 32
"""Bytes of slots of one size, in the heap of each side."""

ATTACH = b"F"
"""Sent through the socket, together with descriptors."""
DESCRIPTORS = 5
"""With the server's first ATTACH: the link's files of the front end and of the server, the heaps of the front end and
of the server, and the page where the server says that it sleeps."""

HEAD, REQUEST, LEFT, REFUSED, DETAILS, UNUSED, CALL, CALL_LEFT, LISTENING, NOT_LISTENING = range(1, 11)
ANSWER_HEAD, ANSWER, MANY, WATCH, ORIGINS, EXIT, LENT, ENDED, OUTPUTS, OUTPUTS_ENDED = range(16, 26)
CALL_MESSAGE, CALL_REPLY, CALL_END, STOP, ANSWERS_TOGETHER = range(26, 31)

HEAP_SHIFT = 48
"""Bits of a place from this one on are the number of its heap."""
MOST_HEAPS = (1 << 64 - HEAP_SHIFT) - 2
HELD_OUTPUTS, AWAITED_OUTPUTS = (number << HEAP_SHIFT for number in (MOST_HEAPS, MOST_HEAPS + 1))
"""These replace a heap's number in the numbers that `hold` returns for outputs in other heaps. AWAITED_OUTPUTS are
large: a model may wait for their memory."""

MOST_TOGETHER = (1 << 16) - 1
"""The most requests in one ANSWERS_TOGETHER."""

IN_TURN, SINGLE = 1, 2
FINAL, NONE, ERROR, REFUSAL, FULL = 1, 2, 4, 8, 16
PACKED, KEPT, PLACED = 32, 64, 128

REMEMBERED_HEADS = 1024
"""Number of heads of a kind: the sender refers only to its last ones, the receiver keeps twice as many. Numbers are
never reused."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """An answer without its id and its data. Many answers have equal heads."""

    head: ResponseHead
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    in_shared_memory: tuple[str, ...] = ()
    is_typed: bool = False


def input_places(head: RequestHead) -> TensorPlaces | None:
    """Return where the inputs of requests with this head lie, if they have as many bytes as their shapes say. Returns
    None if a datatype does not exist."""
    try:
        return TensorPlaces([TensorHead(each.name, DataType(each.datatype), each.shape) for each in head.inputs])
    except ValueError:
        return None


def write_head(head: RequestHead) -> bytes:
    inputs = [(each.name, each.datatype, each.shape, dict(each.parameters)) for each in head.inputs]
    outputs = [(each.name, dict(each.parameters)) for each in head.outputs]
    fields = (head.model_name, head.model_version, inputs, outputs, dict(head.parameters), head.is_typed)
    return json.dumps(fields).encode()


def read_head(text: bytes) -> RequestHead:
    name, version, inputs, outputs, parameters, is_typed = json.loads(text)
    return RequestHead(
        name,
        version,
        tuple(InputHead(name, datatype, tuple(shape), given) for name, datatype, shape, given in inputs),
        tuple(RequestedOutput(name, given) for name, given in outputs),
        parameters,
        is_typed,
    )


_RETRY_SECONDS = 0.001
"""Pause before the next attempt to post after a ring was full."""
_REMEMBERED_TABLES = 1024
"""Tables of sizes that `read` remembers, because clients often send the same sizes."""
_PAGE_BYTES = 64 << 10
LARGEST_SHARED = _PAGE_BYTES // 8
"""Bytes up to which contents share a page, because a copy costs less than a separate slot."""
_RETURNED_AT_ONCE = 24
"""Places that may wait for the next message: a separate message costs as much as returning this many."""
_NO_PAGE = memoryview(bytearray())
"""Only an answer without outputs fits into it."""


class FrontLinkEnd:
    """Posts entries for one end of a link, the front end's or the server's. On the plane's thread."""

    def __init__(self, link: LinkEnd, heap: Heap, plane: PlaneLoop) -> None:
        """`heap`: the heap of this end."""
        self._messages, self._returns = link.writers[ANSWERS], link.writers[RETURNS]
        self.returned = link.readers[RETURNS]
        self.heaps = {0: heap}
        """Number -> heap. 0 is this end's own heap; the others are its shares of other heaps."""
        self._plane = plane
        self._queue: deque[bytes] = deque()
        self.to_return: list[int] = []
        """Places to return to the other end, with the next message or by `flush`."""
        self.give_back: Callable[[int], None] = self.to_return.append
        """Takes a place in the other end's heap that nobody reads any more. Safe on any thread; a thread that is not
        the plane's must wake the plane after the call, because it may be asleep."""
        self._trimmer = HeapTrimmer(plane)
        self._slots: dict[int, object] = {}
        """Place -> slot that the other end may still read."""
        self._held_numbers = itertools.count()
        self._turn_places: list[int] = []
        """The places among `_slots` that the other end reads only while it handles the entries of this turn."""
        self._page, self._page_place, self._page_used = _NO_PAGE, 0, 0
        self.ring: Callable[[], None] = lambda: None
        """Rings the other end. While its doorbell is unknown, that end polls by itself before it first sleeps."""
        self._is_open = True

    def post(self, entry: bytes) -> None:
        """Post an entry at the end of this turn, after all entries posted before."""
        if not self._is_open:
            return
        if not self._queue:
            self._plane.at_end_of_turn(self.flush)
        self._queue.append(entry)

    def post_contents(self, kind: int, number: int, contents: Sequence[Buffer], count: int = 0) -> None:
        """Post an entry with contents, whose place the other end returns. Raises HeapFull."""
        pieces, nbytes = framed(contents)
        place, view = self.new_slot(nbytes)
        left_out = fill(view, pieces, COPIED_AT_ONCE)
        self.post_written(ENTRY.pack(kind, 0, count, number, place, nbytes, len(contents)), view, left_out, contents)

    def post_written(
        self, entry: bytes, view: memoryview, left_out: Sequence[tuple[int, Buffer]], source: object
    ) -> None:
        """Post an entry when the parts that `fill` has left out have been copied to its slot. Later entries may
        overtake it. `source` is kept until then."""

        def steps(source: object) -> Steps[None]:
            for begin, part in left_out:
                yield from copy_in_steps(view, begin, part)
            self.post(entry)

        self._plane.work_off(steps(source))

    def take_back(self, place: int) -> None:
        """Free a place that no posted entry names or will name."""
        self._slots.pop(place, None)

    def end_heap(self, number: int) -> None:
        """Put nothing more into a heap. Its memory is freed when all its places have been returned."""
        heap = self.heaps.pop(number)
        self._trimmer.forget(heap)
        heap.close()

    def place(self, pieces: Iterable[Buffer], nbytes: int) -> int:
        """Fill a new slot with the pieces, and return its place. Raises HeapFull."""
        place, view = self.new_slot(nbytes)
        fill(view, pieces)
        return place

    def hold(self, slot: object, nbytes: int) -> int:
        """Keep a slot of another heap until the other end returns the number that this call returns."""
        number = next(self._held_numbers) | (AWAITED_OUTPUTS if nbytes > LARGEST_SHARED else HELD_OUTPUTS)
        self._slots[number] = slot
        return number

    def place_in_turn(self, pieces: Iterable[Buffer], nbytes: int) -> int:
        """As `place`, for contents that the other end reads while it handles this turn. Small contents share a slot."""
        if nbytes > LARGEST_SHARED:
            place = self.place(pieces, nbytes)
            self._turn_places.append(place)
            return place
        if self._page_used + nbytes > len(self._page):
            self._page_place, self._page = self.new_slot(_PAGE_BYTES)
            self._page_used = 0
            self._turn_places.append(self._page_place)
        begin = self._page_used
        self._page_used = end = begin + nbytes
        fill(self._page[begin:end], pieces)
        return self._page_place + begin

    def new_slot(self, nbytes: int, heap_number: int = 0) -> tuple[int, memoryview]:
        """Return a place of `nbytes` bytes, kept until the other end returns it, and its memory. Raises HeapFull."""
        heap = self.heaps[heap_number]
        slot, view = heap.place(nbytes)
        place = slot.offset | heap_number << HEAP_SHIFT
        self._slots[place] = slot
        self._trimmer.trim_later(heap, self.take_returns)
        return place, view

    def flush(self) -> None:
        queue, messages = self._queue, self._messages
        if self._turn_places:
            # The other end returns these places when it reads the entries below.
            entries = return_entries(self._turn_places)
            queue += [entries[start : start + ENTRY_BYTES] for start in range(0, len(entries), ENTRY_BYTES)]
            self._turn_places.clear()
            self._page, self._page_used = _NO_PAGE, 0
        count = min(len(queue), messages.room)
        if count:
            messages.post(b"".join([queue.popleft() for _ in range(count)]))
        to_return = self.to_return
        # Only AWAITED_OUTPUTS are worth waking the other end for: a model may wait for their memory.
        is_awaited = bool(to_return) and max(to_return) >= AWAITED_OUTPUTS
        if to_return and (not count or is_awaited or len(to_return) >= _RETURNED_AT_ONCE):
            returns = min(self._returns.room, -(-len(to_return) // 3))
            self._returns.post(return_entries(to_return[: 3 * returns]))
            del to_return[: 3 * returns]
        if count or is_awaited:
            self.ring()
        if queue:
            self._plane.call_at(time.monotonic() + _RETRY_SECONDS, self.flush)

    def drop(self) -> None:
        """Post nothing more, because the other end has gone."""
        self._is_open = False
        self._queue.clear()
        self._turn_places.clear()
        self._slots.clear()
        for heap in self.heaps.values():
            self._trimmer.forget(heap)

    def take_returns(self) -> None:
        slots = self._slots
        for place in returned_places(self.returned.take()):
            slots.pop(place, None)


@lru_cache(256)
def numbers(count: int) -> Struct:
    """Return the format of `count` numbers (u64 each)."""
    return Struct(f"<{count}Q")


def framed(contents: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Return the pieces to write at a place, the sizes (u64 each) and the contents, and the number of their bytes."""
    pieces = padded([numbers(len(contents)).pack(*map(len, contents)), *contents])
    return pieces, sum(map(len, pieces))


def read(view: memoryview, count: int) -> list[Buffer]:
    """Return the `count` contents of a place."""
    return [view[begin:end] for begin, end in _bounds(bytes(view[: 8 * count]))]


@lru_cache(_REMEMBERED_TABLES)
def _bounds(table: bytes) -> list[tuple[int, int]]:
    """Return (begin, end) of each content after this table of sizes."""
    sizes = numbers(len(table) // 8).unpack(table)
    offsets, _ = lay_out(sizes, len(table))
    return [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
