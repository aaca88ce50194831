"""Decoding requests: the meaning of each kind of message, and the texts of refusals."""

from __future__ import annotations

import numpy as np
import pytest
from support.typed_requests import decoded
from tritonclient.grpc import service_pb2 as tritons

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.memo import MOST_REMEMBERED
from rocserve.core.requests import MOST_ENTRIES, InferRequest, InputHead, RequestedOutput
from rocserve.frontends.grpc.codec import LONGEST_REMEMBERED_HEAD, RequestDecoder
from rocserve.protocol.grpc_service_pb2 import InferParameter, InferTensorContents, ModelInferRequest

Tensor = ModelInferRequest.InferInputTensor
FIRST = np.arange(16, dtype="<i4")
SECOND = FIRST * 3


def _add_sub(**fields: object) -> ModelInferRequest:
    inputs = [Tensor(name=name, datatype="INT32", shape=[1, 16]) for name in ("INPUT0", "INPUT1")]
    return ModelInferRequest(**{
        "model_name": "m",
        "id": "17",
        "inputs": inputs,
        "raw_input_contents": [FIRST.tobytes(), SECOND.tobytes()],
        **fields,
    })  # fmt: skip


def _typed(datatype: str, count: int, **contents: object) -> ModelInferRequest:
    tensor = Tensor(name="X", datatype=datatype, shape=[count], contents=InferTensorContents(**contents))
    return ModelInferRequest(model_name="m", inputs=[tensor])


def _decode(message: ModelInferRequest) -> InferRequest:
    return decoded(RequestDecoder(), message.SerializeToString())


def _refusal(data: bytes) -> str:
    with pytest.raises(ServeError) as caught:
        decoded(RequestDecoder(), data)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    return caught.value.text


def test_raw_contents_are_views_on_the_message() -> None:
    data = _add_sub(
        model_version="3",
        parameters={"priority": InferParameter(int64_param=2)},
        outputs=[ModelInferRequest.InferRequestedOutputTensor(name="OUTPUT0")],
    ).SerializeToString()
    request = decoded(RequestDecoder(), data)
    assert (request.head.model_name, request.head.model_version, request.id) == ("m", "3", "17")
    assert request.head.inputs == (InputHead("INPUT0", "INT32", (1, 16)), InputHead("INPUT1", "INT32", (1, 16)))
    assert request.head.outputs == (RequestedOutput("OUTPUT0"),)
    assert request.head.parameters == {"priority": 2}
    assert request.deadline is None
    for view, expected in zip(request.data, (FIRST, SECOND), strict=True):
        assert isinstance(view, memoryview)
        assert view.obj is data
        np.testing.assert_array_equal(np.frombuffer(view, "<i4"), expected)


def test_equal_heads_are_one_object_whatever_id_and_data() -> None:
    codec = RequestDecoder()
    first = decoded(codec, _add_sub(id="a").SerializeToString())
    second = decoded(codec, _add_sub(id="", raw_input_contents=[b"", b"x" * 300]).SerializeToString())
    other = decoded(codec, _add_sub(model_version="1").SerializeToString())
    assert first.head is second.head
    assert other.head is not first.head
    assert (first.id, second.id) == ("a", "")
    assert [bytes(view) for view in second.data] == [b"", b"x" * 300]


def test_remembered_heads_are_bounded() -> None:
    decoder = RequestDecoder()
    for number in range(2 * MOST_REMEMBERED + 10):
        decoded(decoder, _add_sub(model_name=f"m{number}").SerializeToString())
        assert len(decoder._heads) <= MOST_REMEMBERED
    decoder = RequestDecoder()
    decoded(decoder, _add_sub(model_name="m" * (LONGEST_REMEMBERED_HEAD + 1)).SerializeToString())
    decoded(decoder, _typed("BOOL", 1, bool_contents=[True]).SerializeToString())
    assert not decoder._heads


def test_messages_of_one_length_get_their_own_values() -> None:
    codec = RequestDecoder()
    known = [_add_sub(id=text, model_name=name).SerializeToString() for text in ("17", "18") for name in ("m", "n")]
    for data in (*known, *known):
        request, message = decoded(codec, data), ModelInferRequest.FromString(data)
        assert (request.head.model_name, request.id) == (message.model_name, message.id)
        assert [bytes(view) for view in request.data] == [FIRST.tobytes(), SECOND.tobytes()]
    with pytest.raises(ServeError, match="id"):
        decoded(codec, known[-1].replace(b"18", b"\xff8"))
    # One tensor is a byte shorter, the other longer.
    moved = _add_sub(model_name="n", raw_input_contents=[bytes(63), bytes(65)]).SerializeToString()
    assert len(moved) == len(known[0])
    assert [len(view) for view in decoded(codec, moved).data] == [63, 65]


def test_parameters_of_every_kind() -> None:
    kinds = {
        "flag": InferParameter(bool_param=False),
        "low": InferParameter(int64_param=-(1 << 63)),
        "high": InferParameter(uint64_param=(1 << 64) - 1),
        "text": InferParameter(string_param="ü"),
        "ratio": InferParameter(double_param=0.25),
    }
    message = _add_sub(parameters=kinds)
    message.inputs[1].parameters["here"].string_param = "there"
    message.outputs.add(name="O").parameters["classification"].int64_param = 5
    head = _decode(message).head
    expected = {"flag": False, "low": -(1 << 63), "high": (1 << 64) - 1, "text": "ü", "ratio": 0.25}
    assert head.parameters == expected
    assert {name: type(value) for name, value in head.parameters.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert head.inputs[1].parameters == {"here": "there"}
    assert head.outputs[0].parameters == {"classification": 5}


def test_tensors_without_elements() -> None:
    tensor = Tensor(name="X", datatype="FP32", shape=[0, 4])
    raw = _decode(ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[b""]))
    assert (raw.head.inputs[0].shape, bytes(raw.data[0])) == ((0, 4), b"")
    tensor.contents.SetInParent()
    assert bytes(_decode(ModelInferRequest(model_name="m", inputs=[tensor])).data[0]) == b""


def test_an_input_in_shared_memory_takes_no_raw_entry() -> None:
    message = _add_sub(raw_input_contents=[b"for INPUT1"])
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 64
    data = message.SerializeToString()
    codec = RequestDecoder()
    for _ in range(2):
        request = decoded(codec, data)
        assert request.head.inputs[0].parameters == {"shared_memory_region": "r", "shared_memory_byte_size": 64}
        assert [bytes(view) for view in request.data] == [b"", b"for INPUT1"]


def test_missing_data_is_noticed_with_a_remembered_head_too() -> None:
    codec = RequestDecoder()
    decoded(codec, _add_sub().SerializeToString())
    with pytest.raises(ServeError, match="unable to find data for input tensor 'INPUT0'"):
        decoded(codec, _add_sub(raw_input_contents=[]).SerializeToString())


PREFIX = "the request is not a valid inference.ModelInferRequest: "


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\x0a\x05abc", "field 1 at byte 0 runs 2 bytes past the end of the message (5 bytes)"),
        (b"\x0a\x01m\x3a\x80\x80\x01abc", "field 7 at byte 3 runs 16381 bytes past the end of the message (10 bytes)"),
        (b"\x0a\x01m\x3a", "the message ends within the field that begins at byte 3"),
        (b"\x0a\x01m\x3a\x80", "the message ends within the field that begins at byte 3"),
        (b"\x0a\x01\xff", "field 'model_name' at byte 0 has a value that is not valid"),
        (b"\x0a\x01m\x1a\x02\xc3\x28", "field 'id' at byte 3 has a value that is not valid"),
        (b"\x0a\x01m\x2a\x02\x0a\x05", "field 'inputs' at byte 3 has a value that is not valid"),
        (b"\x0a\x01m\x1a\x02id\x2a\x02\x0a\x05", "field 'inputs' at byte 7 has a value that is not valid"),
        (b"\x02\x00", "byte 0 begins no field (number 0, wire type 2)"),
        (b"\x0a\x01m\x0c", "byte 3 begins no field (number 1, wire type 4)"),
        (b"\x0a\x01m\x0f", "byte 3 begins no field (number 1, wire type 7)"),
        (b"\x0b\x0a\x01m", "a group begins at byte 0"),
        (b"not protobuf at all", "byte 0 begins no field (number 13, wire type 6)"),
    ],
)
def test_malformed_messages_say_where(data: bytes, fault: str) -> None:
    assert _refusal(data).startswith(PREFIX + fault)


def test_the_last_of_several_ids_counts() -> None:
    codec = RequestDecoder()
    data = _add_sub(id="1").SerializeToString()
    for extra, expected in ((b"\x1a\x012", "2"), (b"\x1a\x00", "")):
        assert decoded(codec, extra + data).id == "1"
        assert decoded(codec, data + extra).id == expected
        assert decoded(codec, b"\x1a\x019" + extra).id == expected
    assert "'id'" in _refusal(b"\x1a\x01\xff\x1a\x01a")


def test_any_order_of_fields() -> None:
    raw_first = b"".join(
        part.SerializeToString()
        for part in (
            ModelInferRequest(raw_input_contents=[b"one"]),
            ModelInferRequest(id="early"),
            ModelInferRequest(inputs=[Tensor(name="A", datatype="BYTES", shape=[1])]),
            ModelInferRequest(raw_input_contents=[b"two"]),
            ModelInferRequest(model_name="first"),
            ModelInferRequest(inputs=[Tensor(name="B", datatype="BYTES", shape=[1])], id="late"),
            ModelInferRequest(model_name="last"),
        )
    )
    request = decoded(RequestDecoder(), raw_first)
    assert (request.head.model_name, request.id) == ("last", "late")
    assert [entry.name for entry in request.head.inputs] == ["A", "B"]
    assert [bytes(view) for view in request.data] == [b"one", b"two"]


def test_unknown_fields_are_skipped() -> None:
    known = _add_sub().SerializeToString()
    unknown = [
        b"\xf8\x07\x05",  # 127, varint
        b"\x7d\0\0\0\0",  # 15, fixed32
        b"\x79\0\0\0\0\0\0\0\0",  # 15, fixed64
        b"\x7a\x03abc",  # 15, length-delimited
        b"\x7b\x08\x01\x7c",  # 15, a group
        b"\xba\x80\x00\x05three",  # 7 (raw_input_contents) with a tag longer than need be
    ]
    for field in unknown:
        for data in (known + field, field + known):
            request = decoded(RequestDecoder(), data)
            assert (request.head.model_name, request.id, len(request.head.inputs)) == ("m", "17", 2)
            expected = tritons.ModelInferRequest.FromString(data).raw_input_contents[:2]
            assert [bytes(view) for view in request.data] == list(expected)


def test_a_value_that_looks_like_an_id() -> None:
    field_16 = b"\x82\x01\x03\x1a\x01x"
    assert decoded(RequestDecoder(), field_16 + _add_sub(id="").SerializeToString()).id == ""


@pytest.mark.parametrize(
    "more",
    [
        {"inputs": [Tensor()] * (MOST_ENTRIES + 1)},
        {"inputs": [Tensor(shape=[1] * (MOST_ENTRIES + 1))]},
        {"inputs": [Tensor(parameters={f"{n}": InferParameter(int64_param=n) for n in range(MOST_ENTRIES)})]},
        {"outputs": [ModelInferRequest.InferRequestedOutputTensor()] * MOST_ENTRIES},
        {"parameters": {f"{n}": InferParameter(int64_param=n) for n in range(MOST_ENTRIES)}},
        {"raw_input_contents": [b""] * (2 * MOST_ENTRIES)},
    ],
)
def test_more_entries_than_others_can_wait_for(more: dict[str, object]) -> None:
    with pytest.raises(
        ServeError, match="a request may have 16384 inputs, outputs, dimensions and parameters together"
    ):
        _decode(_add_sub(**more))


def test_an_id_longer_than_there_may_be() -> None:
    with pytest.raises(ServeError, match="a request's id may have 65536 bytes, got 65537"):
        _decode(_add_sub(id="a" * 65537))
