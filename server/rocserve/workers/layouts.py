"""Sends tensors between the server and a worker. Each layout is sent once, and named by a number from then on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rocserve.backends.request_model import RESCHEDULED, ModelResponse, Rescheduled, Result
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.memo import Memo
from rocserve.core.plain import from_json, to_json
from rocserve.core.requests import MOST_ENTRIES, NO_PARAMETERS, InferResponse, Parameters
from rocserve.core.tensor_places import Bounds, TensorPlaces
from rocserve.core.tensors import Tensor, TensorHead, can_hold
from rocserve.plane.heap import HeapReader, fill
from rocserve.workers import entries
from rocserve.workers.entries import ENTRY
from rocserve.workers.messages import LONGEST_TEXT, status_code

_PARAMETERS: Any = Parameters
_MOST_COMMAS = 1 << 15
"""Commas in a layout's JSON, enough for the most tensors that a model may have, with 29 dimensions each. Parsing so
many takes a tenth of a second, in which the server does nothing else."""
_MOST_UNREAD_BYTES = 16 << 20
"""Bytes of layouts, if they are many, that one batch may need: enough for 100,000 outputs of different shapes."""
_MOST_DIMENSIONS = 64
"""Bound for one tensor: numpy supports no more."""


class Layout:
    __slots__ = ("number", "places", "text")

    def __init__(self, heads: tuple[TensorHead, ...]) -> None:
        """Raises ServeError (INTERNAL) if the names and shapes are too long, or too many."""
        self.places = TensorPlaces(heads)
        self.text = checked(to_json(heads))
        if self.text.count(b",") > _MOST_COMMAS:
            raise internal(f"{len(heads)} tensors with all their sizes are more than can be sent")
        self.number = -entries.REMEMBERED_LAYOUTS
        """The number by which the layout was last sent; negative = never."""


Message = tuple[int, bool, int, Layout | None, int, int, int]
"""The fields of an entry, with the layout in place of its number."""


class TensorSender:
    """Sends the tensors and responses of one end. Safe on any thread. A layout gets its number only when the entry that
    refers to it is posted: other threads may define many layouts while large tensors are copied."""

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
        self._layouts: Memo[tuple[tuple[str, DataType, tuple[int, ...]], ...], Layout] = Memo(
            entries.REMEMBERED_LAYOUTS
        )
        self._defined = 0
        self._posting = posting

    def of(self, tensors: Sequence[Tensor]) -> Layout:
        """Raises ServeError as Layout."""
        key = tuple([(each.name, each.datatype, each.shape) for each in tensors])
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts.keep(key, Layout(tuple([TensorHead(*each) for each in key])))
        return layout

    def number(self, layout: Layout) -> int:
        """Return the layout's number, after sending the layout if the other end may not know it. The caller holds
        `posting` until it has posted the entry with the number."""
        if layout.number <= self._defined - entries.REMEMBERED_LAYOUTS:
            number = self._defined + 1
            place, view = self._allocate_now(len(layout.text))
            view[:] = layout.text
            self._post(ENTRY.pack(entries.LAYOUT, 0, 0, number & entries.LARGEST_LAYOUT, 0, place, len(layout.text)))
            self._defined = layout.number = number
        return layout.number & entries.LARGEST_LAYOUT

    def put(self, tensors: Sequence[Tensor], details: bytes) -> tuple[Layout, int, int]:
        """Write tensors to a slot; return their layout, the place, and the bytes of the details. Raises ServeError:
        INTERNAL if the details are too long or a tensor's bytes do not fit its shape, another code if no slot is
        free."""
        checked(details)
        layout = self.of(tensors)
        pieces, nbytes = layout.places.pieces([each.data for each in tensors], "tensor")
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
        """Write an answer to a request or call; None = it ends. Returns the message for `post`, and the place of its
        slot. `references`: how many of the first tensors are references. Raises as `put`."""
        if answer is None:
            return (entries.END, False, 0, None, number, 0, 0), 0
        if isinstance(answer, Rescheduled):
            return (entries.AGAIN, False, 0, None, number, 0, 0), 0
        if isinstance(answer, ServeError):
            text = error_bytes(answer)
            place = self.put_text(text)
            return (entries.FAILURE, final, int(answer.code), None, number, place, len(text)), place
        layout, place, nbytes = self.put(answer.outputs, parameters_text(answer.parameters))
        return (entries.RESPONSE, final, references, layout, number, place, nbytes), place

    def post(self, message: Message) -> None:
        """Post a message, after its layout if the other end may not know it. Raises ServeError if no slot is free for
        the layout."""
        kind, last, count, layout, number, place, nbytes = message
        with self._posting:
            layout_number = 0 if layout is None else self.number(layout)
            self._post(ENTRY.pack(kind, last, count, layout_number, number, place, nbytes))


class TensorReader:
    """Reads tensors by the layouts that their sender has defined, in bounded memory. Methods raise ValueError if the
    sender's messages are invalid."""

    def __init__(self, heap: HeapReader) -> None:
        self._heap = heap
        self._places: dict[int, TensorPlaces] = {}
        """By number, in the order of definition."""
        self._has_read = False
        """Something was read since the last definition."""
        self._unread_bytes = 0
        """Bytes of the layouts that were defined since then."""

    def define(self, number: int, place: int, nbytes: int) -> None:
        text = self.text(place, nbytes)
        if text.count(b",") > _MOST_COMMAS:
            raise ValueError(f"a layout with {text.count(b',')} commas, expected at most {_MOST_COMMAS}")
        heads = from_json(tuple[TensorHead, ...], text)
        for head in heads:
            if len(head.shape) > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor of {len(head.shape)} dimensions")
            element = 4 if head.datatype is DataType.BYTES else head.datatype.itemsize
            if not can_hold(head.datatype, head.shape, math.prod(head.shape) * element):
                raise ValueError(f"tensor '{head.name}' of shape {list(head.shape)}")
        known = self._places
        known[number] = TensorPlaces(heads)
        if self._has_read:
            # A batch may refer to more layouts than are remembered; they are defined without a pause.
            self._has_read = False
            self._unread_bytes = 0
            for old in list(known)[: -2 * entries.REMEMBERED_LAYOUTS]:
                del known[old]
        self._unread_bytes += nbytes
        if len(known) > 2 * entries.REMEMBERED_LAYOUTS and self._unread_bytes > _MOST_UNREAD_BYTES:
            raise ValueError(f"layouts of {self._unread_bytes} bytes, and no tensors of them")

    def get(self, number: int) -> TensorPlaces:
        self._has_read = True
        places = self._places.get(number)
        if places is None:
            raise ValueError(f"tensors of layout {number}, which it has not defined")
        return places

    def text(self, place: int, nbytes: int) -> bytes:
        """Read a slot that holds only a text."""
        return bytes(self._heap.checked(place, text_length(nbytes)))

    def read(self, number: int, place: int, details: int) -> tuple[list[Tensor], bytes]:
        """Return the tensors of a slot, as views, and the details behind them."""
        places = self.get(number)
        bounds, end = bounds_of(places, self._heap.checked(place, places.table_bytes))
        view = self._heap.checked(place, end + text_length(details))
        tensors = [Tensor(*head, view[slice(*bound)]) for head, bound in zip(places.heads, bounds, strict=True)]
        return tensors, bytes(view[end:])

    def answer(
        self, kind: int, last: int, count: int, layout: int, place: int, nbytes: int
    ) -> tuple[Result | None, bool]:
        """Return what TensorSender.answer was given: the answer, and whether it is the last."""
        if kind == entries.END:
            return None, True
        if kind == entries.AGAIN:
            return RESCHEDULED, True
        if kind == entries.FAILURE:
            return read_error(count, self.text(place, nbytes)), bool(last)
        outputs, details = self.read(layout, place, nbytes)
        return ModelResponse(outputs, read_parameters(details)), bool(last)


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
    if len(text) > entries.LONGEST_TEXT_BYTES:
        raise internal(
            f"names, shapes and parameters together take {len(text)} bytes, at most"
            f" {entries.LONGEST_TEXT_BYTES} can be sent"
        )
    return text


def text_length(nbytes: int) -> int:
    """Check a text's length and return it. Raises ValueError if no text may be so long."""
    if nbytes > entries.LONGEST_TEXT_BYTES:
        raise ValueError(f"a text of {nbytes} bytes, expected at most {entries.LONGEST_TEXT_BYTES}")
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
            raise ValueError("parameters that are nested too deeply") from None
        if count > MOST_ENTRIES:
            raise ValueError(f"{count} parameters, expected at most {MOST_ENTRIES}")
    parameters: Parameters = from_json(_PARAMETERS, text)
    return parameters


def error_bytes(error: ServeError) -> bytes:
    return error.text[:LONGEST_TEXT].encode(errors="replace")


def read_error(code: int, text: bytes) -> ServeError:
    return ServeError(status_code(code), text.decode(errors="replace")[:LONGEST_TEXT])
