"""Typed contents of requests, as raw bytes: what clients put into the field of their datatype. Those of large requests
are decoded some elements a step. Protobuf takes a second for 16 million integers, in which nobody else would be
answered.

The contents are cut out of the message; protobuf parses the rest. They may be packed, as clients write them, or not.
What is written otherwise (contents in two pieces, of two datatypes, among a thousand unknown fields) is `Unusual`, and
left to protobuf as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.request_parameters import LONGEST_ID, MOST_ENTRIES, check_entries
from rocserve.core.steps import Steps
from rocserve.core.tensors import Buffer, encode_bytes_elements, octets
from rocserve.core.wire_format import (
    FIXED32,
    FIXED64,
    LENGTH_DELIMITED,
    LONGEST_VARINT,
    VARINT,
    FieldSpan,
    WireError,
    field_spans,
    length_prefix,
    read_varint,
)
from rocserve.plane.heap import COPIED_AT_ONCE, copy_bytes, copy_in_steps, new_memory
from rocserve.protocol import grpc_service_pb2 as pb

DATATYPES_OF_FIELDS: dict[str, tuple[str, ...]] = {
    "bool_contents": ("BOOL",),
    "int_contents": ("INT32", "INT16", "INT8"),
    "int64_contents": ("INT64",),
    "uint_contents": ("UINT32", "UINT16", "UINT8"),
    "uint64_contents": ("UINT64",),
    "fp32_contents": ("FP32",),
    "fp64_contents": ("FP64",),
    "bytes_contents": ("BYTES",),
}
"""What each field may hold; the first is the one that error texts name."""

_AS_RAW = frozenset({"bool_contents", "fp32_contents", "fp64_contents"})

_ARRAY_TYPES = {datatype.value: datatype.numpy_dtype for datatype in DataType}

DECODED_AT_ONCE = 64 << 10
"""Bytes of contents up to which protobuf decodes them in one go: some milliseconds."""
FIELDS = range(MOST_ENTRIES + 16)
"""That a message may have before its tensors' bytes, and of these; no request with more is taken."""

_STEP_BYTES = 32 << 10
_STEP_ELEMENTS = 1024
"""Of BYTES."""
_TENSOR_FIELDS = range(64)
"""That are looked at for contents."""
_ID = pb.ModelInferRequest.ID_FIELD_NUMBER
_INPUTS = pb.ModelInferRequest.INPUTS_FIELD_NUMBER
_RAW = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_CONTENTS = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
_SHAPE = pb.ModelInferRequest.InferInputTensor.SHAPE_FIELD_NUMBER
_NO_CONTENTS = length_prefix(_CONTENTS, 0)
_LENGTH = struct.Struct("<I")
_FIELDS_OF_CONTENTS: Mapping[int, tuple[str, int]] = {
    field.number: (
        field.name,
        {"fp32_contents": FIXED32, "fp64_contents": FIXED64, "bytes_contents": LENGTH_DELIMITED}.get(
            field.name, VARINT
        ),
    )
    for field in pb.InferTensorContents.DESCRIPTOR.fields
}
"""By number: the name, and the wire type of an element."""
_WHAT = "typed contents"
"""That there is no memory for, as an error says."""
_Octets = np.ndarray[Any, np.dtype[np.uint8]]
_Numbers = np.ndarray[Any, np.dtype[np.uint64]]


def raw_contents(contents: pb.InferTensorContents, datatype: str, input_name: str, model_name: str) -> bytes:
    """The elements as raw bytes; integers wider than the datatype keep their low bytes, as in Triton. Raises:
    ServeError: INVALID_ARGUMENT when the elements are in a field of another datatype, or in two fields."""
    raw = b""
    supplied = False
    for field, elements in contents.ListFields():
        if supplied:
            raise invalid_argument(f"{_where(input_name, model_name)}, binary data was already supplied.")
        supplied = True
        refuse_field(field.name, datatype, input_name, model_name)
        if datatype == "BYTES":
            raw = encode_bytes_elements(elements)
        elif field.name in _AS_RAW:
            # On the wire they are as raw contents have them; unknown fields follow them.
            nbytes = len(elements) * _ARRAY_TYPES[datatype].itemsize
            start = len(length_prefix(field.number, nbytes))
            raw = contents.SerializeToString()[start : start + nbytes]
        else:
            wide = np.fromiter(elements, dtype=_ARRAY_TYPES[DATATYPES_OF_FIELDS[field.name][0]], count=len(elements))
            raw = wide.astype(_ARRAY_TYPES[datatype], copy=False).tobytes()
    return raw


def refuse_field(field: str, datatype: str, input_name: str, model_name: str) -> None:
    """Raises: ServeError: INVALID_ARGUMENT, it does not hold elements of the datatype."""
    held = DATATYPES_OF_FIELDS[field]
    if datatype not in held:
        where = _where(input_name, model_name)
        raise invalid_argument(f"{where} of type '{held[0]}', expected datatype '{datatype}'")


def _where(input_name: str, model_name: str) -> str:
    return f"unexpected explicit tensor data for input tensor '{input_name}' for model '{model_name}'"


class Unusual(Exception):
    """Contents are not written as they are decoded here."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Contents of an input."""

    index: int
    """The input's."""
    start: int
    """Of the input, in the message."""
    field: str
    """By name."""
    tag: int | None
    """Before each element; None: they are packed."""
    data: memoryview

    def decode(self, datatype: DataType, admit: Callable[[int], object]) -> Steps[Buffer]:
        """The elements as raw bytes; integers wider than the datatype keep their low bytes. `admit`: takes the bytes
        that are about to be used. Raises: WireError: they are no elements; Unusual; what `admit` does."""
        if self.field == "bytes_contents":
            return (yield from self._strings(admit))
        dtype = datatype.numpy_dtype
        if self.field in ("fp32_contents", "fp64_contents"):
            if self.tag is not None:
                return (yield from self._tagged(dtype.itemsize, admit))
            if len(self.data) % dtype.itemsize:
                raise WireError(f"{self.field} end within an element")
            # They are as raw contents have them.
            return self.data
        return (yield from self._integers(dtype, admit))

    def _integers(self, dtype: np.dtype[Any], admit: Callable[[int], object]) -> Steps[Buffer]:
        source = np.frombuffer(self.data, np.uint8)
        count = 0
        for part in _whole_varints(source):
            count += int(np.count_nonzero(part < 0x80))
            yield
        if self.tag is not None:
            count //= 2
        admit(count * dtype.itemsize)
        elements = np.frombuffer(new_memory(count * dtype.itemsize, _WHAT), dtype)
        end = 0
        is_tag = False
        for part in _whole_varints(source):
            numbers = _varints(part)
            if self.tag is not None:
                first_tag = int(is_tag)
                if (numbers[first_tag::2] != self.tag).any():
                    raise Unusual
                is_tag ^= bool(len(numbers) % 2)
                numbers = numbers[1 - first_tag :: 2]
            begin, end = end, end + len(numbers)
            elements[begin:end] = numbers != 0 if dtype == np.bool_ else numbers.astype(dtype)
            yield
        if is_tag:
            raise WireError("they end behind a tag")
        return octets(elements)

    def _tagged(self, itemsize: int, admit: Callable[[int], object]) -> Steps[Buffer]:
        """Elements of a fixed size, each behind its tag."""
        count, rest = divmod(len(self.data), 1 + itemsize)
        if rest:
            raise Unusual
        admit(count * itemsize)
        source = np.frombuffer(self.data, np.uint8).reshape(count, 1 + itemsize)
        elements = np.frombuffer(new_memory(count * itemsize, _WHAT), np.uint8).reshape(count, itemsize)
        for begin in range(0, count, _STEP_BYTES // itemsize):
            part = source[begin : begin + _STEP_BYTES // itemsize]
            if (part[:, 0] != self.tag).any():
                raise Unusual
            elements[begin : begin + len(part)] = part[:, 1:]
            yield
        return octets(elements)

    def _strings(self, admit: Callable[[int], object]) -> Steps[Buffer]:
        data, tag, pack = self.data, self.tag, _LENGTH.pack
        position, end = 0, len(data)
        # An element has at least two bytes there, and four here. What is not touched takes no memory.
        view = new_memory(2 * end, _WHAT)
        used = 0
        while position < end:
            pieces: list[Buffer] = []
            large: Buffer = b""
            nbytes = 0
            for _ in range(_STEP_ELEMENTS):
                if position >= end or nbytes > COPIED_AT_ONCE or large:
                    break
                if data[position] != tag:
                    raise Unusual
                try:
                    length, begin = data[position + 1], position + 2
                    if length > 0x7F:
                        length, begin = read_varint(data, position + 1)
                except IndexError:
                    raise WireError("they end within an element's length") from None
                position = begin + length
                if position > end:
                    raise WireError("they end within an element")
                pieces.append(pack(length))
                if length > COPIED_AT_ONCE:
                    large = data[begin:position]
                else:
                    pieces.append(data[begin:position])
                    nbytes += length
            joined = b"".join(pieces)
            admit(len(joined) + len(large))
            copy_bytes(view, used, joined)
            used += len(joined)
            yield from copy_in_steps(view, used, large)
            used += len(large)
            yield
        return view[:used]


@dataclass(frozen=True, slots=True, eq=False)
class LargeContents:
    """A serialised ModelInferRequest with large typed contents."""

    message: bytes
    skeleton: bytes
    """The message, with none in the place of what has been cut out; nor are raw contents there."""
    cuts: tuple[Cut, ...]
    has_raw: bool
    """Whether raw contents come with it."""

    @classmethod
    def of(cls, message: bytes) -> LargeContents | None:
        """None: it has none, or they are unusual, or it is no such message: `RequestDecoder.decode_request` takes
        it. Raises: ServeError: INVALID_ARGUMENT, an input has too many dimensions to be parsed at all."""
        view = memoryview(message)
        parts: list[Buffer] = []
        cuts: list[Cut] = []
        has_raw = False
        index = end = 0
        try:
            # The fields first: the last span of those that are too many is not taken and forgotten.
            for _, span in zip(FIELDS, field_spans(view), strict=False):
                end = span.end
                if span.number == _RAW:
                    if not cuts:
                        return None
                    has_raw = True
                    continue
                if span.number == _ID and span.end - span.content > LONGEST_ID:
                    return None
                if span.number == _INPUTS and span.wire_type == LENGTH_DELIMITED:
                    cut = _cut(view, span, index, parts) if span.end - span.content > DECODED_AT_ONCE else None
                    index += 1
                    if cut is not None:
                        cuts.append(cut)
                        continue
                parts.append(view[span.start : span.end])
        except WireError:
            return None
        return cls(message, b"".join(parts), tuple(cuts), has_raw) if cuts and end == len(view) else None


def _cut(message: memoryview, span: FieldSpan, index: int, parts: list[Buffer]) -> Cut | None:
    """What an input has of large contents; the rest of it comes to the parts."""
    tensor = message[span.content : span.end]
    found: FieldSpan | None = None
    end = 0
    for _, field in zip(_TENSOR_FIELDS, field_spans(tensor), strict=False):
        end = field.end
        if field.number == _SHAPE and field.wire_type == LENGTH_DELIMITED:
            # Protobuf would take a quarter of a second for 16 million.
            check_entries(int(np.count_nonzero(np.frombuffer(tensor, np.uint8)[field.content : field.end] < 0x80)))
        if field.number == _CONTENTS:
            if found is not None or field.wire_type != LENGTH_DELIMITED:
                return None
            found = field
    if found is None or end != len(tensor) or found.end - found.content <= DECODED_AT_ONCE:
        return None
    contents = tensor[found.content : found.end]
    tag = contents[0]
    name, wire_type = _FIELDS_OF_CONTENTS.get(tag >> 3, ("", -1))
    if tag & 7 == wire_type:
        data: memoryview = contents
        first_tag: int | None = tag
    elif name and tag & 7 == LENGTH_DELIMITED:
        try:
            length, begin = read_varint(contents, 1)
        except IndexError:
            return None
        if begin + length != len(contents):
            return None
        data, first_tag = contents[begin:], None
    else:
        return None
    rest: list[Buffer] = [tensor[: found.start], _NO_CONTENTS, tensor[found.end :]]
    parts.append(length_prefix(_INPUTS, sum(map(len, rest))))
    parts += rest
    return Cut(index, span.start, name, first_tag, data)


def _whole_varints(source: _Octets) -> Iterator[_Octets]:
    """Pieces of a sequence of varints, each of some. Raises: WireError: one is too long, or does not end."""
    begin, end = 0, len(source)
    while begin < end:
        part = source[begin : begin + _STEP_BYTES]
        ends = np.flatnonzero(part[-LONGEST_VARINT:] < 0x80)
        if not len(ends) or (begin + len(part) == end and part[-1] >= 0x80):
            raise WireError(f"the varint before byte {begin + len(part)} has no end")
        part = part[: max(len(part) - LONGEST_VARINT, 0) + int(ends[-1]) + 1]
        yield part
        begin += len(part)


def _varints(source: _Octets) -> _Octets | _Numbers:
    """Their values. Raises: WireError: one is too long."""
    if source.max() < 0x80:
        return source
    ends = np.flatnonzero(source < 0x80)
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > LONGEST_VARINT:
        raise WireError(f"a varint of {longest} bytes")
    values = (source[starts] & 0x7F).astype(np.uint64)
    for place in range(1, longest):
        longer = np.flatnonzero(lengths > place)
        digits = (source[starts[longer] + place] & 0x7F).astype(np.uint64)
        values[longer] |= digits << np.uint64(7 * place)
    return values
