"""TensorFlow Serving's form of prediction: bodies as tensors, and outputs as bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig
from rocserve.core.responses import InferResponse, ResponseHead
from rocserve.core.steps import result_of
from rocserve.core.tensors import TensorHead, bfloat16_values, encode_bytes_elements
from rocserve.frontends.http.rest_v1.answers import columns_answer, output_arrays, rows_answer
from rocserve.frontends.http.rest_v1.bodies import MOST_REQUESTS, PredictBody, read_predict
from rocserve.frontends.http.routes import PREDICT, VERSION_V1, find_destination, is_openai, is_rest_v1

X = InputConfig("X", DataType.FP32, (2,))
TEXT = InputConfig("TEXT", DataType.BYTES, (1,))
COUNT = InputConfig("COUNT", DataType.UINT8, (1,))
EXTRA = InputConfig("EXTRA", DataType.INT64, (1,), optional=True)


def read(body: Any, *inputs: InputConfig, batch: int = 8) -> PredictBody:
    return read_predict(inputs, batch, body if isinstance(body, bytes) else json.dumps(body).encode())


def shapes(body: PredictBody) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[(column.name, column.shape) for column in columns] for columns in body.requests]


def test_rows_of_the_only_input() -> None:
    body = read({"signature_name": "serving_default", "instances": [[1, 2.5], [3, 4], [5, 6]]}, X)
    ((column,),) = body.requests
    assert (body.instances, body.are_single) == (3, False)
    assert (column.name, column.datatype, column.shape) == ("X", DataType.FP32, (3, 2))
    assert np.frombuffer(column.data, "<f4").tolist() == [1, 2.5, 3, 4, 5, 6]


def test_more_rows_than_the_model_takes_become_several_requests() -> None:
    body = read({"instances": [[row, row] for row in range(5)]}, X, batch=2)
    assert shapes(body) == [[("X", (2, 2))], [("X", (2, 2))], [("X", (1, 2))]]
    assert np.frombuffer(body.requests[2][0].data, "<f4").tolist() == [4, 4]
    assert shapes(read({"inputs": [[1, 2], [3, 4], [5, 6]]}, X, batch=2)) == [[("X", (2, 2))], [("X", (1, 2))]]
    many = {"instances": [[1, 2]] * (MOST_REQUESTS + 1)}
    with pytest.raises(ServeError, match=f"expected at most {MOST_REQUESTS} rows, as the model takes 1 at once"):
        read(many, X, batch=1)


def test_objects_name_the_inputs() -> None:
    rows = [{"TEXT": "a", "COUNT": [1]}, {"COUNT": 2, "TEXT": {"b64": "/wA="}}]
    with pytest.raises(ServeError, match="input 'COUNT': expected lists of equal length at each depth"):
        read({"instances": rows}, TEXT, COUNT)
    rows[0]["COUNT"] = 1
    body = read({"instances": rows}, TEXT, COUNT, EXTRA)
    # A text, or a number, fills the dimension of 1.
    assert shapes(body) == [[("TEXT", (2, 1)), ("COUNT", (2, 1))]]
    text, count = body.requests[0]
    assert text.data == encode_bytes_elements([b"a", b"\xff\x00"])
    assert count.data == b"\x01\x02"
    columns = read({"inputs": {"TEXT": ["a", {"b64": "/wA="}], "COUNT": [[1], [2]]}}, TEXT, COUNT)
    assert shapes(columns) == shapes(body)
    assert columns.instances is None


def test_bytes_in_base64_are_a_value_unless_an_input_has_that_name() -> None:
    ((column,),) = read({"instances": [{"b64": "YQ=="}]}, TEXT).requests
    assert column.data == encode_bytes_elements([b"a"])
    ((column,),) = read({"instances": [{"b64": "YQ=="}]}, InputConfig("b64", DataType.BYTES, (1,))).requests
    assert column.data == encode_bytes_elements([b"YQ=="])
    ((column,),) = read({"inputs": {"b64": "YQ=="}}, TEXT, batch=0).requests
    assert (column.shape, column.data) == ((1,), encode_bytes_elements([b"a"]))


def test_models_that_do_not_batch() -> None:
    # The model's first dimension is the number of rows,
    rows = {"instances": [[1, 2], [3, 4]]}
    assert shapes(read(rows, InputConfig("X", DataType.FP32, (-1, 2)), batch=0)) == [[("X", (2, 2))]]
    # one row at a time,
    one = read(rows, InputConfig("X", DataType.FP32, (1, 2)), batch=0)
    assert (shapes(one), one.are_single) == ([[("X", (1, 2))], [("X", (1, 2))]], False)
    # or the model takes single instances.
    single = read(rows, X, batch=0)
    assert (shapes(single), single.are_single) == ([[("X", (2,))], [("X", (2,))]], True)
    assert shapes(read({"instances": ["a", "b"]}, TEXT, batch=0)) == [[("TEXT", (1,))], [("TEXT", (1,))]]


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        (DataType.BOOL, [True, False], [True, False]),
        (DataType.INT8, [-128, 127], [-128, 127]),
        (DataType.UINT64, [0, (1 << 64) - 1], [0, (1 << 64) - 1]),
        (DataType.FP16, [0.1, 2], [np.float16(0.1), 2]),
        (DataType.FP64, [0.1, 1e300], [0.1, 1e300]),
    ],
)
def test_datatypes(datatype: DataType, values: list[Any], expected: list[Any]) -> None:
    ((column,),) = read({"inputs": values}, InputConfig("X", datatype, (2,)), batch=0).requests
    assert np.frombuffer(column.data, datatype.numpy_dtype).tolist() == expected


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    # The last two lie in the middle between neighbours, and go to the even one.
    values = [1.0, -0.1, 1 + 2**-7, 1 + 2**-8, 1 + 3 * 2**-8]
    ((column,),) = read({"inputs": values}, InputConfig("X", DataType.BF16, (5,)), batch=0).requests
    found = bfloat16_values(np.frombuffer(column.data, np.uint16)).tolist()
    assert found == [1.0, -0.10009765625, 1 + 2**-7, 1.0, 1 + 2 * 2**-7]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "failed to parse the request JSON buffer: Missing a name"),
        ([], "the body: expected a JSON object, got an empty list"),
        ({}, "the body: expected either 'instances' or 'inputs', got neither"),
        ({"instances": [1], "inputs": [1]}, "the body: expected either 'instances' or 'inputs', got both"),
        ({"instance": [[1, 2]]}, "unknown member 'instance'; the members are: inputs, instances, signature_name; did"),
        (
            {"instances": [[1, 2]], "signature_name": "other"},
            "expected 'serving_default', the model's only one, got 'o",
        ),
        ({"instances": [[1, 2]], "signature_name": 3}, "the model's only one, got a number"),
        ({"instances": []}, "instances: expected a list of at least one instance, got an empty list"),
        ({"instances": {"X": 1}}, "instances: expected a list of at least one instance, got an object"),
        ({"instances": [{"Y": 1}]}, "unexpected input 'Y'; the model's inputs are: X"),
        ({"instances": [{}]}, "expected values of 'X' too, got those of no members"),
        (
            {"instances": [{"X": [1, 2]}, [3, 4]]},
            "instances[1]: expected an object with 'X', as instances[0] is, got a",
        ),
        (
            {"instances": [{"X": [1, 2]}, {"Y": 3}]},
            "instances[1]: expected an object with 'X', as instances[0] is, got",
        ),
        (
            {"instances": [[1, 2], [3]]},
            "input 'X': expected lists of equal length at each depth, got different ones at",
        ),
        ({"instances": [[1, 2], 3]}, "input 'X': expected lists of equal length at each depth"),
        ({"instances": [[1, "2"]]}, "input 'X': expected numbers (FP32), got a text"),
        ({"instances": [[1, True]]}, "input 'X': expected numbers (FP32), got a boolean"),
        ({"instances": [[1, None]]}, "input 'X': expected numbers (FP32), got null"),
        ({"inputs": {"X": [[1, {}]]}}, "input 'X': expected numbers (FP32), got an object"),
        (b'{"inputs": ' + b"[" * 200 + b"1" + b"]" * 200 + b"}", "JSON nesting depth exceeds maximum allowed limit"),
    ],
)
def test_faulty_bodies(body: Any, text: str) -> None:
    with pytest.raises(ServeError) as refused:
        read(body, X)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
    assert text in refused.value.text


@pytest.mark.parametrize(
    ("inputs", "value", "text"),
    [
        (
            (TEXT, COUNT),
            ["a"],
            "instances: expected an object with the values of 'TEXT', 'COUNT', as the model has sev",
        ),
        ((COUNT,), [256], "input 'COUNT': a number is too large for UINT8"),
        ((COUNT,), [1.5], "input 'COUNT': expected whole numbers (UINT8), got a number"),
        ((TEXT,), [1], 'input \'TEXT\': expected texts, or {"b64": "..."} (BYTES), got a number'),
        ((TEXT,), [{"b64": "?"}], "input 'TEXT' has an element that is not base64"),
        ((TEXT,), [{"b64": 1}], "input 'TEXT': expected base64 as a text, or as {\"b64\": text}"),
        ((TEXT,), ["\ud800"], "input 'TEXT': expected texts, got one with a lone surrogate"),
    ],
)
def test_faulty_values(inputs: Sequence[InputConfig], value: Any, text: str) -> None:
    with pytest.raises(ServeError) as refused:
        read({"instances": value}, *inputs)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
    assert text in refused.value.text


def response(**outputs: tuple[DataType, Any]) -> InferResponse:
    heads, data = [], []
    for name, (datatype, values) in outputs.items():
        array = np.array(values, np.object_ if datatype is DataType.BYTES else datatype.numpy_dtype)
        heads.append(TensorHead(name, datatype, array.shape))
        data.append(encode_bytes_elements(array.ravel()) if datatype is DataType.BYTES else array.tobytes())
    return InferResponse(ResponseHead("m", "1", tuple(heads)), "", data)


def rows(count: int, *answers: InferResponse, single: bool = False) -> Any:
    return json.loads(b"".join(result_of(rows_answer(result_of(output_arrays(answers, single)), count))))


def columns(*answers: InferResponse) -> Any:
    return json.loads(b"".join(result_of(columns_answer(result_of(output_arrays(answers, False))))))


def test_answers_with_one_output() -> None:
    first, second = (response(Y=(DataType.INT32, values)) for values in ([[1, 2], [3, 4]], [[5, 6]]))
    assert rows(3, first, second) == {"predictions": [[1, 2], [3, 4], [5, 6]]}
    assert columns(first, second) == {"outputs": [[1, 2], [3, 4], [5, 6]]}
    # Single instances have no dimension for rows.
    assert rows(2, *(response(Y=(DataType.FP32, [place])) for place in (1, 2)), single=True) == {
        "predictions": [[1.0], [2.0]]
    }


def test_answers_with_several_outputs() -> None:
    answer = response(label=(DataType.BYTES, [b"cat", b"dog"]), scores=(DataType.FP64, [[0.25, 0.5], [1, 0]]))
    assert rows(2, answer) == {
        "predictions": [{"label": "cat", "scores": [0.25, 0.5]}, {"label": "dog", "scores": [1.0, 0.0]}]
    }
    assert columns(answer) == {"outputs": {"label": ["cat", "dog"], "scores": [[0.25, 0.5], [1.0, 0.0]]}}


def test_a_dimension_that_only_the_configuration_has_is_left_out() -> None:
    answer = response(label=(DataType.BYTES, [[b"cat"], [b"dog"]]))
    assert result_of(output_arrays([answer], False, ["label"]))["label"].tolist() == [b"cat", b"dog"]


def test_bytes_that_are_not_text_are_in_base64() -> None:
    assert rows(2, response(Y=(DataType.BYTES, [b"a", b"\xff"]))) == {"predictions": ["a", {"b64": "/w=="}]}
    # TensorFlow Serving's clients name outputs so.
    assert rows(1, response(image_bytes=(DataType.BYTES, [b"a"]))) == {"predictions": [{"b64": "YQ=="}]}


@pytest.mark.parametrize("shape", [(20_000,), (3, 5_000), (5_000, 3), (2, 3, 4_097), (1, 1, 1), (0, 3)])
def test_large_answers_keep_their_shape(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    assert columns(response(Y=(DataType.INT64, values))) == {"outputs": values.tolist()}


def test_outputs_without_a_row_for_each_instance() -> None:
    with pytest.raises(ServeError, match="output 'Y' has shape \\[1\\] for 2 instances; send `inputs`"):
        rows(2, response(Y=(DataType.INT32, [1])))
    with pytest.raises(ServeError, match=r"different shapes for the rows of one call: \[1, 2\], \[1, 3\]"):
        rows(2, response(Y=(DataType.INT32, [[1, 2]])), response(Y=(DataType.INT32, [[1, 2, 3]])))


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        (b"/v1/models/m:predict", {"name": "m", "version": ""}),
        (b"/v1/models/a:b/versions/3:predict", {"name": "a:b", "version": "3"}),
        (b"/v1/models/a%20b:predict", {"name": "a b", "version": ""}),
    ],
)
def test_urls(target: bytes, fields: dict[str, str]) -> None:
    assert find_destination(target) == (PREDICT, fields)
    assert is_rest_v1(target)
    assert not is_openai(target)


def test_which_urls_have_whose_errors() -> None:
    assert find_destination(b"/v1/models/m/versions/1") == (VERSION_V1, {"name": "m", "version": "1"})
    assert find_destination(b"/v1/models/m:explain") is None
    for target in (b"/v1/models/m/versions/1", b"/v1/models/m:explain", b"/v1/models/m/metadata"):
        assert is_rest_v1(target)
    for target in (b"/v1/models", b"/v1/models/m", b"/v1/models/family:small", b"/v1/embeddings"):
        assert is_openai(target)
