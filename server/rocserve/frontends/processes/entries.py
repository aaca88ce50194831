"""Defines the messages between a front end and the server: entries of 32 bytes in the rings of a link. Both ends use
this module to lay out tensors and texts, to post entries (later if a ring is full), and to return places that have been
read.

An entry has the fields of ENTRY in `workers/entries.py`: kind, last, count, layout, number, place, nbytes. Each kind
has one meaning, and uses the fields that are named with it; the others are 0. At `place` in the sender's heap lie
`nbytes` of a text or of tensors. Tensors lie as core.tensor_places defines; with kinds that begin with SIZED, because
the sizes do not follow from the head, a table of the sizes (u64 each) precedes them. `layout` is the number of a head.
`number` names a request until its last answer, or a call until its end.

From both ends:

- HEAD (count, layout, place, nbytes): the head's number means this JSON from then on: a RequestHead from the front end,
  an AnswerHead from the server. `count` 1: only one request, or answer, uses the head, and is posted together with it.
- RETURN (count): the first `count` of the fields number, place and nbytes are places. On the ring RETURNS: places in
  the receiver's heap that nobody reads any more. On another ring: places in the sender's heap that only the entries
  before this one use.

From the front end, on the ring REQUESTS:

- REQUEST, SIZED_REQUEST: with the fields of REQUEST_ENTRY: the request's inputs, and its deadline in
  time.monotonic_ns(), 0 = no deadline. Flag IN_TURN: the request belongs to a stream. Flag SINGLE: the client can take
  only one answer. Flag HTTP: the client speaks HTTP, not gRPC.
- DETAILS (layout, place, nbytes): the details (`workers/entries.py`) of the next request, which have `layout` bytes,
  then its origin in JSON, if it is wanted.
- LEFT (number): the client of the request has gone.
- UNUSED (number): the front end puts nothing more into the heap of this number, which the server has ENDED.
- REFUSED (place, nbytes): JSON: a status code, the error's text, and the id of the request that the front end could not
  make of a message. It has answered the client.
- CALL (count, layout, number, place, nbytes): for every method but inference: `layout` bytes of JSON (the method's full
  name, the metadata and the client's address), then the client's message. `count` 1: the front end has decided that the
  client may make this call.
- CALL_LEFT (number): the client of the call has gone.
- LISTENING (count, place, nbytes): the front end serves clients; or, with a text, it cannot listen for this reason, and
  ends. `count`: the system's error number; 0 = a different error.
- WORKED (number): the microseconds that the front end's data plane has worked since its last report.

From the server, on the ring ANSWERS:

- RESPONSE, SIZED_RESPONSE (last, layout, number, place, nbytes): the outputs. If they have more than LARGEST_SHARED
  bytes, the front end returns their place when it no longer needs them. `last`: no further response follows.
- PLACED_RESPONSE: as RESPONSE, but the outputs lie in an output heap. At `place` are (u64 each) the heap's number, and
  the offset and the bytes of each output. `nbytes` is the number that the front end returns.
- RESPONSES (count, layout, place, nbytes): the only answers to `count` requests, in an output heap. At `place` are (u64
  each) the heap's number, the place and the bytes of the slot with the outputs; then for each request its number, and
  where in the slot each of its outputs begins. `nbytes` is what the front end returns when it needs none any more.
- FAILURE (last, count, number, place, nbytes): an error: its status code (`count`), and what `write_failure` writes.
- END (last, number): the request ends without another answer.
- MANY (number): the request may have any number of answers.
- WATCH (number): send LEFT when the request's client goes.
- LENT (layout, number, nbytes): put the inputs of the head's requests into the heap of this number, of which the front
  end has share `nbytes`. If it does not know the heap yet, the socket brings its descriptor.
- OUTPUTS (number): the socket brings the descriptor of the output heap of this number. OUTPUTS_ENDED (number): no
  further outputs will lie there.
- ENDED (number): nothing more may be put into this heap.
- ORIGINS (last): requests must come with their origin from now on; with `last` 0, they need not.
- CALL_MESSAGE, CALL_REPLY (number, place, nbytes): a message of a stream; the reply of a unary call.
- CALL_END (count, number, place, nbytes): the call's end: its status code (`count`) and text.
- EXIT (number): CLOSE: HTTP's clients must connect again after their next answer; STAY: no longer. RETIRE: as CLOSE,
  and the front end ends when it has no client. END_STREAMS: streams that wait for no answer must end, because the
  server ends.
- STOP (number): answer calls in flight within so many milliseconds; refuse new ones, then end.

The place of a request is an offset in the front end's own heap, or in its share of a version's heap (`SharedHeap` in
`plane/heap.py`), whose number is then in the upper 16 bits.
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
from rocserve.core.errors import ServeError
from rocserve.core.request_memory import MemoryFull
from rocserve.core.requests import (
    NO_PARAMETERS,
    InferResponse,
    InputHead,
    Parameters,
    RequestedOutput,
    RequestHead,
    ResponseHead,
)
from rocserve.core.steps import Steps
from rocserve.core.tensor_places import TensorPlaces, lay_out, padded
from rocserve.core.tensors import Buffer, TensorHead
from rocserve.plane.heap import Heap, copy_in_steps, fill
from rocserve.plane.link import ENTRY_BYTES, LinkEnd
from rocserve.plane.loop import PlaneLoop
from rocserve.plane.trimming import Trimmer
from rocserve.workers.entries import ENTRY, RETURN, return_entries, returned_places
from rocserve.workers.messages import status_code

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

REQUEST_ENTRY = Struct("<BxHIIIQQ")
"""Kind, flags, number of the head, number of the request, bytes and place of its inputs, deadline."""
IN_TURN, SINGLE, HTTP = 1, 2, 4

# RETURN has the number of the workers' messages.
HEAD = RETURN + 1
REQUEST, SIZED_REQUEST, DETAILS, LEFT, UNUSED, REFUSED, CALL, CALL_LEFT, LISTENING, WORKED = range(16, 26)
RESPONSE, SIZED_RESPONSE, PLACED_RESPONSE, RESPONSES, FAILURE, END, MANY, WATCH = range(32, 40)
LENT, OUTPUTS, OUTPUTS_ENDED, ENDED, ORIGINS, CALL_MESSAGE, CALL_REPLY, CALL_END, EXIT, STOP = range(40, 50)
STAY, CLOSE, RETIRE, END_STREAMS = range(4)
ANSWERS_OF_ONE = frozenset((RESPONSE, SIZED_RESPONSE, PLACED_RESPONSE, FAILURE, END))
"""Kinds of answers to one request."""

HEAP_SHIFT = 48
"""Bits of a place from this one on are the number of its heap."""
MOST_HEAPS = (1 << 64 - HEAP_SHIFT) - 2
HELD_OUTPUTS, AWAITED_OUTPUTS = (number << HEAP_SHIFT for number in (MOST_HEAPS, MOST_HEAPS + 1))
"""These replace a heap's number in the numbers that `hold` returns for outputs in other heaps. AWAITED_OUTPUTS are
large: a model may wait for their memory."""

MOST_TOGETHER = (1 << 16) - 1
"""The most requests in one RESPONSES."""

REMEMBERED_HEADS = 1024
"""Number of heads of a kind: the sender refers only to its last ones, the receiver keeps twice as many. So a head is
posted, or posted again, together with the entry that refers to it, and never without that entry."""
LARGEST_NUMBER = (1 << 32) - 1
"""An entry has no room for a larger number of a head or call; the next one gets the number 1 again."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """An answer without its id and its data. Many answers have equal heads."""

    head: ResponseHead
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    in_shared_memory: tuple[str, ...] = ()
    is_typed: bool = False

    @classmethod
    def of(cls, response: InferResponse) -> AnswerHead:
        return cls(response.head, response.parameters, tuple(response.in_shared_memory), response.is_typed)


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


_FAILURE = Struct("<d???")
"""Seconds after which the client may retry (0 = not known), no model has had the request, too many requests wait, it is
a MemoryFull."""


def write_failure(error: ServeError, is_refusal: bool) -> bytes:
    header = _FAILURE.pack(error.retry_seconds, is_refusal, error.is_overload, isinstance(error, MemoryFull))
    return header + error.text.encode()


def read_failure(code: int, content: bytes) -> ServeError:
    retry_seconds, is_refusal, is_overload, is_memory_full = _FAILURE.unpack_from(content)
    text = content[_FAILURE.size :].decode()
    error = MemoryFull(text) if is_memory_full else ServeError(status_code(code), text)
    error.retry_seconds, error.is_refusal, error.is_overload = retry_seconds, is_refusal, is_overload
    return error


_RETRY_SECONDS = 0.001
"""Pause before the next attempt to post after a ring was full."""
_REMEMBERED_TABLES = 1024
"""Tables of sizes that `read_sized` remembers, because clients often send the same sizes."""
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
        self.trimmer = Trimmer(plane)
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

    def post_text(
        self, kind: int, text: Buffer, number: int = 0, count: int = 0, layout: int = 0, last: bool = False
    ) -> None:
        """Post an entry with a text, which the other end reads while it handles this turn. Raises HeapFull."""
        place, nbytes = self.place_in_turn((text,), len(text)), len(text)
        self.post(ENTRY.pack(kind, last, count, layout, number, place, nbytes))

    def copy_then(
        self, post: Callable[[], None], view: memoryview, left_out: Sequence[tuple[int, Buffer]], source: object
    ) -> None:
        """Call `post` when the parts that `fill` has left out have been copied to their slot, unless the other end has
        gone. Later entries may be posted before. `source` is kept until then."""

        def steps(source: object) -> Steps[None]:
            for begin, part in left_out:
                yield from copy_in_steps(view, begin, part)
            if self._is_open:
                post()

        self._plane.work_off(steps(source))

    def take_back(self, place: int) -> None:
        """Free a place that no posted entry names or will name."""
        self._slots.pop(place, None)

    def end_heap(self, number: int) -> None:
        """Put nothing more into a heap. Its memory is freed when all its places have been returned."""
        heap = self.heaps.pop(number)
        self.trimmer.forget(heap)
        heap.close()

    def hold(self, slot: object, nbytes: int) -> int:
        """Keep a slot of another heap until the other end returns the number that this call returns."""
        number = next(self._held_numbers) | (AWAITED_OUTPUTS if nbytes > LARGEST_SHARED else HELD_OUTPUTS)
        self._slots[number] = slot
        return number

    def place_in_turn(self, pieces: Iterable[Buffer], nbytes: int) -> int:
        """Return the place of contents that the other end reads while it handles this turn. Small contents share a
        slot. Raises HeapFull."""
        if nbytes > LARGEST_SHARED:
            place, view = self.new_slot(nbytes)
            fill(view, pieces)
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
        self.trimmer.trim_later(heap, self.take_returns)
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
            self.trimmer.forget(heap)

    def take_returns(self) -> None:
        slots = self._slots
        for place in returned_places(self.returned.take()):
            slots.pop(place, None)


@lru_cache(256)
def numbers(count: int) -> Struct:
    """Return the format of `count` numbers (u64 each)."""
    return Struct(f"<{count}Q")


def sized(tensors: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Return the pieces to write at a place, the sizes (u64 each) and the tensors, and the number of their bytes."""
    pieces = padded([numbers(len(tensors)).pack(*map(len, tensors)), *tensors])
    return pieces, sum(map(len, pieces))


def read_sized(view: memoryview, count: int) -> list[Buffer]:
    """Return the `count` tensors of a place with their sizes."""
    return [view[begin:end] for begin, end in _bounds(bytes(view[: 8 * count]))]


@lru_cache(_REMEMBERED_TABLES)
def _bounds(table: bytes) -> list[tuple[int, int]]:
    """Return (begin, end) of each tensor after this table of sizes."""
    sizes = numbers(len(table) // 8).unpack(table)
    offsets, _ = lay_out(sizes, len(table))
    return [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
