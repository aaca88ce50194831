"""Configurations of backends whose models answer each request themselves, and of batches of requests with different
shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.model_folders import Models

from rocserve.backends.base import BackendSpec, EngineSpec
from rocserve.backends.registry import BackendRegistry
from rocserve.config.completion import autofill, normalise
from rocserve.config.definition import ModelDefinition, complete_definition
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.plain import to_plain
from rocserve.config.signature_checks import check_signature
from rocserve.config.validation import check_loadable
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.ragged import RaggedBatching
from rocserve.core.requests import Signature, TensorSpec
from rocserve.repository.worker_options import config_json

REGISTRY = BackendRegistry(
    [
        BackendSpec(
            name="python",
            platforms=("python",),
            engines=(EngineSpec("python", "engines.python", thread_safe=False, forks_from_zygote=True),),
            model_filenames=("model.py",),
            default_max_batch_size=0,
            answers_requests=True,
            takes_ragged_batches=True,
        )
    ]
)
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_STRING dims: 1 }'
EMPTY = Signature((), (), False)
Read = Callable[..., ModelDefinition]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    models = Models(tmp_path, REGISTRY)
    written = 'backend: "python" '
    return lambda text, **options: models.made("m", {"config.pbtxt": written + text, "1/model.py": ""}, **options)


def test_what_the_model_says_of_itself_is_added(read: Read) -> None:
    signature = Signature(
        (TensorSpec("x", DataType.FP32, (-1, 4)), TensorSpec("w", DataType.INT8, (-1, -1))),
        (TensorSpec("y", DataType.BYTES, (-1, 1)), TensorSpec("z", DataType.INT64, (-1, 2, 3))),
        supports_batching=True,
        optional_inputs=frozenset({"w"}),
        max_batch_size=16,
        dynamic_batching=True,
        decoupled=True,
    )
    definition = complete_definition(read(TENSORS), signature)
    config = definition.config
    assert config.max_batch_size == 16
    assert config.inputs == (
        InputConfig("x", DataType.FP32, (4,)),
        InputConfig("w", DataType.INT8, (-1,), optional=True),
    )
    assert config.outputs == (OutputConfig("y", DataType.BYTES, (1,)), OutputConfig("z", DataType.INT64, (2, 3)))
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_sizes == (16,)
    assert config.decoupled
    assert definition.message.model_transaction_policy.decoupled


def test_a_model_says_which_inputs_are_ragged(read: Read) -> None:
    specs = [TensorSpec(name, DataType.FP32, (-1, 4)) for name in ("x", "w")]
    signature = replace(EMPTY, inputs=tuple(specs), max_batch_size=2, ragged_inputs=frozenset({"x", "w"}))
    config = complete_definition(read(TENSORS), signature).config
    assert [(tensor.name, tensor.allow_ragged_batch) for tensor in config.inputs] == [("x", True), ("w", True)]


def test_a_model_leaves_the_configurations_ragged_inputs(read: Read) -> None:
    signature = replace(EMPTY, inputs=(TensorSpec("x", DataType.FP32, (-1, 4)),), max_batch_size=2)
    written = TENSORS.replace("dims: 4 }", "dims: 4 allow_ragged_batch: true }")
    config = complete_definition(read(written), signature).config
    assert [tensor.allow_ragged_batch for tensor in config.inputs] == [True]


def test_a_model_that_says_nothing_leaves_all_as_it_is(read: Read) -> None:
    config = complete_definition(read(TENSORS + "max_batch_size: 2"), EMPTY).config
    assert (config.max_batch_size, config.decoupled, config.dynamic_batching) == (2, False, None)
    assert [tensor.name for tensor in (*config.inputs, *config.outputs)] == ["x", "y"]


def test_nothing_is_taken_from_the_model_when_told_so(read: Read) -> None:
    signature = replace(EMPTY, max_batch_size=16, decoupled=True)
    config = complete_definition(read(TENSORS, strict=True), signature, strict=True).config
    assert (config.max_batch_size, config.decoupled) == (0, False)


@pytest.mark.parametrize("what", ["input", "output"])
def test_a_model_may_take_or_give_nothing(read: Read, what: str) -> None:
    complete = complete_definition(read(f'{what} {{ name: "T" data_type: TYPE_FP32 dims: 1 }}'), EMPTY)
    assert len(complete.config.inputs) + len(complete.config.outputs) == 1


def test_a_model_that_neither_takes_nor_gives_anything_is_refused(read: Read) -> None:
    with pytest.raises(ServeError, match="must specify at least one 'input' or 'output' for m"):
        complete_definition(read(""), EMPTY)


def test_a_decoupled_model_may_keep_the_order(read: Read) -> None:
    text = TENSORS + "max_batch_size: 2 dynamic_batching { preserve_ordering: true }"
    config = complete_definition(read(text), replace(EMPTY, max_batch_size=2, decoupled=True)).config
    assert config.decoupled
    assert config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering


def test_the_policy_is_read(read: Read) -> None:
    assert read(TENSORS + "model_transaction_policy { decoupled: true }").config.decoupled


def test_the_configuration_as_json_has_all_fields_and_numbers() -> None:
    text = """
    name: "m" backend: "python" max_batch_size: 8
    version_policy { latest { num_versions: 2 } }
    input { name: "x" data_type: TYPE_FP32 dims: [ -1, 9223372036854775807 ] reshape { shape: [ 4 ] } optional: true }
    output { name: "y" data_type: TYPE_STRING dims: 1 label_filename: "labels" }
    instance_group { kind: KIND_CPU count: 2 gpus: [ ] }
    dynamic_batching {
      max_queue_delay_microseconds: 100
      priority_queue_policy { key: 2 value { max_queue_size: 5 } }
    }
    parameters { key: "k" value { string_value: "v" } }
    model_transaction_policy { decoupled: true }
    """
    config: dict[str, Any] = json.loads(config_json(parse_model_config(text, "config.pbtxt")))
    assert config["name"] == "m"
    assert config["max_batch_size"] == 8
    assert config["platform"] == ""
    assert config["version_policy"] == {"latest": {"num_versions": 2}}
    assert config["input"] == [
        {
            "name": "x",
            "data_type": "TYPE_FP32",
            "format": "FORMAT_NONE",
            "dims": [-1, 9223372036854775807],
            "reshape": {"shape": [4]},
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            "optional": True,
            "is_non_linear_format_io": False,
        }
    ]
    assert config["output"][0]["label_filename"] == "labels"
    assert config["instance_group"][0]["count"] == 2
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert config["dynamic_batching"]["priority_queue_policy"]["2"]["max_queue_size"] == 5
    assert config["parameters"] == {"k": {"string_value": "v"}}
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["model_warmup"] == []
    # Messages that are not set are absent.
    assert "optimization" not in config
    assert "sequence_batching" not in config


RAGGED_TENSORS = """
name: "m" max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
COUNT = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 source_input: "X" }'
SCATTER = 'batch_output { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }'
MODEL = Signature(
    inputs=(TensorSpec("X", DataType.FP32, (-1,)), TensorSpec("N", DataType.INT32, (-1,))),
    outputs=(TensorSpec("Y", DataType.FP32, (-1,)),),
    supports_batching=True,
)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 }',
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m",
        ),
        (
            COUNT.replace("BATCH_ELEMENT_COUNT", "BATCH_ITEM_SHAPE").replace("}", 'source_input: "X" }'),
            "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 2 for m",
        ),
        (COUNT.replace("INT32", "INT64"), "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
        (COUNT.replace('"X"', '"Z"'), "unknown source input name 'Z' for m"),
        (
            COUNT.replace('target_name: "N"', ""),
            "batch input must specify 'target_name', the inputs of the model that it becomes for m",
        ),
        (COUNT.replace('"N"', '"X"'), "batch input target 'X' may not be an input of requests too for m"),
        (
            SCATTER.replace('source_input: "X"', ""),
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m",
        ),
        (SCATTER.replace('"X"', '"Z"'), "unknown source input name 'Z' for m"),
        (SCATTER.replace('"Y"', '"Z"'), "unknown target output name 'Z' for m"),
        (
            SCATTER.replace('target_name: "Y"', 'target_name: "Y" target_name: "Y"'),
            "target output name 'Y' can only be specified once for m",
        ),
        (
            'output { name: "T" data_type: TYPE_STRING dims: [ -1 ] }' + SCATTER.replace('"Y"', '"T"'),
            "target output 'T' of a batch output is TYPE_STRING, whose elements have no size for m",
        ),
        (
            'output { name: "W" data_type: TYPE_FP32 dims: [ 2, -1 ] }' + SCATTER.replace('"Y"', '"W"'),
            "target output 'W' has dimensions of any size that its source input 'X' does not have for m",
        ),
        (
            'input { name: "O" data_type: TYPE_FP32 dims: [ -1 ] optional: true }' + COUNT.replace('"X"', '"O"'),
            "source input 'O' of a batch input may not be optional: every request has to have it for m",
        ),
    ],
)
def test_faults(fields: str, text: str) -> None:
    assert fault_of(RAGGED_TENSORS + fields) == text


@pytest.mark.parametrize("tensors", ["", 'input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }'])
def test_errors_of_the_configuration_alone_come_before_the_tensors_are_known(tensors: str) -> None:
    wrong_type = COUNT.replace("data_type: TYPE_INT32", "")
    given = f'name: "m" platform: "onnx_onnxv1" max_batch_size: 4 instance_group {{ }} {tensors}'
    assert fault_of(given + wrong_type) == "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"
    expected = "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m"
    assert fault_of(given + SCATTER.replace('source_input: "X"', "")) == expected


def test_outputs_that_each_request_has_a_part_of_are_not_completed() -> None:
    written = (
        'name: "m" input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } max_batch_size: 4'
    )
    message = parse_model_config(f"{written} {SCATTER}", "config.pbtxt")
    assert RaggedBatching(to_plain(message, "onnx", {})), "also while they are not known"
    with pytest.raises(ServeError, match="does not say the shape that each request gets of batch output 'Y'; write"):
        autofill(message, MODEL, 64)


def fault_of(text: str) -> str:
    """The text of the INVALID_ARGUMENT that is raised."""
    with pytest.raises(ServeError) as raised:
        check_loadable(parse_model_config(text, "config.pbtxt"))
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    return raised.value.text


def test_what_is_right_is_taken() -> None:
    message = parse_model_config(RAGGED_TENSORS + COUNT + SCATTER, "config.pbtxt")
    normalise(message, None)
    check_loadable(message)
    assert check_signature(message, MODEL) == ()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            RAGGED_TENSORS.replace("allow_ragged_batch: true", "allow_ragged_batch: true optional: true") + COUNT,
            "unable to load model 'm', configuration expects model provides input with shape [-1] for ragged input 'X',"
            " which is not supported for optional input",
        ),
        (
            RAGGED_TENSORS + SCATTER + COUNT.replace("INT32", "FP32"),
            "unable to load model 'm', batch input 'N' is TYPE_FP32 in the configuration, TYPE_INT32 in the model",
        ),
        (
            RAGGED_TENSORS + SCATTER + COUNT.replace("BATCH_ELEMENT_COUNT", "BATCH_ITEM_SHAPE"),
            "unable to load model 'm', batch input 'N' has 2 dimensions, the first of any size; the model provides"
            " [-1]",
        ),
        (RAGGED_TENSORS, "unable to load model 'm', configuration expects 1 inputs, model provides 2; missing: N"),
        (
            RAGGED_TENSORS + SCATTER + COUNT.replace('"N"', '"M"'),
            "unable to load model 'm', batch input 'M' is not an input of the model",
        ),
    ],
)
def test_the_model_must_have_it_so(config: str, text: str) -> None:
    with pytest.raises(ServeError) as raised:
        check_signature(parse_model_config(config, "config.pbtxt"), MODEL)
    assert (raised.value.code, raised.value.text) == (StatusCode.INVALID_ARGUMENT, text)
