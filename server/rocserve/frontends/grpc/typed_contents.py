"""Decodes the typed contents of requests to raw bytes: elements in the field of their datatype. Contents of large
requests are decoded some elements per step, because protobuf takes a second for 16 million integers, and no other
client would be answered in that time.

The large contents are cut out of the message; protobuf parses the rest. Contents may be packed, as clients write them,
or not packed. Other forms (contents in two pieces or of two datatypes, a thousand unknown fields) are not cut out, or
raise `Unusual`; protobuf then decodes the whole message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.requests import LONGEST_ID, MOST_ENTRIES, check_entries
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
"""The datatypes that each field may hold. Error texts name the first."""

_RAW_FIELDS = frozenset({"bool_contents", "fp32_contents", "fp64_contents"})

_ARRAY_TYPES = {datatype.value: datatype.numpy_dtype for datatype in DataType}

DECODED_AT_ONCE = 64 << 10
"""Bytes of contents up to which protobuf decodes them in one call, in some milliseconds."""
FIELDS = range(MOST_ENTRIES + 16)
"""The most fields of a message, including one for each tensor's bytes. Requests with more are refused."""

_STEP_BYTES = 32 << 10
_STEP_ELEMENTS = 1024
"""Elements of BYTES in one step."""
_TENSOR_FIELDS = range(64)
"""The fields of an input in which contents are looked for."""
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
"""Field number -> (name, wire type of an element)."""
_MEMORY_USE = "typed contents"
"""Names the contents in the error if there is no memory for them."""
_Octets = np.ndarray[Any, np.dtype[np.uint8]]
_Numbers = np.ndarray[Any, np.dtype[np.uint64]]


def raw_contents(contents: pb.InferTensorContents, datatype: str, input_name: str, model_name: str) -> bytes:
    """Return the elements as raw bytes; integers wider than the datatype keep their low bytes, as in Triton. Raises
    ServeError (INVALID_ARGUMENT) if the elements are in the field of another datatype, or in two fields."""
    raw = b""
    supplied = False
    for field, elements in contents.ListFields():
        if supplied:
            raise invalid_argument(f"{_unexpected_data(input_name, model_name)}, binary data was already supplied.")
        supplied = True
        refuse_field(field.name, datatype, input_name, model_name)
        if datatype == "BYTES":
            raw = encode_bytes_elements(elements)
        elif field.name in _RAW_FIELDS:
            # On the wire these elements look as in raw contents; unknown fields follow them.
            nbytes = len(elements) * _ARRAY_TYPES[datatype].itemsize
            start = len(length_prefix(field.number, nbytes))
            raw = contents.SerializeToString()[start : start + nbytes]
        else:
            wide = np.fromiter(elements, dtype=_ARRAY_TYPES[DATATYPES_OF_FIELDS[field.name][0]], count=len(elements))
            raw = wide.astype(_ARRAY_TYPES[datatype], copy=False).tobytes()
    return raw


def refuse_field(field: str, datatype: str, input_name: str, model_name: str) -> None:
    """Raise ServeError (INVALID_ARGUMENT) if the field does not hold elements of the datatype."""
    held = DATATYPES_OF_FIELDS[field]
    if datatype not in held:
        where = _unexpected_data(input_name, model_name)
        raise invalid_argument(f"{where} of type '{held[0]}', expected datatype '{datatype}'")


def _unexpected_data(input_name: str, model_name: str) -> str:
    return f"unexpected explicit tensor data for input tensor '{input_name}' for model '{model_name}'"


class Unusual(Exception):
    """Contents have a form that only protobuf decodes."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The contents of one input, cut out of its message."""

    index: int
    start: int
    """Position of the input in the message."""
    field: str
    tag: int | None
    """The tag before each element; None = the elements are packed."""
    data: memoryview

    def decode(self, datatype: DataType, admit: Callable[[int], object]) -> Steps[Buffer]:
        """Return the elements as raw bytes; integers wider than the datatype keep their low bytes. `admit` takes the
        bytes to be allocated next, and may raise errors. Raises WireError if the contents are faulty, and Unusual."""
        if self.field == "bytes_contents":
            return (yield from self._strings(admit))
        dtype = datatype.numpy_dtype
        if self.field in ("fp32_contents", "fp64_contents"):
            if self.tag is not None:
                return (yield from self._tagged(dtype.itemsize, admit))
            if len(self.data) % dtype.itemsize:
                raise WireError(f"{self.field} end within an element")
            # Packed elements look as in raw contents.
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
        elements = np.frombuffer(new_memory(count * dtype.itemsize, _MEMORY_USE), dtype)
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
        """Decode elements of a fixed size, each with a tag before it."""
        count, rest = divmod(len(self.data), 1 + itemsize)
        if rest:
            raise Unusual
        admit(count * itemsize)
        source = np.frombuffer(self.data, np.uint8).reshape(count, 1 + itemsize)
        elements = np.frombuffer(new_memory(count * itemsize, _MEMORY_USE), np.uint8).reshape(count, itemsize)
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
        # A string has a prefix of at least two bytes in the message, and of four here. Untouched memory costs nothing.
        view = new_memory(2 * end, _MEMORY_USE)
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
    """The message without raw contents, and with empty contents in place of those that were cut out."""
    cuts: tuple[Cut, ...]
    has_raw: bool

    @classmethod
    def of(cls, message: bytes) -> LargeContents | None:
        """Return the large contents of a message. Returns None if there are none, if they are unusual, or if the
        message is faulty: `RequestDecoder.decode_request` decodes these messages. Raises ServeError (INVALID_ARGUMENT)
        if an input has too many dimensions to be parsed."""
        view = memoryview(message)
        parts: list[Buffer] = []
        cuts: list[Cut] = []
        has_raw = False
        index = end = 0
        try:
            # FIELDS comes first in zip, so that no span beyond its end is taken and lost.
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
    """Cut the large contents out of an input, and append the rest to the parts. Returns None if there are none."""
    tensor = message[span.content : span.end]
    found: FieldSpan | None = None
    end = 0
    for _, field in zip(_TENSOR_FIELDS, field_spans(tensor), strict=False):
        end = field.end
        if field.number == _SHAPE and field.wire_type == LENGTH_DELIMITED:
            # protobuf would take a quarter of a second for 16 million dimensions.
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
    """Yield pieces that end with a whole varint. Raises WireError if a varint is too long or does not end."""
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
    """Return the values of varints. Raises WireError if one is too long."""
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
