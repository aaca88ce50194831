"""Sends tensors between the server and a worker, which need not be trusted. Each layout is sent once, and named by a
number from then on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rocserve.backends.request_model import RESCHEDULED, ModelResponse, Rescheduled, Result
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal, status_code
from rocserve.core.memo import Memo
from rocserve.core.parameters import NO_PARAMETERS, Parameters
from rocserve.core.plain import from_json, to_json
from rocserve.core.requests import MOST_ENTRIES
from rocserve.core.responses import InferResponse
from rocserve.core.tensor_places import Bounds, TensorPlaces
from rocserve.core.tensors import Tensor, TensorHead, can_hold
from rocserve.links import entries
from rocserve.links.entries import ENTRY, LONGEST_TEXT
from rocserve.links.texts import REMEMBERED, SentTexts, Text
from rocserve.plane.heap import HeapReader, fill

_PARAMETERS: Any = Parameters
_MOST_COMMAS = 1 << 15
"""Commas in a layout's JSON, enough for the most tensors that a model may have, with 29 dimensions each. Parsing so
many takes a tenth of a second, in which the server does nothing else."""
_MOST_BYTES = 16 << 20
"""Bytes of layouts, if they are many, that a reader keeps: enough for 100,000 outputs of different shapes in one
batch."""
LONGEST_DETAILS = 1 << 20
"""Bytes of a layout or details: so many can be parsed between two requests."""


class Layout(Text):
    __slots__ = ("json", "places")

    def __init__(self, heads: tuple[TensorHead, ...]) -> None:
        """Raises ServeError (INTERNAL) if the names and shapes are too long, or too many."""
        super().__init__()
        self.places = TensorPlaces(heads)
        self.json = checked(to_json(heads))
        if self.json.count(b",") > _MOST_COMMAS:
            raise internal(f"{len(heads)} tensors and their sizes exceed the longest message")


Message = tuple[int, int, int, Layout | None, int, int, int]
"""The fields of an entry, with the layout in place of its number."""


class TensorSender:
    """Sends the tensors and responses of one end. Safe on any thread. A layout gets its number only when the entry that
    refers to it is posted: other threads may send many layouts while large tensors are copied."""

    def __init__(
        self,
        allocate: Callable[[int], tuple[int, memoryview]],
        allocate_now: Callable[[int], tuple[int, memoryview]],
        post: Callable[[bytes], None],
        posting: AbstractContextManager[object],
    ) -> None:
        """`allocate`: returns place and memory of a slot of that size, which the other end returns after reading; may
        wait until that end has read other slots. `allocate_now`: does not wait: the tensors of a layout are in a slot
        that the other end cannot read before it has the layout. `posting`: the lock of `post`, which a thread may take
        again."""
        self._allocate = allocate
        self._allocate_now = allocate_now
        self._post = post
        self._layouts: Memo[tuple[tuple[str, DataType, tuple[int, ...]], ...], Layout] = Memo()
        self.sent = SentTexts(REMEMBERED)
        self._posting = posting

    def of(self, tensors: Sequence[Tensor]) -> Layout:
        """Raises ServeError as Layout."""
        key = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors])
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts.keep(key, Layout(tuple([TensorHead(*one) for one in key])))
        return layout

    def number(self, layout: Layout) -> int:
        """Return the layout's number, after sending the layout if the other end does not know it. The caller holds
        `posting` until it has posted the entry with the number, and pins the layout if that entry needs several."""
        if not layout.number:
            place, view = self._allocate_now(len(layout.json))
            view[:] = layout.json
            number = self.sent.take_number()
            self._post(ENTRY.pack(entries.TEXT, 0, 0, number, 0, place, len(layout.json)))
            self.sent.keep(layout, number)
        return layout.number

    def put(self, tensors: Sequence[Tensor], details: bytes) -> tuple[Layout, int, int]:
        """Write tensors to a slot; return their layout, the place, and the bytes of the details. Raises ServeError:
        INTERNAL if the details are too long or a tensor's bytes do not fit its shape, another code if no slot is
        free."""
        checked(details)
        layout = self.of(tensors)
        pieces, nbytes = layout.places.pieces([tensor.data for tensor in tensors], "tensor")
        place, view = self._allocate(nbytes + len(details))
        fill(view, [*pieces, details])
        return layout, place, len(details)

    def put_text(self, text: bytes) -> int:
        """Write a text to a slot and return its place. Raises ServeError if no slot is free."""
        place, view = self._allocate(len(text))
        view[:] = text
        return place

    def answer(
        self, number: int, answer: Result | InferResponse | None, final: bool, references: int = 0
    ) -> tuple[Message, int]:
        """Write an answer to an exchange; None = it ends. Returns the message for `post`, and the place of its slot.
        `references`: how many of the first tensors are references. Raises as `put`."""
        if answer is None:
            return (entries.END, entries.LAST, 0, None, number, 0, 0), 0
        if isinstance(answer, Rescheduled):
            return (entries.AGAIN, entries.LAST, 0, None, number, 0, 0), 0
        flags = entries.LAST if final else 0
        if isinstance(answer, ServeError):
            text = error_bytes(answer)
            place = self.put_text(text)
            return (entries.FAILURE, flags, int(answer.code), None, number, place, len(text)), place
        layout, place, nbytes = self.put(answer.outputs, parameters_text(answer.parameters))
        return (entries.RESPONSE, flags, references, layout, number, place, nbytes), place

    def post(self, message: Message) -> None:
        """Post a message, after its layout if the other end does not know it. Raises ServeError if no slot is free for
        the layout."""
        kind, flags, count, layout, number, place, nbytes = message
        with self._posting:
            if layout is None:
                self._post(ENTRY.pack(kind, flags, count, 0, number, place, nbytes))
                return
            layout.pins += 1
            try:
                self._post(ENTRY.pack(kind, flags, count, self.number(layout), number, place, nbytes))
            finally:
                layout.pins -= 1


class TensorReader:
    """Reads tensors by the layouts that their sender has sent, in bounded memory. Methods raise ValueError if the
    sender's messages are invalid."""

    def __init__(self, heap: HeapReader) -> None:
        self._heap = heap
        self._places: dict[int, TensorPlaces] = {}
        """By number."""
        self._bytes: dict[int, int] = {}
        """The length of each layout, and their sum."""
        self._sum = 0

    def define(self, number: int, place: int, nbytes: int) -> None:
        text = self.text(place, nbytes)
        if text.count(b",") > _MOST_COMMAS:
            raise ValueError(f"a layout with {text.count(b',')} commas, expected at most {_MOST_COMMAS}")
        heads = from_json(tuple[TensorHead, ...], text)
        for head in heads:
            # numpy supports no more dimensions.
            if len(head.shape) > 64:
                raise ValueError(f"a tensor of {len(head.shape)} dimensions")
            element = 4 if head.datatype is DataType.BYTES else head.datatype.itemsize
            if not can_hold(head.datatype, head.shape, math.prod(head.shape) * element):
                raise ValueError(f"tensor '{head.name}' of shape {list(head.shape)}")
        self._sum += nbytes - self._bytes.get(number, 0)
        self._places[number], self._bytes[number] = TensorPlaces(heads), nbytes
        if len(self._places) > REMEMBERED and self._sum > _MOST_BYTES:
            raise ValueError(f"{len(self._places)} layouts of {self._sum} bytes, expected at most {_MOST_BYTES}")

    def get(self, number: int) -> TensorPlaces:
        places = self._places.get(number)
        if places is None:
            raise ValueError(f"tensors of the undefined layout {number}")
        return places

    def text(self, place: int, nbytes: int) -> bytes:
        """Read a slot that holds only a text."""
        return bytes(self._heap.checked(place, text_length(nbytes)))

    def read(self, number: int, place: int, details: int) -> tuple[list[Tensor], bytes]:
        """Return the tensors of a slot, as views, and the details after them."""
        places = self.get(number)
        bounds, end = bounds_of(places, self._heap.checked(place, places.table_bytes))
        view = self._heap.checked(place, end + text_length(details))
        tensors = [Tensor(*head, view[slice(*bound)]) for head, bound in zip(places.heads, bounds, strict=True)]
        return tensors, bytes(view[end:])

    def answer(
        self, kind: int, flags: int, count: int, text: int, place: int, nbytes: int
    ) -> tuple[Result | None, bool]:
        """Return the arguments of TensorSender.answer: the answer, and whether it is the last."""
        if kind == entries.END:
            return None, True
        if kind == entries.AGAIN:
            return RESCHEDULED, True
        last = bool(flags & entries.LAST)
        if kind == entries.FAILURE:
            return read_error(count, self.text(place, nbytes)), last
        outputs, details = self.read(text, place, nbytes)
        return ModelResponse(outputs, read_parameters(details)), last


def bounds_of(places: TensorPlaces, table: memoryview) -> tuple[Bounds, int]:
    """Compute as TensorPlaces.of, but do not trust the sender. Raises ValueError."""
    if places.sizes is not None:
        return places.bounds, places.end
    if len(table) < places.table_bytes:
        raise ValueError(f"the sizes of {len(places.heads)} tensors in {len(table)} bytes")
    bounds, end = places.of(table)
    for head, (begin, finish) in zip(places.heads, bounds, strict=True):
        if not can_hold(head.datatype, head.shape, finish - begin):
            raise ValueError(f"tensor '{head.name}' of shape {list(head.shape)} has {finish - begin} bytes")
    return bounds, end


def checked(text: bytes) -> bytes:
    """Return a text that will be sent. Raises ServeError (INTERNAL) if it is longer than the other end accepts."""
    if len(text) > LONGEST_DETAILS:
        raise internal(
            f"names, shapes and parameters together take {len(text)} bytes, at most {LONGEST_DETAILS} can be sent"
        )
    return text


def text_length(nbytes: int) -> int:
    """Check a text's length and return it. Raises ValueError if no text may be so long."""
    if nbytes > LONGEST_DETAILS:
        raise ValueError(f"a text of {nbytes} bytes, expected at most {LONGEST_DETAILS}")
    return nbytes


def parameters_text(parameters: Parameters) -> bytes:
    """Write a response's parameters. Raises ServeError (INTERNAL) if they are more than a request may have."""
    if len(parameters) > MOST_ENTRIES:
        raise internal(f"a response has {len(parameters)} parameters, at most {MOST_ENTRIES} can be sent")
    return to_json(parameters) if parameters else b""


def read_parameters(text: bytes) -> Parameters:
    """Raises ValueError."""
    if not text:
        return NO_PARAMETERS
    # Each parameter has this text between its name and value, but a value may contain the text too.
    if text.count(b'":') > MOST_ENTRIES:
        try:
            count = len(json.loads(text))
        except RecursionError:
            raise ValueError("parameters nested too deeply") from None
        if count > MOST_ENTRIES:
            raise ValueError(f"{count} parameters, expected at most {MOST_ENTRIES}")
    parameters: Parameters = from_json(_PARAMETERS, text)
    return parameters


def error_bytes(error: ServeError) -> bytes:
    return error.text[:LONGEST_TEXT].encode(errors="replace")


def read_error(code: int, text: bytes) -> ServeError:
    return ServeError(status_code(code), text.decode(errors="replace")[:LONGEST_TEXT])
