"""Encodes responses with typed contents, for requests with typed contents: step by step, with the bytes that protobuf
would write in one call."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal, unimplemented
from rocserve.core.responses import InferResponse
from rocserve.core.steps import Steps
from rocserve.core.tensors import ELEMENT_LENGTH, Buffer, Tensor, octets
from rocserve.core.wire_format import LENGTH_DELIMITED, length_prefix, varint
from rocserve.frontends.grpc.typed_contents import FIELDS_BY_NUMBER
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.parameters import write_parameters

_NUMBERS = {datatype: field.number for field in FIELDS_BY_NUMBER.values() for datatype in field.datatypes}
_NUMBERS[DataType.FP16] = _NUMBERS[DataType.FP32]
_OUTPUTS = pb.ModelInferResponse.OUTPUTS_FIELD_NUMBER
_STRING_TAG = varint(_NUMBERS[DataType.BYTES] << 3 | LENGTH_DELIMITED)
_SHORT_PREFIXES = tuple(_STRING_TAG + varint(length) for length in range(128))


def typed_parts(response: InferResponse) -> Steps[list[Buffer]]:
    """Return the response's pieces, some elements per step. Raises ServeError: UNIMPLEMENTED if a datatype has no field
    in typed contents; INTERNAL if strings do not fit their shape."""
    head = response.head
    message = pb.ModelInferResponse(model_name=head.model_name, model_version=head.model_version, id=response.id)
    write_parameters(response.parameters, message.parameters)
    parts: list[Buffer] = [message.SerializeToString()]
    for tensor in response.outputs:
        rest = pb.ModelInferResponse.InferOutputTensor(
            name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape
        ).SerializeToString()
        contents: list[Buffer] = []
        if tensor.name not in response.in_shared_memory:
            contents = yield from _contents(tensor)
            number = pb.ModelInferResponse.InferOutputTensor.CONTENTS_FIELD_NUMBER
            contents.insert(0, length_prefix(number, sum(map(len, contents))))
        parts += [length_prefix(_OUTPUTS, len(rest) + sum(map(len, contents))), rest, *contents]
    return parts


def _contents(tensor: Tensor) -> Steps[list[Buffer]]:
    number = _NUMBERS.get(tensor.datatype)
    if number is None:
        raise unimplemented(
            f"output '{tensor.name}' has datatype {tensor.datatype.value}, which has no typed contents; send the inputs"
            " as raw_input_contents to get raw_output_contents"
        )
    if tensor.datatype is DataType.BYTES:
        return (yield from _strings(tensor))
    pieces: list[Buffer] = []
    elements = tensor.numpy().ravel()
    step_elements = 8192
    if tensor.datatype in (DataType.FP32, DataType.FP64):
        pieces.append(octets(elements))
    else:
        for begin in range(0, len(elements), step_elements):
            part = elements[begin : begin + step_elements]
            as_written = part.astype(np.float32) if tensor.datatype is DataType.FP16 else _varints(part)
            pieces.append(octets(as_written))
            yield
    nbytes = sum(map(len, pieces))
    # protobuf, too, writes nothing for a field without elements.
    return [length_prefix(number, nbytes), *pieces] if nbytes else []


def _strings(tensor: Tensor) -> Steps[list[Buffer]]:
    data, expected = memoryview(tensor.data), tensor.element_count
    pieces: list[Buffer] = []
    count = position = 0
    try:
        while count < expected:
            step: list[Buffer] = []
            nbytes = 0
            large: Buffer | None = None
            # At most 1,024 strings, or 1 MiB, in one step.
            while count < expected and len(step) < 2048 and nbytes < 1 << 20 and large is None:
                (length,) = ELEMENT_LENGTH.unpack_from(data, position)
                begin, position = position + 4, position + 4 + length
                if position > len(data):
                    raise _wrong_count(tensor)
                step.append(_SHORT_PREFIXES[length] if length < len(_SHORT_PREFIXES) else _STRING_TAG + varint(length))
                # Longer strings are viewed, not copied; views of many short strings would slow the garbage collector.
                if length > 64 << 10:
                    # The caller copies it, step by step, when it joins the parts.
                    large = data[begin:position]
                else:
                    step.append(data[begin:position])
                count += 1
                nbytes += length
            pieces.append(b"".join(step))
            if large is not None:
                pieces.append(large)
            yield
    except struct.error:
        raise _wrong_count(tensor) from None
    if position != len(data):
        raise _wrong_count(tensor)
    return pieces


def _wrong_count(tensor: Tensor) -> ServeError:
    return internal(f"output '{tensor.name}' does not have the {tensor.element_count} strings of its shape")


def _varints(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return integers as protobuf writes them: negative integers are extended to 64 bits."""
    if numbers.dtype.kind == "b":
        bools: np.ndarray[Any, np.dtype[np.uint8]] = (numbers != 0).view(np.uint8)
        return bools
    values = numbers.astype(np.int64).view(np.uint64) if numbers.dtype.kind == "i" else numbers.astype(np.uint64)
    longest = -(-int(values.max()).bit_length() // 7)
    if longest <= 1:
        return values.astype(np.uint8)
    lengths = np.ones(len(values), np.int64)
    for place in range(1, longest):
        lengths += values >= np.uint64(1 << 7 * place)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    written = np.empty(int(ends[-1]), np.uint8)
    for place in range(longest):
        longer = np.flatnonzero(lengths > place)
        digits = (values[longer] >> np.uint64(7 * place) & np.uint64(0x7F)).astype(np.uint8)
        written[begins[longer] + place] = digits | np.where(lengths[longer] > place + 1, 0x80, 0).astype(np.uint8)
    return written
