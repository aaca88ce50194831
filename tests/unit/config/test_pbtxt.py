from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from rocserve.config.pbtxt import format_model_config, parse_model_config, read_text
from rocserve.core.errors import ServeError, StatusCode
from rocserve.protocol.model_config_pb2 import ModelConfig


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            'name: "m"\n  max_batch_sise: 8',
            "config.pbtxt:2:3: unknown field 'max_batch_sise' of ModelConfig; did you mean 'max_batch_size'?",
        ),
        (
            'input [\n  { name: "x", datatype: TYPE_FP32 }\n]',
            "config.pbtxt:2:16: unknown field 'datatype' of ModelInput; did you mean 'data_type'?",
        ),
        (
            "instance_group { kind: KIND_GPUS }",
            "config.pbtxt:1:24: unknown value KIND_GPUS of Kind; did you mean 'KIND_GPU'?",
        ),
        (
            "output {\n  data_type: FP32 }",
            "config.pbtxt:2:14: unknown value FP32 of DataType; did you mean 'TYPE_FP32'?",
        ),
        (
            'input { data_type: "FP32" }',
            "config.pbtxt:1:20: unknown value \"FP32\" of DataType (remove the quotes); did you mean 'TYPE_FP32'?",
        ),
        ("name: 3", "config.pbtxt:1:7: expected string but found: '3'; write texts in quotes"),
        ('max_batch_size: "8"', 'config.pbtxt:1:17: couldn\'t parse integer: "8"; write a whole number'),
        (
            "input { dims: [batch, 4] }",
            "config.pbtxt:1:16: couldn't parse integer: batch; write a whole number, or -1 for any size",
        ),
        ("input { dims: [ 4, ] }", "config.pbtxt:1:20: couldn't parse integer: ]; remove the comma before ]"),
        ("input [\n  { dims: 4 },\n\n]", 'config.pbtxt:4:1: expected "{"; remove the comma before ]'),
        (
            'parameters { key: "engine" value: "cpu" }',
            'config.pbtxt:1:35: expected "{"; value is a message: write value { string_value: "..." }',
        ),
        (
            "version_policy: latest",
            'config.pbtxt:1:17: expected "{"; version_policy is a message: write version_policy { ... }',
        ),
        (
            "dynamic_batching",
            'config.pbtxt:1:17: expected "{"; dynamic_batching is a message: write dynamic_batching { }',
        ),
        ("\nmax_batch_size: 99999999999", "config.pbtxt:2:17: value out of range: 99999999999"),
        (
            'name: "a"\nname: "b"',
            'config.pbtxt:2:7: message type "inference.ModelConfig" should not have multiple "name" fields',
        ),
        ("input { ", 'config.pbtxt:1:7: expected "}"'),
    ],
)
def test_error_tells_line_column_and_what_was_meant(text: str, error: str) -> None:
    with pytest.raises(ServeError) as raised:
        parse_model_config(text, "config.pbtxt")
    assert raised.value.text == error
    assert raised.value.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("text", "format_"),
    [
        ('{"name": "m", "max_batch_size": 4}', "JSON"),
        ("name: m\nmax_batch_size: 4\n", "YAML"),
        ("max_batch_size: 4\ninput:\n  - name: X\n", "YAML"),
        ("---\nmax_batch_size = 4\n", "YAML"),
    ],
)
def test_text_of_another_format_is_recognised(text: str, format_: str) -> None:
    with pytest.raises(ServeError) as caught:
        parse_model_config(text, "config.pbtxt")
    assert caught.value.text.endswith(
        f'; this looks like {format_}, but must be protobuf\'s text format, e.g. max_batch_size: 8 input {{ name: "x"'
        " data_type: TYPE_FP32 dims: [4] }"
    )


def test_unknown_field_without_a_near_name_lists_the_fields() -> None:
    with pytest.raises(ServeError) as raised:
        parse_model_config("version_policy { zzz { } }", "config.pbtxt")
    assert raised.value.text == (
        "config.pbtxt:1:18: unknown field 'zzz' of ModelVersionPolicy; expected one of: all, latest, specific"
    )


def test_both_members_of_a_choice_are_refused() -> None:
    with pytest.raises(ServeError, match=r"^config\.pbtxt:2:3: field \"all\" is specified along with field \"latest\""):
        parse_model_config("version_policy { latest { num_versions: 1 }\n  all { } }", "config.pbtxt")


def test_the_ways_of_writing_triton_allows() -> None:
    message = parse_model_config(
        """
        # a comment
        name: "m"  platform: 'onnxruntime_onnx'
        input [ { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] }, { name: "b", data_type: 13; dims: 1 dims: 2 } ]
        parameters { key: "k" value: { string_value: "v" } }
        dynamic_batching { }
        """,
        "config.pbtxt",
    )
    assert [list(tensor.dims) for tensor in message.input] == [[-1, 3], [1, 2]]
    assert message.parameters["k"].string_value == "v"
    assert message.HasField("dynamic_batching")


def test_text_that_is_not_utf8_tells_where(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'name: "m"\nplatform: "\xff"')
    with pytest.raises(ServeError) as raised:
        read_text(path)
    assert raised.value.text == "config.pbtxt:2:12: not UTF-8 text (byte 0xff)"


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"failed to open text file for read .*: No such file or directory"):
        read_text(tmp_path / "config.pbtxt")


_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32, allow_nan=False),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_STRING: st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
}


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        return st.sampled_from([value.number for value in field.enum_type.values])
    return _INTEGERS[field.cpp_type]


@st.composite
def _filled(draw: st.DrawFn, message: Message, depth: int = 0) -> Message:
    descriptor: Descriptor = message.DESCRIPTOR
    fields = list(descriptor.fields)
    if not fields:
        return message
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda field: field.name)):
        repeated = field.is_repeated
        count = draw(st.integers(0, 2)) if repeated else 1
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        for _ in range(count):
            if is_map:
                key = draw(_scalars(field.message_type.fields_by_name["key"]))
                value = field.message_type.fields_by_name["value"]
                if value.message_type is None:
                    getattr(message, field.name)[key] = draw(_scalars(value))
                else:
                    draw(_filled(getattr(message, field.name)[key], depth + 1))
            elif field.message_type is not None:
                child = getattr(message, field.name).add() if repeated else getattr(message, field.name)
                if not repeated:
                    child.SetInParent()
                if depth < 4:
                    draw(_filled(child, depth + 1))
            elif repeated:
                getattr(message, field.name).append(draw(_scalars(field)))
            else:
                setattr(message, field.name, draw(_scalars(field)))
    return message


@settings(max_examples=150)
@given(st.data())
def test_what_is_printed_is_read_back_the_same(data: st.DataObject) -> None:
    message = data.draw(_filled(ModelConfig()))
    assert isinstance(message, ModelConfig)
    assert parse_model_config(format_model_config(message), "config.pbtxt") == message


@settings(max_examples=300)
@given(st.text(st.sampled_from("{}[]<>:;,\"'\\ \n#-1.9einputamedhv_TYPEFP32ÿ\x00"), max_size=40))
def test_any_text_is_a_configuration_or_a_clear_error(text: str) -> None:
    try:
        parse_model_config(text, "config.pbtxt")
    except ServeError as error:
        assert error.text.startswith("config.pbtxt:")
