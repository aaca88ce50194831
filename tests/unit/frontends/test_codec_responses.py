"""Encoding responses, read back with protobuf and with tritonclient; also typed contents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tritonclient.grpc import InferResult
from tritonclient.grpc import service_pb2 as tritons

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.memo import MOST_REMEMBERED
from rocserve.core.responses import InferResponse
from rocserve.core.tensors import Tensor, encode_bytes_elements, tensor_from_numpy
from rocserve.frontends.grpc.codec import ResponseEncoder, join_large
from rocserve.frontends.grpc.typed_answers import typed_parts
from rocserve.plane.heap import COPIED_AT_ONCE
from rocserve.protocol.grpc_service_pb2 import ModelInferResponse, ModelStreamInferResponse

VALUES = np.arange(16, dtype="<i4").reshape(1, 16)


def _response(**fields: object) -> InferResponse:
    outputs = [tensor_from_numpy("SUM", VALUES), tensor_from_numpy("DIFFERENCE", -VALUES)]
    return InferResponse.of(
        **{"model_name": "m", "model_version": "1", "request_id": "17", "outputs": outputs, **fields}
    )


def _encoded(codec: ResponseEncoder, response: InferResponse) -> bytes:
    return b"".join(codec.parts(response))


def _read(response: InferResponse) -> ModelInferResponse:
    return ModelInferResponse.FromString(_encoded(ResponseEncoder(), response))


def test_the_bytes_are_those_of_protobuf() -> None:
    expected = ModelInferResponse(model_name="m", model_version="1", id="17")
    expected.parameters["done"].bool_param = True
    for name, values in (("SUM", VALUES), ("DIFFERENCE", -VALUES)):
        expected.outputs.add(name=name, datatype="INT32", shape=[1, 16])
        expected.raw_output_contents.append(values.tobytes())
    codec = ResponseEncoder()
    for _ in range(2):
        assert _encoded(codec, _response(parameters={"done": True})) == expected.SerializeToString()
    for final in (True, False):
        expected.parameters["triton_final_response"].bool_param = final
        encoded = codec.encode_stream_response(_response(parameters={"done": True}), final)
        assert ModelStreamInferResponse.FromString(encoded) == ModelStreamInferResponse(infer_response=expected)


def test_tritonclient_reads_the_arrays() -> None:
    texts = np.array([b"one", b"", b"\xff"], dtype=object)
    halves = np.array([0.5, -2.0], dtype=np.float16)
    empty = np.zeros((0, 3), dtype=np.float64)
    outputs = [tensor_from_numpy(name, array) for name, array in (("T", texts), ("H", halves), ("E", empty))]
    data = _encoded(ResponseEncoder(), _response(outputs=outputs))
    result = InferResult(tritons.ModelInferResponse.FromString(data))
    for name, array in (("T", texts), ("H", halves), ("E", empty)):
        np.testing.assert_array_equal(result.as_numpy(name), array)


def test_a_remembered_head_takes_other_ids_data_and_lengths() -> None:
    codec = ResponseEncoder()
    for request_id, texts in (("a", [b"x"]), ("", [b"y" * 1000]), ("é" * 100, [b""])):
        raw = encode_bytes_elements(texts)
        response = _response(request_id=request_id, outputs=[Tensor("T", DataType.BYTES, (1,), raw)])
        message = ModelInferResponse.FromString(_encoded(codec, response))
        assert (message.id, list(message.raw_output_contents)) == (request_id, [raw])


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "n"},
        {"model_version": "2"},
        {"outputs": []},
        {"outputs": [tensor_from_numpy("SUM", VALUES)]},
        {"outputs": [tensor_from_numpy("SUM", VALUES.reshape(16)), tensor_from_numpy("DIFFERENCE", VALUES)]},
        {"outputs": [tensor_from_numpy("SUM", VALUES.view("<u4")), tensor_from_numpy("DIFFERENCE", VALUES)]},
    ],
)
def test_responses_with_other_heads_are_encoded_with_their_own(change: dict[str, object]) -> None:
    codec = ResponseEncoder()
    _encoded(codec, _response())
    response = _response(**change)
    message = ModelInferResponse.FromString(_encoded(codec, response))
    assert (message.model_name, message.model_version) == (response.head.model_name, response.head.model_version)
    assert [(output.name, output.datatype, tuple(output.shape)) for output in message.outputs] == [
        (tensor.name, tensor.datatype.value, tensor.shape) for tensor in response.outputs
    ]


def test_buffers_of_every_kind() -> None:
    wide = memoryview(VALUES.copy()).cast("B").cast("i")
    for data in (VALUES.tobytes(), bytearray(VALUES.tobytes()), memoryview(VALUES.tobytes()), wide):
        message = _read(_response(outputs=[Tensor("X", DataType.INT32, (1, 16), data)]))
        assert list(message.raw_output_contents) == [VALUES.tobytes()]


def test_the_bytes_outlive_the_tensors_memory() -> None:
    memory = bytearray(VALUES.tobytes())
    data = _encoded(ResponseEncoder(), _response(outputs=[Tensor("X", DataType.INT32, (1, 16), memoryview(memory))]))
    memory[:] = bytes(len(memory))
    assert ModelInferResponse.FromString(data).raw_output_contents[0] == VALUES.tobytes()


def test_parameters_of_every_kind() -> None:
    values = {"flag": False, "low": -(1 << 63), "high": (1 << 64) - 1, "text": "ü", "ratio": 0.25}
    message = _read(_response(parameters=values))
    read = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in message.parameters.items()}
    assert read == values
    assert message.parameters["flag"].WhichOneof("parameter_choice") == "bool_param"
    assert message.parameters["high"].WhichOneof("parameter_choice") == "uint64_param"


@pytest.mark.parametrize(("value", "text"), [(1 << 64, "64 bits"), (b"raw", "of type bytes")])
def test_parameters_without_a_form_on_the_wire(value: object, text: str) -> None:
    with pytest.raises(ServeError, match=text) as caught:
        _encoded(ResponseEncoder(), _response(parameters={"x": value}))
    assert caught.value.code is StatusCode.INTERNAL


def test_stream_errors() -> None:
    codec = ResponseEncoder()
    message = ModelStreamInferResponse.FromString(codec.encode_stream_error("no \udcff luck", "17"))
    assert (message.error_message, message.infer_response.id) == ("no ? luck", "17")
    assert message.infer_response == ModelInferResponse(id="17")
    assert ModelStreamInferResponse.FromString(codec.encode_stream_error("no")).error_message == "no"
    answer = ModelStreamInferResponse.FromString(codec.encode_stream_error("no", "17", "m", False)).infer_response
    assert (answer.id, answer.model_name) == ("17", "m")
    assert answer.parameters["triton_final_response"].bool_param is False


def test_remembered_heads_are_bounded() -> None:
    encoder = ResponseEncoder()
    for number in range(2 * MOST_REMEMBERED + 10):
        _encoded(encoder, _response(model_version=str(number)))
        assert len(encoder._heads) <= MOST_REMEMBERED


def test_a_large_message_is_joined_in_steps() -> None:
    parts = [b"head", memoryview(np.arange(COPIED_AT_ONCE // 4 + 1, dtype=np.int32)).cast("B"), b"", b"tail"]
    steps, count = join_large(parts), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            assert end.value == b"".join(parts) and count == 4
            return
        count += 1


def test_a_message_that_there_is_no_memory_for_is_an_error() -> None:
    """Otherwise its client would wait for ever."""
    parts = [memoryview(np.broadcast_to(np.uint8(0), 1 << 50))]
    with pytest.raises(ServeError, match=f"no memory for an answer of {1 << 50} bytes") as raised:
        next(join_large(parts))
    assert raised.value.code is StatusCode.RESOURCE_EXHAUSTED


def response(*tensors: Tensor) -> InferResponse:
    return replace(InferResponse.of("m", "1", "id", tensors, {"told": 1}), is_typed=True)


FIELDS = {
    DataType.BOOL: "bool_contents",
    **dict.fromkeys((DataType.INT8, DataType.INT16, DataType.INT32), "int_contents"),
    DataType.INT64: "int64_contents",
    **dict.fromkeys((DataType.UINT8, DataType.UINT16, DataType.UINT32), "uint_contents"),
    DataType.UINT64: "uint64_contents",
    **dict.fromkeys((DataType.FP16, DataType.FP32), "fp32_contents"),
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}
LONG = 50_000
ANY = np.random.default_rng(7)


@pytest.mark.parametrize("shape", [(LONG,), (2,), (0,), (2, LONG // 2)])
@pytest.mark.parametrize(
    "array",
    [
        ANY.integers(0, 2, LONG).astype(bool),
        *(
            ANY.integers(np.iinfo(kind).min, np.iinfo(kind).max, LONG, kind) >> ANY.integers(0, bits, LONG, kind)
            for kind, bits in (
                (np.int8, 8), (np.int16, 16), (np.int32, 32), (np.int64, 64),
                (np.uint8, 8), (np.uint16, 16), (np.uint32, 32), (np.uint64, 64),
            )
        ),
        ANY.random(LONG).astype(np.float16),
        ANY.random(LONG).astype(np.float32),
        ANY.random(LONG),
        np.array([b"", b"a", bytes(127), bytes(128), b"b" * 1000] * (LONG // 5 - 1) + [b"c" * 70_000] * 5, np.object_),
    ],
    ids=lambda array: str(array.dtype),
)  # fmt: skip
def test_a_typed_answer_is_written_in_steps_as_protobuf_writes_it(array: np.ndarray, shape: tuple[int, ...]) -> None:
    made = response(tensor_from_numpy("FIRST", np.arange(3)), tensor_from_numpy("OUT", array[: shape[-1]].reshape(-1)))
    made.id = "r"
    expected = ModelInferResponse(model_name="m", model_version="1", id="r")
    expected.parameters["told"].int64_param = 1
    for tensor in made.outputs:
        output = expected.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        getattr(output.contents, FIELDS[tensor.datatype]).extend(tensor.numpy().tolist())
    steps = typed_parts(made)
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            written = b"".join(end.value)
            break
        count += 1
    assert written == expected.SerializeToString(deterministic=True)
    if shape[-1] == LONG and array.dtype not in (np.float32, np.float64):
        assert count >= LONG // 8192


@pytest.mark.parametrize("data", [b"\1\0\0\0a", b"\1\0\0\0a\5\0\0\0b", b"\1\0\0\0a\0\0\0\0x", b"\1\0\0\0a\0"])
def test_an_answer_whose_strings_are_not_those_of_its_shape_is_an_error(data: bytes) -> None:
    with pytest.raises(ServeError) as refused:
        list(typed_parts(response(Tensor("OUT", DataType.BYTES, (2,), data))))
    assert refused.value.code is StatusCode.INTERNAL
    assert refused.value.text == "output 'OUT' does not have the 2 strings of its shape"


def test_a_datatype_without_a_field_is_refused() -> None:
    with pytest.raises(ServeError) as refused:
        list(typed_parts(response(Tensor("OUT", DataType.BF16, (1,), b"\0\0"))))
    assert refused.value.code is StatusCode.UNIMPLEMENTED
    assert "BF16, which has no typed contents; send the inputs as raw_input_contents" in refused.value.text
