from __future__ import annotations

import json

import pytest
from google.protobuf import json_format

from rocserve.config.pbtxt import parse_model_config
from rocserve.config.sources import parse_override
from rocserve.core.errors import ServeError, StatusCode


def test_both_spellings_of_names_and_numbers() -> None:
    message = parse_override(
        json.dumps(
            {
                "backend": "onnxruntime",
                "maxBatchSize": 4,
                "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1", 3]}],
                "version_policy": {"specific": {"versions": ["2"]}},
                "parameters": {"k": {"string_value": "v"}},
            }
        )
    )
    assert message.max_batch_size == 4
    assert list(message.input[0].dims) == [-1, 3]
    assert list(message.version_policy.specific.versions) == [2]


def test_what_the_server_prints_can_be_sent_back() -> None:
    message = parse_model_config('name: "m" max_batch_size: 2 dynamic_batching { }', "config.pbtxt")
    assert parse_override(json_format.MessageToJson(message)) == message


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "{",
            "Invalid config override: not JSON: Expecting property name enclosed in double quotes at line 1 column 2",
        ),
        ("[1]", "Invalid config override: expected a JSON object of ModelConfig's fields, got list"),
        (
            '{"max_batch_sise": 1}',
            "Invalid config override: unknown field 'max_batch_sise' of ModelConfig; did you mean 'max_batch_size'?",
        ),
        (
            '{"input": [{"nam": "x"}]}',
            "Invalid config override: unknown field 'nam' of ModelInput at ModelConfig.input[0]; did you mean 'name'?",
        ),
    ],
)
def test_errors_say_what_and_where(text: str, error: str) -> None:
    with pytest.raises(ServeError) as raised:
        parse_override(text)
    assert raised.value.text == error
    assert raised.value.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "text",
    ['{"max_batch_size": "x"}', '{"input": 3}', '{"platform": 1}', '{"input": [{"data_type": "FP32"}]}', "[" * 100_000],
)
def test_wrong_values_are_refused(text: str) -> None:
    with pytest.raises(ServeError, match=r"^Invalid config override: ."):
        parse_override(text)


def test_one_element_stands_for_a_list_of_one() -> None:
    message = parse_override('{"input": {"name": "x", "reshape": {"shape": [1]}}, "instance_group": {"count": 2}}')
    assert [tensor.name for tensor in message.input] == ["x"]
    assert [group.count for group in message.instance_group] == [2]


def test_a_list_is_no_message() -> None:
    with pytest.raises(ServeError) as raised:
        parse_override('{"optimization": []}')
    assert raised.value.text == "Invalid config override: expected an object for 'optimization', got a list"
