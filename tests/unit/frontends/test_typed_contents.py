"""Typed contents: decoded in steps, with the results of protobuf, however they are encoded."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.typed_requests import decoded

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import Holding, MemoryFull, RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.wire_format import FIXED32, FIXED64, LENGTH_DELIMITED, VARINT, length_prefix, varint
from rocserve.frontends.grpc import typed_contents
from rocserve.frontends.grpc.codec import RequestDecoder, TypedRequest
from rocserve.frontends.grpc.typed_contents import DECODED_AT_ONCE
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.faults import describe_fault
from rocserve.protocol.grpc_service_pb2 import ModelInferRequest

COUNT = 1 << 17


def any_of(bits: int, signed: bool = True) -> list[int]:
    """Numbers of all lengths."""
    chance = random.Random(bits)
    least = -(1 << bits - 1) if signed else 0
    most = (1 << bits - 1) - 1 if signed else (1 << bits) - 1
    widths = [chance.randrange(1, bits + 1) for _ in range(COUNT)]
    return [
        least,
        most,
        *(min(max(chance.randrange(1 << width) + (least >> bits - width), least), most) for width in widths),
    ]


CASES: dict[str, tuple[str, str, Callable[[], list[Any]]]] = {
    "bools": ("BOOL", "bool_contents", lambda: [True, False, False] * COUNT),
    "small integers": ("INT32", "int_contents", lambda: [5] * COUNT),
    "integers": ("INT32", "int_contents", lambda: any_of(32)),
    "short ones": ("INT16", "int_contents", lambda: any_of(32)),
    "bytes": ("INT8", "int_contents", lambda: any_of(32)),
    "long ones": ("INT64", "int64_contents", lambda: any_of(64)),
    "unsigned": ("UINT32", "uint_contents", lambda: any_of(32, signed=False)),
    "unsigned bytes": ("UINT8", "uint_contents", lambda: any_of(32, signed=False)),
    "long unsigned": ("UINT64", "uint64_contents", lambda: any_of(64, signed=False)),
    "floats": ("FP32", "fp32_contents", lambda: [0.5, -1e30, float("inf")] * COUNT),
    "doubles": ("FP64", "fp64_contents", lambda: [0.1, -1e300] * COUNT),
    "strings": ("BYTES", "bytes_contents", lambda: [b"", b"a", bytes(200), b"\xff" * 20_000] * 64 + [b""] * COUNT),
    "a large string": ("BYTES", "bytes_contents", lambda: [b"a", random.Random(7).randbytes(3 << 20), b"", b"b"]),
}
"""The datatype, the field, and what makes the elements, in the process that runs these tests only."""
every_kind = pytest.mark.parametrize("kind", CASES)


@cache
def case(kind: str) -> tuple[str, str, list[Any]]:
    datatype, field, make = CASES[kind]
    return datatype, field, make()


def message_of(datatype: str, field: str, elements: Iterable[Any]) -> ModelInferRequest:
    message = ModelInferRequest(model_name="m", id="r1")
    message.inputs.add(name="FIRST", datatype="INT32", shape=[1]).contents.int_contents.append(7)
    tensor = message.inputs.add(name="I", datatype=datatype, shape=[3])
    getattr(tensor.contents, field).extend(elements)
    message.inputs.add(name="LAST", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"z")
    return message


def written(*contents: bytes, datatype: str = "INT32") -> bytes:
    """A message with an input whose contents are these bytes, one field of contents for each."""
    tensor = ModelInferRequest.InferInputTensor(name="I", datatype=datatype, shape=[3]).SerializeToString()
    for one in contents:
        tensor += length_prefix(ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER, len(one)) + one
    rest = ModelInferRequest(model_name="m").SerializeToString()
    return rest + length_prefix(ModelInferRequest.INPUTS_FIELD_NUMBER, len(tensor)) + tensor


def in_steps(data: bytes, admit: Callable[[int], object] = lambda nbytes: None) -> tuple[InferRequest, int]:
    """The decoded request, and the number of steps."""
    typed = RequestDecoder().decode_request(data)
    assert isinstance(typed, TypedRequest)
    steps = typed.decode(admit)
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            request: InferRequest = end.value
            return request, count
        count += 1


WIDE = {"int_contents": np.int32, "uint_contents": np.uint32}


def elements(tensor: ModelInferRequest.InferInputTensor) -> bytes:
    """As protobuf reads them."""
    if not tensor.contents.ListFields():
        return b""
    field, found = tensor.contents.ListFields()[0]
    datatype = DataType(tensor.datatype)
    if datatype is DataType.BYTES:
        return b"".join(struct.pack("<I", len(element)) + element for element in found)
    return np.array(found, WIDE.get(field.name, datatype.numpy_dtype)).astype(datatype.numpy_dtype).tobytes()


def assert_as_by_protobuf(data: bytes) -> None:
    message = ModelInferRequest.FromString(data)
    request = decoded(RequestDecoder(), data)
    assert [bytes(one) for one in request.data] == [elements(tensor) for tensor in message.inputs]
    assert [(head.name, head.datatype, head.shape) for head in request.head.inputs] == [
        (tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in message.inputs
    ]
    assert (request.head.model_name, request.id, request.head.is_typed) == ("m", message.id, True)


@every_kind
def test_packed_elements_come_as_protobuf_reads_them(kind: str) -> None:
    assert_as_by_protobuf(message_of(*case(kind)).SerializeToString())


@every_kind
def test_elements_each_behind_its_tag_come_as_protobuf_reads_them(kind: str) -> None:
    datatype, field, elements = case(kind)
    number = pb.InferTensorContents.DESCRIPTOR.fields_by_name[field].number
    write: dict[str, tuple[int, Callable[[Any], bytes]]] = {
        "fp32_contents": (FIXED32, struct.Struct("<f").pack),
        "fp64_contents": (FIXED64, struct.Struct("<d").pack),
        "bytes_contents": (LENGTH_DELIMITED, lambda element: varint(len(element)) + element),
    }
    wire_type, of = write.get(field, (VARINT, lambda element: varint(int(element) % (1 << 64))))
    assert_as_by_protobuf(
        written(b"".join(varint(number << 3 | wire_type) + of(one) for one in elements), datatype=datatype)
    )


@every_kind
def test_what_takes_long_takes_many_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datatype, field, elements = case(kind)
    data = message_of(datatype, field, elements).SerializeToString()
    is_copied = field not in ("fp32_contents", "fp64_contents")
    assert in_steps(data)[1] >= (len(data) >> 20 if is_copied else 0)
    if is_copied and len(elements) >= COUNT:
        assert in_steps(data)[1] >= len(data) // typed_contents._STEP_BYTES


PACKED_INTEGERS = length_prefix(2, 2 * DECODED_AT_ONCE)
TOO_LONG = b"\xff" * 10 + b"\1"
FAULTY = {
    "a varint without end": written(PACKED_INTEGERS + b"\1" * (2 * DECODED_AT_ONCE - 1) + b"\x80"),
    "a varint that is too long": written(PACKED_INTEGERS + b"\1" * (2 * DECODED_AT_ONCE - 11) + TOO_LONG),
    "nothing but one": written(PACKED_INTEGERS + b"\xff" * (2 * DECODED_AT_ONCE)),
    "a tag without a number": written(b"\x10\1" * DECODED_AT_ONCE + b"\x10"),
    "half a float": written(length_prefix(6, DECODED_AT_ONCE + 3) + bytes(DECODED_AT_ONCE + 3), datatype="FP32"),
    "half a string": written(b"\x42\1a" * DECODED_AT_ONCE + b"\x42\5abc", datatype="BYTES"),
    "half a length": written(b"\x42\1a" * DECODED_AT_ONCE + b"\x42\xff", datatype="BYTES"),
    "a tag alone": written(b"\x42\1a" * DECODED_AT_ONCE + b"\x42", datatype="BYTES"),
    "a name that is not text": written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE)) + length_prefix(1, 1) + b"\xff",
    "cut off": written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE))[:-1],
    "no message": b"\xff" * (1 << 20),
}
TWO_FIELDS = written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE), length_prefix(8, 1) + b"a")
INPUT = "for input tensor 'I' for model 'm'"
REFUSED = {
    "another datatype": (
        written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE), datatype="FP32"),
        f"unexpected explicit tensor data {INPUT} of type 'INT32', expected datatype 'FP32'",
    ),
    "no datatype": (
        written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE), datatype="INT"),
        f"unexpected explicit tensor data {INPUT} of type 'INT32', expected datatype 'INT'",
    ),
    "contents of two datatypes": (TWO_FIELDS, f"unexpected explicit tensor data {INPUT}, binary data was already"),
    "raw contents beside": (
        written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE)) + length_prefix(7, 4) + bytes(4),
        "contents field must not be specified when using raw_input_contents for 'I' for model 'm'",
    ),
    "a long id": (
        written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE)) + length_prefix(3, 1 << 17) + b"i" * (1 << 17),
        "a request's id may have 65536 bytes, got 131072",
    ),
}
UNUSUAL = {
    "packed behind single ones": written(b"\x10\1" * DECODED_AT_ONCE + length_prefix(2, 3) + b"\1\2\3"),
    "other floats in between": written(b"\x35abcd" * DECODED_AT_ONCE + b"\x32\4abcd", datatype="FP32"),
    "unknown strings in between": written(b"\x42\1a" * DECODED_AT_ONCE + b"\x4a\1a", datatype="BYTES"),
    "two contents": written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE), length_prefix(2, 1) + b"\1"),
    "two pieces": written(length_prefix(2, 1) + b"\1" + PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE)),
    "small two pieces": written(length_prefix(2, 1) + b"\1" + length_prefix(2, 1) + b"\2"),
    "unknown fields after the contents": written(length_prefix(2, 1) + b"\1" + b"\xf8\x07\x05"),
    "an unknown field before the model": b"\xf8\x07\x05" + written(length_prefix(2, 1) + b"\1"),
    "empty contents": written(length_prefix(2, 0), datatype="FP32"),
    "no contents": written(b"", datatype="FP32"),
}


@pytest.mark.parametrize("what", FAULTY)
def test_faulty_contents_are_refused_with_their_place(what: str) -> None:
    with pytest.raises(ServeError) as raised:
        decoded(RequestDecoder(), FAULTY[what])
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert raised.value.text == (
        "the request is not a valid inference.ModelInferRequest: " + describe_fault(FAULTY[what], ModelInferRequest)
    )


@pytest.mark.parametrize("what", REFUSED)
def test_contents_that_do_not_belong_to_their_input_are_refused(what: str) -> None:
    data, text = REFUSED[what]
    with pytest.raises(ServeError) as raised:
        decoded(RequestDecoder(), data)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert raised.value.text.startswith(text)


@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_forms_are_read_as_protobuf_reads_them(what: str) -> None:
    assert_as_by_protobuf(UNUSUAL[what])


def test_equal_heads_are_one_object_whatever_id_and_contents() -> None:
    decoder = RequestDecoder()
    messages = [message_of("INT32", "int_contents", [value] * COUNT) for value in (1, 300)]
    messages[1].id = "another"
    first, second = (decoded(decoder, message.SerializeToString()) for message in messages)
    assert first.head is second.head
    assert (first.id, second.id) == ("r1", "another")
    assert [int(np.frombuffer(request.data[1], np.int32)[-1]) for request in (first, second)] == [1, 300]
    # The same head, but now the contents are in the field of another datatype.
    other = message_of("INT32", "fp32_contents", [1.0]).SerializeToString()
    with pytest.raises(ServeError, match="of type 'FP32', expected datatype 'INT32'"):
        decoded(decoder, other)
    with pytest.raises(ServeError, match="contents field must not be specified"):
        decoded(decoder, messages[0].SerializeToString() + length_prefix(7, 4) + bytes(4))


def test_typed_and_raw_messages_of_one_length_are_distinguished() -> None:
    typed = written(PACKED_INTEGERS + bytes(2 * DECODED_AT_ONCE))
    raw = ModelInferRequest(model_name="m")
    raw.inputs.add(name="I", datatype="UINT8", shape=[len(typed)])
    # The tag, the length, and the bytes that it counts.
    raw.raw_input_contents.append(bytes(len(typed) - raw.ByteSize() - 4))
    data = raw.SerializeToString()
    assert len(data) == len(typed)
    decoder = RequestDecoder()
    for _ in range(3):
        assert not isinstance(decoder.decode_request(data), TypedRequest)
        assert isinstance(decoder.decode_request(typed), TypedRequest)


@pytest.mark.parametrize("size", [1, 1 << 40])
def test_dimensions_that_are_too_many_are_refused_before_they_are_parsed(size: int) -> None:
    message = ModelInferRequest(model_name="m")
    message.inputs.add(name="I", datatype="INT32", shape=[size] * (1 << 17))
    with pytest.raises(ServeError) as raised:
        RequestDecoder().decode_request(message.SerializeToString())
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert raised.value.text == (
        "a request may have 16384 inputs, outputs, dimensions and parameters together, got 131072"
    )


def test_memory_is_asked_for_before_it_is_used() -> None:
    data = message_of("INT64", "int64_contents", [1] * COUNT).SerializeToString()
    memory, holding = RequestMemory(COUNT), Holding()
    with pytest.raises(MemoryFull) as raised:
        in_steps(data, lambda nbytes: memory.requests.admit(holding, nbytes))
    assert raised.value.code is StatusCode.RESOURCE_EXHAUSTED
    # The bytes of the input before.
    assert holding.held_bytes == 4
