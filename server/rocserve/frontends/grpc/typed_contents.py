"""Decodes the typed contents of requests to raw bytes: elements in the field of their datatype. The contents are cut
out of the message; protobuf parses the rest. Contents are decoded some elements per step, because protobuf takes a
second for 16 million integers, and no other client would be answered in that time.

Contents may be packed, as clients write them, or not packed. Other forms (contents in two pieces or of two datatypes,
unknown fields) raise `Unusual`; protobuf then serialises the whole message again in the usual form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.requests import MOST_ENTRIES, check_entries
from rocserve.core.steps import Steps
from rocserve.core.tensors import ELEMENT_LENGTH, Buffer, octets
from rocserve.core.wire_format import (
    FIXED32,
    FIXED64,
    LENGTH_DELIMITED,
    LONGEST_VARINT,
    VARINT,
    WireError,
    length_prefix,
    read_varint,
)
from rocserve.plane.heap import COPIED_AT_ONCE, copy_bytes, copy_in_steps, new_memory
from rocserve.protocol import grpc_service_pb2 as pb

DECODED_AT_ONCE = 64 << 10
"""Bytes of a message, or of an answer, up to which its contents are decoded or encoded in one call."""
FIELDS = range(MOST_ENTRIES + 16)
"""The most fields of a message, including one for each tensor's bytes. Requests with more are refused."""

_STEP_BYTES = 32 << 10
_INPUTS = pb.ModelInferRequest.INPUTS_FIELD_NUMBER
_INPUTS_TAG = _INPUTS << 3 | LENGTH_DELIMITED
ID_TAG = pb.ModelInferRequest.ID_FIELD_NUMBER << 3 | LENGTH_DELIMITED
RAW_TAG = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | LENGTH_DELIMITED
_CONTENTS = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
_CONTENTS_TAG = _CONTENTS << 3 | LENGTH_DELIMITED
_SHAPE_TAG = pb.ModelInferRequest.InferInputTensor.SHAPE_FIELD_NUMBER << 3 | LENGTH_DELIMITED
_NO_CONTENTS = length_prefix(_CONTENTS, 0)
_MEMORY_USE = "typed contents"
"""Names the contents in the error if there is no memory for them."""
_Octets = np.ndarray[Any, np.dtype[np.uint8]]
_Numbers = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True, eq=False)
class ContentsField:
    """A field of typed contents."""

    number: int
    wire_type: int
    """Of one element."""
    datatypes: tuple[DataType, ...]
    """What the field may hold. Error texts name the first."""

    def refuse_other(self, datatype: str, input_name: str, model_name: str) -> None:
        """Raise ServeError (INVALID_ARGUMENT) if the field does not hold elements of the datatype."""
        if all(datatype != held.value for held in self.datatypes):
            where = _unexpected_data(input_name, model_name)
            raise invalid_argument(f"{where} of type '{self.datatypes[0].value}', expected datatype '{datatype}'")


FIELDS_BY_NUMBER: Mapping[int, ContentsField] = {
    field.number: field
    for field in (
        ContentsField(1, VARINT, (DataType.BOOL,)),
        ContentsField(2, VARINT, (DataType.INT32, DataType.INT16, DataType.INT8)),
        ContentsField(3, VARINT, (DataType.INT64,)),
        ContentsField(4, VARINT, (DataType.UINT32, DataType.UINT16, DataType.UINT8)),
        ContentsField(5, VARINT, (DataType.UINT64,)),
        ContentsField(6, FIXED32, (DataType.FP32,)),
        ContentsField(7, FIXED64, (DataType.FP64,)),
        ContentsField(8, LENGTH_DELIMITED, (DataType.BYTES,)),
    )
}


def second_contents(input_name: str, model_name: str) -> ServeError:
    """Return the error for an input whose contents are in two fields."""
    return invalid_argument(f"{_unexpected_data(input_name, model_name)}, binary data was already supplied.")


def _unexpected_data(input_name: str, model_name: str) -> str:
    return f"unexpected explicit tensor data for input tensor '{input_name}' for model '{model_name}'"


class Unusual(ValueError):
    """Contents, or their message, have a form that only protobuf decodes."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The contents of one input, cut out of its message."""

    index: int
    start: int
    """Position of the input in the message."""
    field: ContentsField
    tag: int | None
    """The tag before each element; None = the elements are packed."""
    data: memoryview

    def decode(self, datatype: DataType, admit: Callable[[int], object]) -> Steps[Buffer]:
        """Return the elements as raw bytes; integers wider than the datatype keep their low bytes, as in Triton.
        `admit` takes the bytes to be allocated next, and may raise errors. Raises WireError if the contents are faulty,
        and Unusual."""
        dtype = datatype.numpy_dtype
        if self.field.wire_type == VARINT:
            return (yield from self._integers(dtype, admit))
        if self.field.wire_type == LENGTH_DELIMITED:
            return (yield from self._strings(admit))
        if self.tag is not None:
            return (yield from self._tagged(dtype.itemsize, admit))
        if len(self.data) % dtype.itemsize:
            raise WireError(f"{datatype.value} contents end within an element")
        # Packed elements look as in raw contents.
        return self.data

    def _integers(self, dtype: np.dtype[Any], admit: Callable[[int], object]) -> Steps[Buffer]:
        source = np.frombuffer(self.data, np.uint8)
        if self.tag is None and len(source) <= _STEP_BYTES:
            # Most contents are small: their elements are not counted first.
            (part,) = _whole_varints(source)
            numbers = _varints(part)
            admit(len(numbers) * dtype.itemsize)
            return octets(numbers != 0 if dtype == np.bool_ else numbers.astype(dtype))
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
            elements[begin:end] = numbers != 0 if dtype == np.bool_ else numbers
            yield
        if is_tag:
            raise WireError("they end after a tag")
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
        data, tag, pack = self.data, self.tag, ELEMENT_LENGTH.pack
        position, end = 0, len(data)
        # A string has a prefix of at least two bytes in the message, and of four here. Untouched memory costs nothing.
        view = new_memory(2 * end, _MEMORY_USE)
        used = 0
        while position < end:
            pieces: list[Buffer] = []
            large: Buffer = b""
            nbytes = 0
            # Elements of BYTES in one step.
            for _ in range(1024):
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


def cut_contents(message: bytes) -> tuple[bytes, Sequence[Cut]]:
    """Cut the typed contents out of a serialised ModelInferRequest. Returns the message without id and raw contents,
    and with empty contents in place of those that were cut out; and the contents, none if there are none. Raises
    IndexError, WireError or Unusual if the message is faulty or in an unusual form, ServeError (INVALID_ARGUMENT) if an
    input has too many dimensions to be parsed."""
    view = memoryview(message)
    parts: list[Buffer] = []
    cuts: list[Cut] = []
    index = position = 0
    # In the usual form each input has a name, a datatype, a shape and contents.
    most_fields = 4 * MOST_ENTRIES
    while position < len(message):
        start, tag = position, message[position]
        length, begin = read_varint(message, position + 1)
        position = begin + length
        if position > len(message) or tag & 0x87 != LENGTH_DELIMITED:
            raise Unusual
        if tag == _INPUTS_TAG:
            cut, most_fields = _cut(view, start, begin, position, index, parts, most_fields)
            index += 1
            if cut is not None:
                cuts.append(cut)
                continue
        if tag not in (ID_TAG, RAW_TAG):
            parts.append(view[start:position])
    return b"".join(parts), cuts


def _cut(
    message: memoryview, start: int, begin: int, end: int, index: int, parts: list[Buffer], most_fields: int
) -> tuple[Cut | None, int]:
    """Cut the contents out of an input, and append the rest to the parts. Returns the contents, None if there are none,
    and how many fields the other inputs may have."""
    found: tuple[int, int, int] | None = None
    position = begin
    while position < end:
        field_start, tag = position, message[position]
        value, position = read_varint(message, position + 1, LONGEST_VARINT)
        content = position
        if tag & 7 == LENGTH_DELIMITED:
            position += value
        most_fields -= 1
        if position > end or tag & 0x85 or not most_fields:
            raise Unusual
        if tag == _SHAPE_TAG:
            # protobuf would take a quarter of a second for 16 million dimensions.
            check_entries(int(np.count_nonzero(np.frombuffer(message, np.uint8)[content:position] < 0x80)))
        if tag == _CONTENTS_TAG:
            if found is not None:
                raise Unusual
            found = field_start, content, position
    if found is None:
        return None, most_fields
    cut_from, content, cut_to = found
    contents = message[content:cut_to]
    if not contents:
        return None, most_fields
    first_tag: int | None = contents[0]
    field = FIELDS_BY_NUMBER.get(contents[0] >> 3)
    if field is None:
        raise Unusual
    if contents[0] & 7 != field.wire_type:
        length, content = read_varint(contents, 1)
        if contents[0] & 7 != LENGTH_DELIMITED or content + length != len(contents):
            raise Unusual
        first_tag, contents = None, contents[content:]
        if not contents:
            return None, most_fields
    rest: list[Buffer] = [message[begin:cut_from], _NO_CONTENTS, message[cut_to:end]]
    parts.append(length_prefix(_INPUTS, sum(map(len, rest))))
    parts += rest
    return Cut(index, start, field, first_tag, contents), most_fields


def _whole_varints(source: _Octets) -> Iterator[_Octets]:
    """Yield pieces that end with a whole varint. Raises WireError if a varint is too long or does not end."""
    begin, end = 0, len(source)
    while begin < end:
        part = source[begin : begin + _STEP_BYTES]
        if part[-1] >= 0x80:
            ends = np.flatnonzero(part[-LONGEST_VARINT:] < 0x80)
            if not len(ends) or begin + len(part) == end:
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
