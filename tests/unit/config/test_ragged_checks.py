"""Batches of requests of different shapes: what a configuration may say of them, and what the model must have."""

from __future__ import annotations

import pytest

from rocserve.config.pbtxt import parse_model_config
from rocserve.config.signature_checks import check_batch_tensors, check_signature
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import Signature, TensorSpec

TENSORS = """
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
    with pytest.raises(ServeError) as raised:
        check_batch_tensors(parse_model_config(TENSORS + fields, "config.pbtxt"))
    assert (raised.value.code, raised.value.text) == (StatusCode.INVALID_ARGUMENT, text)


def test_what_is_right_is_taken() -> None:
    message = parse_model_config(TENSORS + COUNT + SCATTER, "config.pbtxt")
    check_batch_tensors(message)
    assert check_signature(message, MODEL) == ()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            TENSORS.replace("allow_ragged_batch: true", "allow_ragged_batch: true optional: true") + COUNT,
            "unable to load model 'm', configuration expects model provides input with shape [-1] for ragged input 'X',"
            " which is not supported for optional input",
        ),
        (
            TENSORS + SCATTER + COUNT.replace("INT32", "FP32"),
            "unable to load model 'm', batch input 'N' is TYPE_FP32 in the configuration, TYPE_INT32 in the model",
        ),
        (
            TENSORS + SCATTER + COUNT.replace("BATCH_ELEMENT_COUNT", "BATCH_ITEM_SHAPE"),
            "unable to load model 'm', batch input 'N' has 2 dimensions, the first of any size; the model provides"
            " [-1]",
        ),
        (TENSORS, "unable to load model 'm', configuration expects 1 inputs, model provides 2; missing: N"),
        (
            TENSORS + SCATTER + COUNT.replace('"N"', '"M"'),
            "unable to load model 'm', batch input 'M' is not an input of the model",
        ),
    ],
)
def test_the_model_must_have_it_so(config: str, text: str) -> None:
    with pytest.raises(ServeError) as raised:
        check_signature(parse_model_config(config, "config.pbtxt"), MODEL)
    assert (raised.value.code, raised.value.text) == (StatusCode.INVALID_ARGUMENT, text)
