"""The codec compared with plain protobuf, on random messages, random orders of fields and random bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.typed_requests import decoded
from tritonclient.grpc import service_pb2 as tritons

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.responses import InferResponse
from rocserve.core.tensors import Tensor
from rocserve.core.wire_format import length_prefix, varint
from rocserve.frontends.grpc.codec import RequestDecoder, ResponseEncoder
from rocserve.protocol import grpc_service_pb2 as ours
from rocserve.protocol.faults import describe_fault

pytestmark = pytest.mark.long

DECODER, ENCODER = RequestDecoder(), ResponseEncoder()
"""Shared by all examples, so that remembered heads meet similar requests."""

Request = tritons.ModelInferRequest
names = st.one_of(st.sampled_from(["", "m", "INPUT0", "shared_memory_region"]), st.text(max_size=12))
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
raw_data = st.one_of(st.sampled_from([b"", bytes(64)]), st.binary(max_size=300))
parameters = st.one_of(
    st.builds(tritons.InferParameter, bool_param=st.booleans()),
    st.builds(tritons.InferParameter, int64_param=int64),
    st.builds(tritons.InferParameter, uint64_param=st.integers(0, (1 << 64) - 1)),
    st.builds(tritons.InferParameter, double_param=st.floats(allow_nan=False)),
    st.builds(tritons.InferParameter, string_param=st.text(max_size=8)),
)
parameter_maps = st.dictionaries(names, parameters, max_size=3)
CONTENTS: dict[str, tuple[str, str, st.SearchStrategy[Any]]] = {
    "BOOL": ("bool_contents", "?", st.booleans()),
    "INT8": ("int_contents", "b", st.integers(-128, 127)),
    "INT16": ("int_contents", "h", st.integers(-(1 << 15), (1 << 15) - 1)),
    "INT32": ("int_contents", "i", st.integers(-(1 << 31), (1 << 31) - 1)),
    "INT64": ("int64_contents", "q", int64),
    "UINT8": ("uint_contents", "B", st.integers(0, 255)),
    "UINT16": ("uint_contents", "H", st.integers(0, (1 << 16) - 1)),
    "UINT32": ("uint_contents", "I", st.integers(0, (1 << 32) - 1)),
    "UINT64": ("uint64_contents", "Q", st.integers(0, (1 << 64) - 1)),
    "FP32": ("fp32_contents", "f", st.floats(width=32)),
    "FP64": ("fp64_contents", "d", st.floats()),
    "BYTES": ("bytes_contents", "", st.binary(max_size=6)),
}


@st.composite
def typed_contents(draw: st.DrawFn, datatype: str) -> tritons.InferTensorContents:
    field, _, elements = CONTENTS[datatype]
    return tritons.InferTensorContents(**{field: draw(st.lists(elements, max_size=4))})


@st.composite
def input_tensors(draw: st.DrawFn, typed: bool) -> Request.InferInputTensor:
    datatype = draw(st.sampled_from(list(CONTENTS)))
    tensor = Request.InferInputTensor(
        name=draw(names),
        datatype=datatype,
        shape=draw(st.lists(int64, max_size=3)),
        parameters=draw(st.one_of(st.just({}), parameter_maps)),
    )
    if typed and draw(st.booleans()):
        tensor.contents.CopyFrom(draw(typed_contents(draw(st.sampled_from([datatype, *CONTENTS])))))
    return tensor


outputs = st.builds(Request.InferRequestedOutputTensor, name=names, parameters=parameter_maps)
one_field = st.one_of(
    st.builds(Request, model_name=names),
    st.builds(Request, model_version=names),
    st.builds(Request, id=st.text(max_size=140)),
    st.builds(Request, parameters=parameter_maps),
    st.builds(Request, inputs=st.lists(input_tensors(typed=False), min_size=1, max_size=2)),
    st.builds(Request, inputs=st.lists(input_tensors(typed=True), min_size=1, max_size=2)),
    st.builds(Request, outputs=st.lists(outputs, min_size=1, max_size=2)),
    st.builds(Request, raw_input_contents=st.lists(raw_data, min_size=1, max_size=3)),
).map(Request.SerializeToString)


@st.composite
def tags(draw: st.DrawFn) -> bytes:
    """Any tag, sometimes longer than necessary."""
    tag = varint(draw(st.integers(0, 20)) << 3 | draw(st.integers(0, 7)))
    if draw(st.integers(0, 3)) == 0:
        return tag[:-1] + bytes([tag[-1] | 0x80]) + b"\x80" * draw(st.integers(0, 4)) + b"\0"
    return tag


@st.composite
def unknown_fields(draw: st.DrawFn) -> bytes:
    number = draw(st.integers(8, 3000))
    value = draw(st.binary(max_size=9))
    return draw(
        st.sampled_from(
            [
                varint(number << 3) + varint(len(value)),
                varint(number << 3 | 1) + bytes(8),
                length_prefix(number, len(value)) + value,
                varint(number << 3 | 3) + b"\x08\x01" + varint(number << 3 | 4),
                varint(number << 3 | 5) + bytes(4),
            ]
        )
    )


wire_fields = st.one_of(one_field, one_field, one_field, unknown_fields())
messages = st.lists(wire_fields, max_size=8).map(b"".join)
"""Fields in any order, repeated, with unknown ones between."""

requests = st.builds(
    Request,
    model_name=names,
    model_version=names,
    id=names,
    parameters=st.one_of(st.just({}), parameter_maps),
    inputs=st.lists(input_tensors(typed=False), max_size=3),
    outputs=st.lists(outputs, max_size=2),
    raw_input_contents=st.lists(raw_data, max_size=4),
).map(Request.SerializeToString)
"""Requests as clients send them."""

wire_noise = st.lists(st.one_of(wire_fields, tags(), st.binary(max_size=5)), max_size=8).map(b"".join)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message with bytes changed, removed or inserted."""
    data = bytearray(draw(st.one_of(messages, requests)))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data)


def values(parameters: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    read = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    if None in read.values():
        raise ValueError("a parameter has no value")
    kinds = {"bool_param": "bool", "double_param": "float", "string_param": "str"}
    return {name: (kinds.get(choice, "int"), repr(getattr(parameters[name], choice))) for name, choice in read.items()}


def elements(tensor: Request.InferInputTensor) -> bytes:
    fields = [field.name for field, _ in tensor.contents.ListFields()]
    if not fields:
        return b""
    if tensor.datatype not in CONTENTS or fields != [CONTENTS[tensor.datatype][0]]:
        raise ValueError("the elements are not in the datatype's field")
    found = getattr(tensor.contents, fields[0])
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(element)) + element for element in found)
    wide = {"int_contents": "i", "uint_contents": "I"}.get(fields[0], CONTENTS[tensor.datatype][1])
    size = struct.calcsize("<" + CONTENTS[tensor.datatype][1])
    return b"".join(struct.pack("<" + wide, element)[:size] for element in found)


def read_by_protobuf(data: bytes) -> dict[str, Any]:
    """A message's content as plain values. Raises ValueError if the server must refuse it."""
    message = Request.FromString(data)
    raw = list(message.raw_input_contents)
    inputs, found = [], []
    for tensor in message.inputs:
        inputs.append((tensor.name, tensor.datatype, tuple(tensor.shape), values(tensor.parameters)))
        shared = "shared_memory_region" in tensor.parameters
        if tensor.HasField("contents"):
            if shared or message.raw_input_contents:
                raise ValueError("the data is given twice")
            found.append(elements(tensor))
        elif shared:
            found.append(b"")
        elif raw:
            found.append(raw.pop(0))
        else:
            raise ValueError("the data is missing")
    return {
        "model": (message.model_name, message.model_version, message.id),
        "inputs": inputs,
        "outputs": [(output.name, values(output.parameters)) for output in message.outputs],
        "parameters": values(message.parameters),
        "data": found,
    }


def read_by_codec(data: bytes) -> dict[str, Any]:
    def plain(parameters: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        return {name: (type(value).__name__, repr(value)) for name, value in parameters.items()}

    request = decoded(DECODER, data)
    head = request.head
    return {
        "model": (head.model_name, head.model_version, request.id),
        "inputs": [(entry.name, entry.datatype, entry.shape, plain(entry.parameters)) for entry in head.inputs],
        "outputs": [(output.name, plain(output.parameters)) for output in head.outputs],
        "parameters": plain(head.parameters),
        "data": [bytes(view) for view in request.data],
    }


def agree(data: bytes) -> None:
    """Compare twice, because the second reading finds a remembered head."""
    for _ in range(2):
        try:
            expected = read_by_protobuf(data)
        except (DecodeError, ValueError):
            try:
                read_by_codec(data)
            except ServeError as error:
                assert error.code is StatusCode.INVALID_ARGUMENT
                assert error.text
            else:
                raise AssertionError(f"protobuf refuses {data!r}") from None
        else:
            assert read_by_codec(data) == expected


@given(requests)
@settings(max_examples=100, deadline=None)
def test_requests_as_clients_send_them(data: bytes) -> None:
    agree(data)


@given(messages)
@settings(max_examples=100, deadline=None)
def test_fields_in_any_order(data: bytes) -> None:
    agree(data)


@given(damaged())
@settings(max_examples=100, deadline=None)
def test_damaged_messages(data: bytes) -> None:
    agree(data)


def test_a_remembered_head_does_not_hide_that_data_is_given_twice() -> None:
    typed, raw = b"*\x0a\x0a\x01x\x12\x05INT32", b":\x04aaaa"
    empty = b"*\x0c\x0a\x01x\x12\x05INT32*\x00"
    for data in (typed + raw, empty, empty + raw, raw + empty):
        agree(data)


@given(st.one_of(wire_noise, st.binary(max_size=40)))
@settings(max_examples=100, deadline=None)
@example(b"\x3a\x80\x80\x80\x80\x80\x00")
@example(b"\x1a\x80\x80\x80\x80\x80\x00")
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x3a\xff\xff\xff\xff\x0f")
def test_random_bytes(data: bytes) -> None:
    agree(data)
    assert describe_fault(data, ours.ModelInferRequest)


BUFFERS = (bytes, bytearray, memoryview)
tensors = st.builds(
    lambda name, datatype, shape, data, buffer: Tensor(name, datatype, tuple(shape), buffer(data)),
    names,
    st.sampled_from(list(DataType)),
    st.lists(st.integers(0, 1 << 40), max_size=3),
    raw_data,
    st.sampled_from(BUFFERS),
)
plain_parameters = st.one_of(
    st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False), st.text(max_size=8)
)
responses = st.builds(
    InferResponse.of,
    names,
    st.sampled_from(["1", "2"]),
    st.text(max_size=140),
    st.lists(tensors, max_size=3),
    st.one_of(st.just({}), st.dictionaries(names, plain_parameters, max_size=3)),
)


@given(responses)
@settings(max_examples=100, deadline=None)
def test_responses(response: InferResponse) -> None:
    for _ in range(2):
        data = b"".join(ENCODER.parts(response))
        message = tritons.ModelInferResponse.FromString(data)
        assert (message.model_name, message.model_version, message.id) == (
            response.head.model_name,
            response.head.model_version,
            response.id,
        )
        assert [(output.name, output.datatype, tuple(output.shape)) for output in message.outputs] == [
            (tensor.name, tensor.datatype.value, tensor.shape) for tensor in response.outputs
        ]
        assert list(message.raw_output_contents) == [bytes(tensor.data) for tensor in response.outputs]
        assert values(message.parameters) == {
            name: (type(value).__name__, repr(value)) for name, value in response.parameters.items()
        }
        assert all(not output.HasField("contents") and not output.parameters for output in message.outputs)
        stream = tritons.ModelStreamInferResponse.FromString(ENCODER.encode_stream_response(response, True))
        assert stream.HasField("infer_response")
        assert stream.infer_response.parameters.pop("triton_final_response").bool_param
        assert (stream.error_message, stream.infer_response) == ("", message)


@given(st.text(max_size=40), st.text(max_size=10))
@settings(deadline=None)
def test_stream_errors(text: str, request_id: str) -> None:
    message = tritons.ModelStreamInferResponse.FromString(ENCODER.encode_stream_error(text, request_id))
    assert (message.error_message, message.infer_response.id) == (text, request_id)
