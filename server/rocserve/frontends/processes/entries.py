"""Messages between a front and the server: entries of 32 bytes (`workers/entries.py`), in the rings of a link; and what
both ends do: lay out tensors and texts, post entries, also when a ring is full, and give back what has been read.

Tensors and texts lie in the sender's heap; at a (place) are first the sizes (u64 each) of its contents, then these,
each at a multiple of 64; flags PACKED: tensors alone, of the sizes that follow from their head. A token names a request
until its last answer, a number a call until its end.

From the front, on the ring REQUESTS:

- HEAD: number; a = place, b = bytes: a RequestHead in JSON. The number means it from here on; count = 1: in one REQUEST
  only.
- DETAILS: a = place, b = bytes: the details (`workers/entries.py`) and the origin of the REQUEST that follows.
- REQUEST: number = its token; a = the number of its head, and in the upper half how many bytes its slot has; b = place
  of its inputs; c = its deadline in time.monotonic_ns(), 0 = it has none. flags IN_TURN: it is one of a stream. SINGLE:
  it can have one answer only.
- LEFT: number = the token of a request whose client has gone.
- UNUSED: number = that of a heap of which the server has said that it has ENDED, and into which nothing more is put.
- REFUSED: count = a status code; a = place, b = bytes: two texts, the error's and the id that the request was to have.
  No request could be made of what had come; its client has its answer.
- CALL: number = the call's; a = place, b = bytes: c = three texts, the method's full name, in JSON the metadata and the
  client's address, and the client's message. Of any method but those of inference.
- CALL_LEFT: number = that of a call whose client has gone.
- LISTENING: it serves clients. NOT_LISTENING: it cannot, and ends; count = the system's error, 0 = another; a = place,
  b = bytes: c = one text, the reason.

From the server, on the ring ANSWERS:

- ANSWER_HEAD: number; a = place, b = bytes: an AnswerHead in JSON; count = 1: it is of one answer.
- ANSWER: number = a token; a = the number of its head; b = place, c = bytes: its outputs; count = 1: it is large. flags
  FINAL; NONE: there is no further answer; ERROR: count = a status code, a text lies there, a = after how many ms to ask
  again, 0 where nobody knows; REFUSAL with it: no model has had the request; FULL: there is no memory for it
  (MemoryFull). KEPT: the front returns the place once it is done with the outputs; else it need not. PLACED with it:
  they lie in the heap of outputs whose number is the upper half of a, b is what the front returns, and at place
  c are the offset and the bytes of each (u64).
- ANSWERS_TOGETHER: the only answers to count requests; a = the number of their head, and in the upper half that of the
  heap of outputs where they lie; b is what the front returns once it is done with all. At place c (u64 each): the place
  and the bytes of the slot that has the outputs; for each request its token, and where in the slot each output begins.
- RETURN: as below, of places in the server's own heap: entries before have their contents there, and no others will.
- MANY: number = a token: any number of answers will come.
- WATCH: number = a token: send LEFT when its client goes.
- LENT: number = that of a head: inputs of its requests are to be put into heap a, of which the front has share b; a
  descriptor has come by the socket where it has not heard of that heap before.
- OUTPUTS: number = that of a heap of outputs, of which a descriptor has come by the socket. OUTPUTS_ENDED: none will
  lie there any more.
- ENDED: number = that of a heap, into which nothing is to be put any more.
- ORIGINS: flags FINAL: from now on requests come with their origin; without: no more.
- CALL_MESSAGE, CALL_REPLY, CALL_END: number = a call's; a = place, b = bytes: a stream's message, a unary call's reply
  or, with count = a status code, the text of a call's end.
- EXIT: the server ends, which clients are to hear.
- STOP: number = milliseconds within which calls in flight are answered; new ones are refused, and the front ends.

A (place) of a request is an offset in the front's own heap, or in a share of a version's (`SharedHeap` in
`plane/heap.py`), the number of which is in the upper 16 bits then.

On either side's ring RETURNS: RETURN, count = how many of a, b and c are places in the other's heap that nobody reads
any more.
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
"""Entries of either side's."""
HEAP_BYTES = 1 << 32
"""Of slots of one size, in the heap of either side."""

HEAD, REQUEST, LEFT, REFUSED, DETAILS, UNUSED, CALL, CALL_LEFT, LISTENING, NOT_LISTENING = range(1, 11)
ANSWER_HEAD, ANSWER, MANY, WATCH, ORIGINS, EXIT, LENT, ENDED, OUTPUTS, OUTPUTS_ENDED = range(16, 26)
CALL_MESSAGE, CALL_REPLY, CALL_END, STOP, ANSWERS_TOGETHER = range(26, 31)

HEAP_SHIFT = 48
"""Of a place: the bits above it are the number of the heap."""
MOST_HEAPS = (1 << 64 - HEAP_SHIFT) - 2
HELD_OUTPUTS, AWAITED_OUTPUTS = (number << HEAP_SHIFT for number in (MOST_HEAPS, MOST_HEAPS + 1))
"""In the place of a heap's number, above the number of outputs that lie elsewhere; of those that are large, for whose
memory a model may wait."""

MOST_TOGETHER = (1 << 16) - 1
"""Requests of one ANSWERS_TOGETHER."""

IN_TURN, SINGLE = 1, 2
FINAL, NONE, ERROR, REFUSAL, FULL = 1, 2, 4, 8, 16
PACKED, KEPT, PLACED = 32, 64, 128

REMEMBERED_HEADS = 1024
"""Of a kind: the sender refers to as many of its last ones, and the other end keeps twice as many. Numbers are not used
again."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """All of an answer but its id and its data; equal for many."""

    head: ResponseHead
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    in_shared_memory: tuple[str, ...] = ()
    is_typed: bool = False


def input_places(head: RequestHead) -> TensorPlaces | None:
    """Where the inputs of requests lie that have as many bytes as their shapes say; None: that is not said."""
    try:
        return TensorPlaces([TensorHead(each.name, DataType(each.datatype), each.shape) for each in head.inputs])
    except ValueError:
        return None  # There is no such datatype.


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
"""After a ring was full."""
_REMEMBERED_TABLES = 1024
"""Clients send the same sizes again and again."""
_PAGE_BYTES = 64 << 10
LARGEST_SHARED = _PAGE_BYTES // 8
"""Bytes up to which something shares a page: copying it costs less than a slot of its own."""
_RETURNED_AT_ONCE = 24
"""Places that may wait to be returned while there is more to post: a message of their own costs as much as they do."""
_NO_PAGE = memoryview(bytearray())
"""An answer without outputs fits into it."""


class FrontLinkEnd:
    """One end's posting. On the plane's thread."""

    def __init__(self, link: LinkEnd, heap: Heap, plane: PlaneLoop) -> None:
        """`heap`: its own."""
        self._messages, self._returns = link.writers[ANSWERS], link.writers[RETURNS]
        self.returned = link.readers[RETURNS]
        """Places that `take_returns` takes."""
        self.heaps = {0: heap}
        """By number: its own, and the shares that it has of others."""
        self._plane = plane
        self._posts: deque[bytes] = deque()
        self.to_return: list[int] = []
        """Places to return to the other end, with what is posted next, or by `flush`."""
        self.give_back: Callable[[int], None] = self.to_return.append
        """Takes a place in the other's heap that nobody reads any more. From any thread, but one other than the plane's
        wakes that then: it may be asleep."""
        self._trimmer = HeapTrimmer(plane)
        self._slots: dict[int, object] = {}
        """By place: what the other end may still read."""
        self._held_numbers = itertools.count()
        self._of_turn: list[int] = []
        """Of these, what it need not keep for longer than it handles the entries of this turn."""
        self._page, self._page_place, self._page_used = _NO_PAGE, 0, 0
        self.ring: Callable[[], None] = lambda: None
        """Where the doorbell of the other end is not there yet, that end looks by itself before it first sleeps."""
        self._is_open = True

    def post(self, entry: bytes) -> None:
        """At the end of this turn, behind all that was posted before."""
        if not self._is_open:
            return
        if not self._posts:
            self._plane.at_end_of_turn(self.flush)
        self._posts.append(entry)

    def post_contents(self, kind: int, number: int, contents: Sequence[Buffer], count: int = 0) -> None:
        """Post an entry with contents, which the other end gives back. Raises: HeapFull."""
        pieces, nbytes = framed(contents)
        place, view = self.new_slot(nbytes)
        left_out = fill(view, pieces, COPIED_AT_ONCE)
        self.post_written(ENTRY.pack(kind, 0, count, number, place, nbytes, len(contents)), view, left_out, contents)

    def post_written(
        self, entry: bytes, view: memoryview, left_out: Sequence[tuple[int, Buffer]], source: object
    ) -> None:
        """Post an entry when all of it lies in its slot; others may go before. `source`: keeps what is copied."""

        def steps(source: object) -> Steps[None]:
            for begin, part in left_out:
                yield from copy_in_steps(view, begin, part)
            self.post(entry)

        self._plane.work_off(steps(source))

    def take_back(self, place: int) -> None:
        """Nothing that has been posted names the place, nor will."""
        self._slots.pop(place, None)

    def end_heap(self, number: int) -> None:
        """Put nothing more there; its memory goes when all places in it have been returned."""
        heap = self.heaps.pop(number)
        self._trimmer.forget(heap)
        heap.close()

    def place(self, pieces: Iterable[Buffer], nbytes: int, heap_number: int = 0) -> int:
        """As `new_slot`, with these in it."""
        place, view = self.new_slot(nbytes, heap_number)
        fill(view, pieces)
        return place

    def hold(self, slot: object, nbytes: int) -> int:
        """Keep what the other end may still read, and which lies elsewhere, until it has returned what this gives."""
        number = next(self._held_numbers) | (AWAITED_OUTPUTS if nbytes > LARGEST_SHARED else HELD_OUTPUTS)
        self._slots[number] = slot
        return number

    def place_in_turn(self, pieces: Iterable[Buffer], nbytes: int) -> int:
        """As `place`, of what the other end reads while it handles this turn's entries: small ones share a slot."""
        if nbytes > LARGEST_SHARED:
            place = self.place(pieces, nbytes)
            self._of_turn.append(place)
            return place
        if self._page_used + nbytes > len(self._page):
            self._page_place, self._page = self.new_slot(_PAGE_BYTES)
            self._page_used = 0
            self._of_turn.append(self._page_place)
        begin = self._page_used
        self._page_used = end = begin + nbytes
        fill(self._page[begin:end], pieces)
        return self._page_place + begin

    def new_slot(self, nbytes: int, heap_number: int = 0) -> tuple[int, memoryview]:
        """The place of `nbytes` bytes, which is kept until the other end has returned it, and its memory. Raises:
        HeapFull."""
        heap = self.heaps[heap_number]
        slot, view = heap.place(nbytes)
        place = slot.offset | heap_number << HEAP_SHIFT
        self._slots[place] = slot
        self._trimmer.trim_later(heap, self.take_returns)
        return place, view

    def flush(self) -> None:
        posts, messages = self._posts, self._messages
        if self._of_turn:
            # The other end gives them back when it has come to here.
            entries = return_entries(self._of_turn)
            posts += [entries[start : start + ENTRY_BYTES] for start in range(0, len(entries), ENTRY_BYTES)]
            self._of_turn.clear()
            self._page, self._page_used = _NO_PAGE, 0
        count = min(len(posts), messages.room)
        if count:
            messages.post(b"".join([posts.popleft() for _ in range(count)]))
        to_return = self.to_return
        # Other places that come back are nothing to be woken for; a model may wait for these.
        is_awaited = bool(to_return) and max(to_return) >= AWAITED_OUTPUTS
        if to_return and (not count or is_awaited or len(to_return) >= _RETURNED_AT_ONCE):
            returns = min(self._returns.room, -(-len(to_return) // 3))
            self._returns.post(return_entries(to_return[: 3 * returns]))
            del to_return[: 3 * returns]
        if count or is_awaited:
            self.ring()
        if posts:
            self._plane.call_at(time.monotonic() + _RETRY_SECONDS, self.flush)

    def drop(self) -> None:
        """Nobody takes it any more."""
        self._is_open = False
        self._posts.clear()
        self._of_turn.clear()
        self._slots.clear()
        for heap in self.heaps.values():
            self._trimmer.forget(heap)

    def take_returns(self) -> None:
        slots = self._slots
        for place in returned_places(self.returned.take()):
            slots.pop(place, None)


@lru_cache(256)
def numbers(count: int) -> Struct:
    """The form of `count` numbers (u64 each)."""
    return Struct(f"<{count}Q")


def framed(contents: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """What lies at a place of these, and how many bytes that is: their sizes (u64 each), and they behind them."""
    pieces = padded([numbers(len(contents)).pack(*map(len, contents)), *contents])
    return pieces, sum(map(len, pieces))


def read(view: memoryview, count: int) -> list[Buffer]:
    """The contents of a place, `count` of them."""
    return [view[begin:end] for begin, end in _bounds(bytes(view[: 8 * count]))]


@lru_cache(_REMEMBERED_TABLES)
def _bounds(table: bytes) -> list[tuple[int, int]]:
    """Where each of the contents behind such a table begins and ends."""
    sizes = numbers(len(table) // 8).unpack(table)
    offsets, _ = lay_out(sizes, len(table))
    return [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
