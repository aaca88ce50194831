"""What requests are to whoever runs them: one layout for all of a head, and where their inputs lie in a slot."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.plain import to_json
from rocserve.core.requests import NO_PARAMETERS, Parameters
from rocserve.core.tensors import Buffer, TensorHead
from rocserve.plane.heap import COPIED_AT_ONCE, COPIED_IN_PLACE, copy_bytes, lay_out


@dataclass(frozen=True, slots=True)
class RequestLayout:
    """All of a request but its id, its sequence and its data. It travels as JSON, once for all requests alike."""

    inputs: tuple[TensorHead, ...]
    requested_outputs: tuple[str, ...]
    rows: int
    """Of the first dimension; 1 where the model does not batch."""
    priority: int = 0
    timeout_microseconds: int = 0
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    """The client's own."""


class InputPlaces:
    """Where the inputs of requests of one layout lie: one behind the other, each at a multiple of 64.

    Where a size does not follow from a shape, as with BYTES, the sizes of all stand before them (u64 each).
    """

    __slots__ = ("_heads", "_sizes_struct", "end", "offsets", "sizes")

    def __init__(self, heads: Sequence[TensorHead]) -> None:
        self._heads = heads
        self._sizes_struct = struct.Struct(f"<{len(heads)}Q")
        self.sizes: list[int] | None = None
        """None: each request has its own."""
        if all(head.datatype is not DataType.BYTES for head in heads):
            self.sizes = [math.prod(head.shape) * head.datatype.itemsize for head in heads]
            self.offsets, self.end = lay_out(self.sizes, 0)

    def measure(self, data: Sequence[Buffer]) -> int:
        """How many bytes the inputs of a request take, where their sizes do not follow from their shapes."""
        return lay_out([len(part) for part in data], self._sizes_struct.size)[1]

    def write(self, view: memoryview, start: int, data: Sequence[Buffer]) -> Sequence[tuple[int, Buffer]]:
        """Copy the inputs of a request, but for large ones, into a slot's memory, from its byte `start` on.

        Returns: where in `view` the large ones belong.

        Raises:
            ServeError: INTERNAL, an input's bytes are not as many as its shape says.
        """
        offsets: Sequence[int]
        if self.sizes is None:
            sizes = [len(part) for part in data]
            for head, size in zip(self._heads, sizes, strict=True):
                if head.datatype is not DataType.BYTES and size != math.prod(head.shape) * head.datatype.itemsize:
                    raise _wrong_size(head, size)
            self._sizes_struct.pack_into(view, start, *sizes)
            offsets, _ = lay_out(sizes, self._sizes_struct.size)
        else:
            sizes, offsets = self.sizes, self.offsets
        large: list[tuple[int, Buffer]] = []
        for index, part in enumerate(data):
            size = sizes[index]
            if len(part) != size:
                raise _wrong_size(self._heads[index], len(part))
            begin = start + offsets[index]
            if size <= COPIED_IN_PLACE:
                view[begin : begin + size] = part
            elif size <= COPIED_AT_ONCE:
                copy_bytes(view, begin, part)
            else:
                large.append((begin, part))
        return large

    def of(self, table: memoryview) -> tuple[Sequence[int], Sequence[int], int]:
        """Offsets and sizes of a request's inputs, and the end of the last. `table`: the beginning of its slot."""
        if self.sizes is not None:
            return self.offsets, self.sizes, self.end
        sizes = self._sizes_struct.unpack_from(table)
        offsets, end = lay_out(sizes, self._sizes_struct.size)
        return offsets, sizes, end

    @property
    def table_bytes(self) -> int:
        return 0 if self.sizes is not None else self._sizes_struct.size


def _wrong_size(head: TensorHead, size: int) -> ServeError:
    expected = math.prod(head.shape) * head.datatype.itemsize
    return internal(f"input '{head.name}' of shape {list(head.shape)} needs {expected} bytes, got {size}")


class RequestForm:
    """A layout as the server keeps it: with its text, and where inputs lie. Compared by identity."""

    __slots__ = ("layout", "places", "text")

    def __init__(self, layout: RequestLayout) -> None:
        self.layout = layout
        self.places = InputPlaces(layout.inputs)
        self.text = to_json(layout)


@dataclass(frozen=True, slots=True)
class BatchForm:
    """What a batch is beside its requests."""

    cuts: Mapping[str, Sequence[tuple[int, ...]]] | None = None
    """By output, the shape of each request's part, where outputs are not cut by rows."""
    is_grouped: bool = False
    """The requests travel together and run one by one."""


@dataclass(slots=True)
class Member:
    """A request of a batch. Not frozen because one is made for each request."""

    form: RequestForm
    data: Sequence[Buffer]
    """Of its inputs, in the order of the form's; views of bytes."""
    number: int = 0
    """Its own, where the model sees each request for itself."""
    details: bytes = b""
    """See `request_details.py`."""
