"""Bodies of infer and generate requests, and the bodies of their answers."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.memo import MOST_REMEMBERED
from rocserve.core.model_config import InputConfig, ModelConfig
from rocserve.core.requests import LONGEST_ID
from rocserve.core.responses import InferResponse
from rocserve.core.sequences import SequenceTag
from rocserve.core.steps import result_of
from rocserve.core.tensors import Buffer, Tensor, encode_bytes_elements
from rocserve.frontends.http.answer_bodies import BINARY_ONLY, JSON_ONLY, AnswerForm, AnswerLayouts, layout_of
from rocserve.frontends.http.generate import generate_body, read_generate
from rocserve.frontends.http.infer_bodies import LONGEST_REMEMBERED_TEXT, InferRequestReader
from rocserve.plane import heap
from rocserve.plane.heap import COPIED_AT_ONCE

INPUT = {"name": "X", "shape": [2], "datatype": "INT8"}


def read(body: dict[str, Any] | bytes, binary: bytes = b"", reader: InferRequestReader | None = None) -> Any:
    head = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (reader or InferRequestReader()).read(head + binary, len(head), "m", "")


@pytest.mark.parametrize(("letter", "nbytes"), [("x", 1), ("é", 2), ("\N{SNOWMAN}", 3), ("\U0001f600", 4)])
def test_the_bytes_of_an_id_are_bounded(letter: str, nbytes: int) -> None:
    """As over gRPC."""
    most = LONGEST_ID // nbytes
    assert len(read({"id": most * letter, "inputs": [{**INPUT, "data": [1, 2]}]})[0].id) == most
    with pytest.raises(ServeError, match=f"may have 65536 bytes, got {(most + 1) * nbytes}"):
        read({"id": (most + 1) * letter, "inputs": [{**INPUT, "data": [1, 2]}]})


def test_a_request() -> None:
    body: dict[str, Any] = {
        "id": "i",
        "parameters": {"a": 1, "b": 1.5, "c": True, "d": "x", "e": 2**63, "priority": 2, "timeout": 3},
        "inputs": [
            {**INPUT, "parameters": {"binary_data_size": 2}},
            {**INPUT, "name": "Y", "data": [3, 4]},
            {**INPUT, "name": "Z", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 2}},
            {**INPUT, "name": "W", "shape": [0], "data": []},
        ],
        "outputs": [
            {"name": "A", "parameters": {"binary_data": True, "classification": 2}},
            {"name": "B", "parameters": {"shared_memory_region": "r", "shared_memory_offset": 4}},
            {"name": "C"},
        ],
    }
    request, form = read(body, b"\1\2")
    assert request.id == "i"
    assert [bytes(data) for data in request.data] == [b"\1\2", b"\3\4", b"", b""]
    assert [(entry.name, entry.datatype, entry.shape) for entry in request.head.inputs] == [
        ("X", "INT8", (2,)),
        ("Y", "INT8", (2,)),
        ("Z", "INT8", (2,)),
        ("W", "INT8", (0,)),
    ]
    where = {"shared_memory_region": "r", "shared_memory_offset": 0, "shared_memory_byte_size": 2}
    assert request.head.inputs[2].parameters == where
    assert request.head.parameters == {**body["parameters"], "e": float(2**63)}
    assert [entry.parameters.get("classification") for entry in request.head.outputs] == [2, None, None]
    assert request.sequence is None
    assert form == AnswerForm((("A", True), ("B", False), ("C", False)), False, frozenset("B"))


def test_sequences_and_the_default_form() -> None:
    parameters = {"sequence_id": "s", "sequence_start": True, "binary_data_output": True}
    request, form = read({"inputs": [], "parameters": parameters})
    assert request.sequence == SequenceTag("s", True, False)
    assert request.head.parameters == {}
    assert form == BINARY_ONLY


def test_equal_requests_have_one_head() -> None:
    reader = InferRequestReader()
    body = {"inputs": [{**INPUT, "data": [1, 2]}]}
    first = read(body, reader=reader)[0]
    assert read({**body, "id": "other"}, reader=reader)[0].head is first.head
    assert read({**body, "parameters": {"a": 1}}, reader=reader)[0].head is not first.head
    one = read({**body, "parameters": {"a": 1}}, reader=reader)[0].head
    assert read({**body, "parameters": {"a": True}}, reader=reader)[0].head is not one
    long = {**body, "id": "i", "parameters": {"a": "x" * LONGEST_REMEMBERED_TEXT}}
    assert read(long, reader=reader)[0].head is not read(long, reader=reader)[0].head


def test_the_same_json_again() -> None:
    reader = InferRequestReader()
    two: dict[str, Any] = {
        "inputs": [
            {**INPUT, "parameters": {"binary_data_size": 2}},
            {**INPUT, "name": "Y", "parameters": {"binary_data_size": 1}},
        ],
        "parameters": {"binary_data_output": True},
    }
    first, form = read(two, b"\1\2\3", reader)
    again, same_form = read(two, b"\4\5\6", reader)
    assert same_form is form
    assert again.head is first.head
    assert [bytes(data) for data in first.data] == [b"\1\2", b"\3"]
    assert [bytes(data) for data in again.data] == [b"\4\5", b"\6"]
    for binary, text in ((b"\1\2", "expecting 1 additional bytes"), (b"\1\2\3\4", "additional input data")):
        with pytest.raises(ServeError, match=text):
            read(two, binary, reader)
    named = {**two, "id": "i", "parameters": {"sequence_id": 3}}
    for _ in range(2):
        request = read(named, b"\1\2\3", reader)[0]
        assert (request.id, request.sequence) == ("i", SequenceTag(3, False, False))


def test_the_same_json_with_other_elements() -> None:
    reader = InferRequestReader()
    two: dict[str, Any] = {
        "inputs": [
            {**INPUT, "data": [1, 2]},
            {**INPUT, "name": "Y", "parameters": {"binary_data_size": 1}},
            {**INPUT, "name": "Z", "datatype": "FP32", "data": [[0.5], [2]]},
        ]
    }
    first, form = read(two, b"y", reader)
    two["inputs"][0]["data"] = [[[3], 4]]
    two["inputs"][2]["data"] = [-1e3, 1]
    again, same_form = read(two, b"z", reader)
    assert same_form is form
    assert first.data == [b"\1\2", b"y", struct.pack("<2f", 0.5, 2)]
    assert again.data == [b"\3\4", b"z", struct.pack("<2f", -1000, 1)]
    for wrong, text in (([1, 2, 3], "Shape does not match"), ([1, 0.5], "non-signed-integer")):
        two["inputs"][0]["data"] = wrong
        with pytest.raises(ServeError, match=text):
            read(two, b"z", reader)
    with pytest.raises(ServeError, match="after an array element"):
        read(b'{"inputs":[{"name":"X","datatype":"INT8","shape":[2],"data":[1 2]}]}', reader=reader)


@pytest.mark.parametrize(
    "text",
    [
        b'{"data":[9,9],"inputs":[{"name":"X","datatype":"INT8","shape":[2],"d\\u0061ta":[%d,2]}]}',
        b'{"inputs":[{"name":"X","datatype":"INT8","shape":[2],"data":[9,9],"data":[%d,2]}]}',
        b'{"inputs":[{"name":"X","datatype":"INT8","shape":[2],"\\"data":[9,9],"d\\u0061ta":[%d,2]}]}',
        b'{"inputs":[{"name":"X","datatype":"INT8","shape":[2],"data":[%d,2]}],"more":{"data":[9,9]}}',
    ],
)
def test_other_arrays_are_not_taken_for_elements(text: bytes) -> None:
    reader = InferRequestReader()
    for number in (1, 3):
        assert read(text % number, reader=reader)[0].data == [bytes([number, 2])]


def test_no_more_than_so_many_texts_are_remembered() -> None:
    reader = InferRequestReader()
    for number in range(MOST_REMEMBERED + 2):
        body = {"inputs": [{**INPUT, "parameters": {"binary_data_size": 2}}], "parameters": {"a": number}}
        assert read(body, b"\1\2", reader)[0].head.parameters == {"a": number}
    long = {"inputs": [{**INPUT, "parameters": {"binary_data_size": 2}}], "parameters": {"a": "x" * 5000}}
    first, form = read(long, b"\1\2", reader)
    assert read(long, b"\1\2", reader)[1] is not form
    assert bytes(first.data[0]) == b"\1\2"


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (
            {"parameters": {"a": None}},
            "INVALID_ARGUMENT",
            "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"parameters": {"sequence_id": -1}},
            "INTERNAL",
            "Unable to parse 'sequence_id': attempt to access JSON non-string as string",
        ),
        (
            {"parameters": {"a": "\ud800"}},
            "INTERNAL",
            "failed to parse the request JSON buffer: Invalid encoding in string. at 0",
        ),
        (
            {"parameters": {"\ud800": "a"}},
            "INTERNAL",
            "failed to parse the request JSON buffer: Invalid encoding in string. at 0",
        ),
        (
            {"parameters": {"a": -(10**400)}},
            "INTERNAL",
            "failed to parse the request JSON buffer: Number too big to be stored in double. at 0",
        ),
    ],
)
def test_bad_requests(body: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        read(body, b"123")
    assert (caught.value.code.name, caught.value.text) == (code, text)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (
            {"name": "A", "parameters": {"shared_memory_region": "r", "classification": 1}},
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            {"name": "A", "parameters": {"shared_memory_region": "r", "binary_data": True}},
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
    ],
)
def test_bad_outputs(output: dict[str, Any], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        read({"inputs": [], "outputs": [output]})
    assert caught.value.text == text


CONFIG = ModelConfig(name="m", max_batch_size=4, inputs=(InputConfig("X", DataType.INT16, (2, -1)),), outputs=())


def raw(config: ModelConfig, body: bytes) -> Any:
    return result_of(InferRequestReader().read_raw(body, config, ""))


def test_a_body_without_json() -> None:
    request = raw(CONFIG, bytes(12))
    assert (request.head.inputs[0].name, request.head.inputs[0].shape, request.data) == ("X", (1, 2, 3), [bytes(12)])
    text = replace(CONFIG, max_batch_size=0, inputs=(InputConfig("X", DataType.BYTES, (1,)),))
    assert raw(text, b"abc").data == [b"\3\0\0\0abc"]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((), "Raw request must only have 1 input (found 1) to be deduced but got 0 inputs in 'm' model configuration"),
        (
            (InputConfig("X", DataType.INT8, (-1, -1)),),
            "The shape of the raw input 'X' can not be deduced because there are more than one variable-sized"
            " dimension",
        ),
        (
            (InputConfig("X", DataType.BYTES, (2,)),),
            "For BYTE datatype raw input 'X', the model must have input shape [1]",
        ),
    ],
)
def test_bodies_that_need_json(inputs: tuple[InputConfig, ...], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        raw(replace(CONFIG, inputs=inputs), b"")
    assert caught.value.text == f"[request id: <id_unknown>] {text}"


def form_of(*parts: tuple[str, bytes]) -> bytes:
    head = b'--b.\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    return b"".join(head % (name.encode(), content) for name, content in parts) + b"--b.--\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b'Content-Disposition: form-data; name="X"; filename="a; name=Y"',
        b'content-disposition:form-data;filename="a; name=Y" ; NAME=X',
        b'Content-Type: image/png; name="Y"\r\nContent-Disposition: form-data; name="X"',
        b'Content-Disposition: form-data; filename*=UTF-8\'\'a; name="X"\r\nContent-Type: image/png; name="Y"',
    ],
)
def test_the_name_of_a_part_is_that_of_its_disposition(head: bytes) -> None:
    body = b"--b.\r\n%b\r\n\r\n1\r\n--b.--\r\n" % head
    inputs = tuple(InputConfig(name, DataType.INT8, (1,)) for name in ("X", "Y"))
    _, request = read_form(body, replace(CONFIG, max_batch_size=0, inputs=inputs))
    assert [entry.name for entry in request.head.inputs] == ["X"]


def test_a_part_without_a_name_is_refused() -> None:
    head = b'Content-Disposition: form-data; filename="; name=X\r\nContent-Type: a; name="X"'
    body = b"--b.\r\n%b\r\n\r\n1\r\n--b.--\r\n" % head
    with pytest.raises(ServeError, match="part 1 has no name"):
        read_form(body, CONFIG)


def read_form(body: bytes, config: ModelConfig) -> tuple[int, Any]:
    """The number of steps, and the request."""
    steps = InferRequestReader().read_form(body, b"b.", config, "")
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


LARGE_PARTS = [bytes([number]) * size for number, size in enumerate((5 << 20, 10, 3 << 20, 1))]


@pytest.mark.parametrize("datatype", [DataType.BYTES, DataType.INT8])
def test_a_large_form_is_searched_and_copied_in_steps(datatype: DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = heap.copy_bytes

    def note(view: memoryview, start: int, data: Buffer) -> None:
        copied.append(len(data))
        copy(view, start, data)

    monkeypatch.setattr(heap, "copy_bytes", note)
    parts = LARGE_PARTS if datatype is DataType.BYTES else [part for part in LARGE_PARTS if len(part) > 10]
    config = replace(CONFIG, max_batch_size=0, inputs=(InputConfig("X", datatype, (-1,)),))
    steps, request = read_form(form_of(*[("X", part) for part in parts]), config)
    joined = encode_bytes_elements(parts) if datatype is DataType.BYTES else b"".join(parts)
    assert request.data[0] == joined
    assert request.head.inputs[0].shape == ((4,) if datatype is DataType.BYTES else (8 << 20,))
    assert max(copied) <= COPIED_AT_ONCE
    assert steps >= 2 * (5 + 3) - 2, "each MiB is searched, and copied"


@pytest.mark.parametrize("cut", range(-2, 10))
def test_a_delimiter_is_found_wherever_the_search_pauses(cut: int) -> None:
    head = len(form_of(("X", b""))) - len(b"\r\n--b.--\r\n")
    config = replace(CONFIG, max_batch_size=0, inputs=(InputConfig("X", DataType.INT8, (-1,)),))
    content = bytes((1 << 20) - cut)
    for before in (b"", b"preamble"):
        body = before + (b"\r\n" if before else b"") + form_of(("X", content), ("X", content[:-head]))
        assert bytes(read_form(body, config)[1].data[0]) == content + content[:-head]


def test_a_text_without_json_is_copied_in_steps() -> None:
    text = replace(CONFIG, max_batch_size=0, inputs=(InputConfig("X", DataType.BYTES, (1,)),))
    steps = InferRequestReader().read_raw(LARGE_PARTS[0], text, "")
    assert sum(1 for _ in steps) == 5
    assert raw(text, LARGE_PARTS[0]).data[0] == encode_bytes_elements(LARGE_PARTS[:1])


RESPONSE = InferResponse.of(
    "m",
    "1",
    "i",
    [Tensor("A", DataType.INT8, (1, 2), b"\1\2"), Tensor("B", DataType.BYTES, (1,), b"\1\0\0\0b")],
    {"p": True},
)


FORMS = [AnswerForm((("B", True),)), AnswerForm((("B", True),), shared=frozenset("A"))]


def body_of(response: InferResponse, form: AnswerForm) -> list[Any]:
    return written(AnswerLayouts(), response, form)


def written(layouts: AnswerLayouts, response: InferResponse, form: AnswerForm) -> list[Any]:
    body = result_of(layout_of(response, form, layouts).body(response))
    return [b"".join(body.json), *body.tensors]


def test_an_answer() -> None:
    body, *tensors = body_of(RESPONSE, AnswerForm((("B", True),)))
    assert json.loads(body) == {
        "id": "i",
        "model_name": "m",
        "model_version": "1",
        "parameters": {"p": True},
        "outputs": [
            {"name": "A", "datatype": "INT8", "shape": [1, 2], "data": [1, 2]},
            {"name": "B", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
        ],
    }
    assert tensors == [b"\1\0\0\0b"]
    shared = body_of(replace(RESPONSE, id="", parameters={}), AnswerForm(shared=frozenset("A")))
    assert shared == [
        b'{"model_name":"m","model_version":"1","outputs":[{"name":"A","datatype":"INT8","shape":[1,2]},'
        b'{"name":"B","datatype":"BYTES","shape":[1],"data":["b"]}]}'
    ]


@pytest.mark.parametrize("form", [BINARY_ONLY, JSON_ONLY, *FORMS])
@pytest.mark.parametrize("parameters", [{}, {"p": True}])
def test_remembered_json_is_that_of_a_first_answer(form: AnswerForm, parameters: dict[str, bool]) -> None:
    layouts = AnswerLayouts()
    for request_id in ("", 'i"', "j", ""):
        for data in (b"\1\2", b"\3\4"):
            response = replace(RESPONSE, id=request_id, parameters=parameters, data=[data, RESPONSE.data[1]])
            assert written(layouts, response, form) == body_of(response, form)
    other = InferResponse.of("m", "1", "i", [Tensor("A", DataType.INT8, (2, 1), b"\1\2")])
    assert written(layouts, other, form) == body_of(other, form)


def generate(body: Any, config: ModelConfig = CONFIG) -> Any:
    return read_generate(config.max_batch_size, config.inputs, config.name, "", json.dumps(body).encode())


def test_generate_requests() -> None:
    request = generate({"X": [1, 2, 3, 4], "id": "i", "parameters": {"a": 1}, "sequence_id": 3})
    assert request.id == "i"
    assert request.head.inputs[0].shape == (1, 2, 2)
    assert request.data == [struct.pack("<4h", 1, 2, 3, 4)]
    assert request.head.parameters == {"id": "i", "a": 1, "sequence_id": 3}
    assert request.sequence is None
    one = replace(CONFIG, max_batch_size=0, inputs=(InputConfig("X", DataType.BYTES, (-1,)),))
    assert generate({"parameters": {"X": "hello"}}, one).head.inputs[0].shape == (1,)
    assert generate({"X": []}, one).head.inputs[0].shape == (0,)


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ([], StatusCode.INTERNAL, "attempt to get members for non-object"),
        (
            {"X": [1, 2, 3]},
            StatusCode.INVALID_ARGUMENT,
            "The schema can not convert input 'X' to tensor with proper shape",
        ),
        (
            {"parameters": 5},
            StatusCode.INTERNAL,
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        (
            {"x": [1, 2]},
            StatusCode.INVALID_ARGUMENT,
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'; the model's inputs are: X",
        ),
        (
            {"parameters": {"a": {}}},
            StatusCode.INVALID_ARGUMENT,
            "Converting keyword: 'parameters': parameter 'a' has invalid type. It should be either 'int', 'bool', or"
            " 'string'.",
        ),
        (
            {"parameters": {"a": 10**400}},
            StatusCode.INTERNAL,
            "Converting keyword: 'parameters': failed to parse the request JSON buffer: Number too big to be stored in"
            " double. at 0",
        ),
        (
            {"\udcff": 1},
            StatusCode.INTERNAL,
            "failed to parse the request JSON buffer: Invalid encoding in string. at 0",
        ),
    ],
)
def test_bad_generate_requests(body: Any, code: StatusCode, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        generate(body)
    assert (caught.value.code, caught.value.text) == (code, text)


def test_generate_answers() -> None:
    assert generated(replace(RESPONSE, parameters={"p": True, "id": "other"})) == (
        b'{"A":[1,2],"B":"b","id":"i","model_name":"m","model_version":"1","p":true}'
    )
    empty = Tensor("A", DataType.INT8, (0,), b"")
    taken = Tensor("id", DataType.INT8, (1,), b"\1")
    assert generated(InferResponse.of("m", "1", "i", [empty, taken])) == (
        b'{"A":[],"id":"i","model_name":"m","model_version":"1"}'
    )


def generated(response: InferResponse) -> bytes:
    return b"".join(result_of(generate_body(response)))
