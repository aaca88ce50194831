"""Sends tensors between the server and a worker. Each layout is sent once, and named by a number from then on."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
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


class TensorSender:
    """Sends the tensors and responses of one end. Safe on any thread."""

    def __init__(self, allocate: Callable[[int], tuple[int, memoryview]], post: Callable[[bytes], None]) -> None:
        """`allocate`: returns place and memory of a slot of that size, which the other end returns after reading."""
        self._allocate = allocate
        self._post = post
        self._layouts: Memo[tuple[tuple[str, DataType, tuple[int, ...]], ...], Layout] = Memo(
            entries.REMEMBERED_LAYOUTS
        )
        self._defined = 0
        # Re-entrant, because a garbage collection may run anywhere and answer a request that its model has dropped.
        self._lock = threading.RLock()

    def of(self, tensors: Sequence[Tensor]) -> Layout:
        """Raises ServeError as Layout."""
        key = tuple([(each.name, each.datatype, each.shape) for each in tensors])
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts.keep(key, Layout(tuple([TensorHead(*each) for each in key])))
        return layout

    def number(self, layout: Layout) -> int:
        """Return the layout's number, after sending the layout if the other end may not know it."""
        if layout.number <= self._defined - entries.REMEMBERED_LAYOUTS:
            with self._lock:
                self._defined += 1
                number = self._defined
                self._post(ENTRY.pack(entries.LAYOUT, 0, 0, number, 0, self.put_text(layout.text), len(layout.text)))
                layout.number = number
        return layout.number

    def put(self, tensors: Sequence[Tensor], details: bytes) -> tuple[int, int, int]:
        """Write tensors to a slot; return their layout's number, the place, and the bytes of the details. Raises
        ServeError: INTERNAL if the details are too long or a tensor's bytes do not fit its shape, another code if no
        slot is free."""
        checked(details)
        layout = self.of(tensors)
        pieces, nbytes = layout.places.pieces([each.data for each in tensors], "tensor")
        number = self.number(layout)
        place, view = self._allocate(nbytes + len(details))
        fill(view, [*pieces, details])
        return number, place, len(details)

    def put_text(self, text: bytes) -> int:
        """Write a text to a slot and return its place. Raises ServeError if no slot is free."""
        place, view = self._allocate(len(text))
        view[:] = text
        return place

    def answer(
        self, number: int, answer: Result | InferResponse | None, final: bool, references: int = 0
    ) -> tuple[bytes, int]:
        """Write an answer to a request or call; None = it ends. Returns the entry, and the place of its slot.
        `references`: how many of the first tensors are references. Raises as `put`."""
        if answer is None:
            return ENTRY.pack(entries.END, 0, 0, 0, number, 0, 0), 0
        if isinstance(answer, Rescheduled):
            return ENTRY.pack(entries.AGAIN, 0, 0, 0, number, 0, 0), 0
        if isinstance(answer, ServeError):
            text = error_bytes(answer)
            place = self.put_text(text)
            return ENTRY.pack(entries.FAILURE, final, int(answer.code), 0, number, place, len(text)), place
        layout, place, nbytes = self.put(answer.outputs, parameters_text(answer.parameters))
        return ENTRY.pack(entries.RESPONSE, final, references, layout, number, place, nbytes), place


class TensorReader:
    """Reads tensors by the layouts that their sender has defined, in bounded memory. Methods raise ValueError if the
    sender's messages are invalid."""

    def __init__(self, heap: HeapReader) -> None:
        self._heap = heap
        self._places = Memo[int, TensorPlaces](2 * entries.REMEMBERED_LAYOUTS)

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
        self._places.keep(number, TensorPlaces(heads))

    def get(self, number: int) -> TensorPlaces:
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
