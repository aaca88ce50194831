"""The sequence parameters of requests, which are read separately from their heads."""

from __future__ import annotations

import numpy as np
import pytest
from support.typed_requests import decoded

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.memo import MOST_REMEMBERED
from rocserve.core.sequences import SequenceTag, take_sequence
from rocserve.frontends.grpc.codec import RequestDecoder
from rocserve.protocol.grpc_service_pb2 import InferParameter, ModelInferRequest

Tensor = ModelInferRequest.InferInputTensor
VALUE = np.arange(4, dtype="<i4").tobytes()


def _request(parameters: dict[str, InferParameter], name: str = "INPUT", **fields: object) -> bytes:
    message = ModelInferRequest(
        model_name="m",
        id="17",
        inputs=[Tensor(name=name, datatype="INT32", shape=[1, 4])],
        raw_input_contents=[VALUE],
        parameters=parameters,
        **fields,
    )
    return message.SerializeToString()


def _sequence(identity: InferParameter, start: bool = False, end: bool = False) -> dict[str, InferParameter]:
    return {
        "sequence_id": identity,
        "sequence_start": InferParameter(bool_param=start),
        "sequence_end": InferParameter(bool_param=end),
    }


def test_requests_of_all_sequences_share_one_head() -> None:
    decoder = RequestDecoder()
    requests = [
        decoded(decoder, _request(_sequence(InferParameter(int64_param=number), number == 1, number == 3)))
        for number in (1, 2, 3)
    ]
    requests.append(decoded(decoder, _request(_sequence(InferParameter(string_param="s")))))
    assert [request.sequence for request in requests] == [
        SequenceTag(1, starts=True),
        SequenceTag(2),
        SequenceTag(3, ends=True),
        SequenceTag("s"),
    ]
    assert len({id(request.head) for request in requests}) == 1
    assert {request.id for request in requests} == {"17"}
    assert [bytes(request.data[0]) for request in requests] == [VALUE] * 4
    assert requests[0].head.parameters == {}


def test_what_is_remembered_of_sequences_is_bounded() -> None:
    decoder = RequestDecoder()
    for _ in range(2):
        for number in range(1, MOST_REMEMBERED + 50):
            request = decoded(decoder, _request(_sequence(InferParameter(int64_param=number))))
            assert request.sequence == SequenceTag(number)
    assert len(decoder._sequence_heads) <= MOST_REMEMBERED
    assert len(decoder._heads) == 1


def test_a_request_without_a_sequence_says_so() -> None:
    codec = RequestDecoder()
    assert decoded(codec, _request({})).sequence is None
    # A similar name is not one of the three.
    alike = decoded(codec, _request({"sequence_idle": InferParameter(int64_param=1)}, "sequence_length"))
    assert alike.sequence is None
    assert alike.head.parameters == {"sequence_idle": 1}


def test_other_parameters_stay_with_the_head() -> None:
    parameters = {**_sequence(InferParameter(int64_param=5)), "priority": InferParameter(int64_param=2)}
    request = decoded(RequestDecoder(), _request(parameters))
    assert request.sequence == SequenceTag(5)
    assert request.head.parameters == {"priority": 2}


def test_a_number_below_zero_is_the_unsigned_one() -> None:
    request = decoded(RequestDecoder(), _request(_sequence(InferParameter(int64_param=-1))))
    assert request.sequence == SequenceTag(2**64 - 1)


def test_a_number_may_be_unsigned() -> None:
    for number in (3, 2**63, 2**64 - 1):
        request = decoded(RequestDecoder(), _request(_sequence(InferParameter(uint64_param=number))))
        assert request.sequence == SequenceTag(number)


def test_an_unusual_order_of_fields_makes_no_difference() -> None:
    data = _request({})
    # A map's entry may have its value before its key.
    key, value = b"\x0a\x0bsequence_id", b"\x12" + bytes([2]) + b"\x10\x07"
    entry = value + key
    strange = b"\x22" + bytes([len(entry)]) + entry
    for message in (strange + data, data + strange):
        request = decoded(RequestDecoder(), message)
        assert request.sequence == SequenceTag(7)
        assert request.head.parameters == {}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sequence_id", InferParameter(bool_param=True), "int64_param or string_param"),
        ("sequence_id", InferParameter(double_param=3.0), "int64_param or string_param"),
        ("sequence_id", InferParameter(), "int64_param or string_param"),
        ("sequence_start", InferParameter(int64_param=1), "bool_param"),
        ("sequence_end", InferParameter(string_param="true"), "bool_param"),
    ],
)
def test_a_wrong_type_is_refused_in_tritons_words(name: str, value: InferParameter, expected: str) -> None:
    with pytest.raises(ServeError) as caught:
        decoded(RequestDecoder(), _request({name: value}))
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert caught.value.text == f"invalid value type for '{name}' parameter, expected {expected}."


def test_plain_parameters_are_read_alike() -> None:
    assert take_sequence({"a": 1}) == (None, {"a": 1})
    tag, others = take_sequence({"sequence_id": "s", "sequence_end": True, "a": 1})
    assert (tag, others) == (SequenceTag("s", ends=True), {"a": 1})
    with pytest.raises(ServeError, match="invalid value type for 'sequence_start' parameter"):
        take_sequence({"sequence_start": 1})
