"""Messages between a front and the server: entries of 32 bytes (`workers/entries.py`), in the rings of a link.

Tensors and texts lie in the sender's heap; at a (place) are first the sizes (u64 each) of its contents, then these,
each at a multiple of 64; flags PACKED: tensors alone, of the sizes that follow from their head. A token names a request
until its last answer, a number a call until its end.

From the front, on the ring REQUESTS:

- HEAD: number; a = place, b = bytes: a RequestHead in JSON. The number means it from here on.
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

- ANSWER_HEAD: number; a = place, b = bytes: an AnswerHead in JSON.
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

import json
from dataclasses import dataclass, field

from rocserve.core.datatypes import DataType
from rocserve.core.requests import NO_PARAMETERS, InputHead, Parameters, RequestedOutput, RequestHead, ResponseHead
from rocserve.core.tensor_places import TensorPlaces
from rocserve.core.tensors import TensorHead

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
