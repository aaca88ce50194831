"""Inputs that the client casts to a model's datatypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rocserve_client import Input, InvalidArgument, TensorMetadata
from rocserve_client.calls import described_inputs, with_cast_advice
from rocserve_client.results import ModelMetadata
from rocserve_client.tensors import cast_input


@pytest.mark.parametrize(
    ("value", "datatype", "expected"),
    [
        (np.array([[5.1, 3.5]]), "FP32", np.array([[5.1, 3.5]], np.float32)),
        ([[5.1, 3.5]], "FP32", np.array([[5.1, 3.5]], np.float32)),
        ([[5, 3]], "FP16", np.array([[5, 3]], np.float16)),
        (np.array([[1.0, np.inf, np.nan]]), "FP16", np.array([[1.0, np.inf, np.nan]], np.float16)),
        (np.array([1.5]), "BF16", np.array([1.5], ml_dtypes.bfloat16)),
        ([1, -2], "INT32", np.array([1, -2], np.int32)),
        ([255], "UINT8", np.array([255], np.uint8)),
        (np.array([True, False]), "FP32", np.array([1, 0], np.float32)),
        (["a", b"b"], "BYTES", np.array(["a", b"b"], dtype=object)),
        (np.array(["a"]), "BYTES", np.array(["a"])),
    ],
)
def test_values_take_the_model_s_datatype(value: Any, datatype: str, expected: np.ndarray) -> None:
    cast = cast_input("x", value, datatype)
    assert isinstance(cast, np.ndarray)
    assert cast.dtype == expected.dtype
    np.testing.assert_array_equal(cast, expected)


@pytest.mark.parametrize(
    ("value", "datatype", "why"),
    [
        ([0.5], "INT32", "of float64 cannot be cast to the model's INT32"),
        ([300], "UINT8", "has numbers that UINT8, the model's datatype, cannot hold"),
        ([-1], "UINT64", "has numbers that UINT64"),
        ([1e300], "FP32", "has numbers that FP32"),
        ([70000], "FP16", "has numbers that FP16"),
        ([1e39], "BF16", "has numbers that BF16"),
        ([1], "BOOL", "of int64 cannot be cast to the model's BOOL"),
        (["a"], "FP32", "of <U1 cannot be cast to the model's FP32"),
        ([[1], [1, 2]], "FP32", "inhomogeneous shape"),
    ],
)
def test_values_that_would_change_are_refused(value: Any, datatype: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match="input 'x'") as caught:
        cast_input("x", value, datatype)
    assert why in caught.value.text


def test_an_input_that_names_its_datatype_keeps_it() -> None:
    given = Input(np.array([1], np.uint16), "BF16")
    assert cast_input("x", given, "FP32") is given
    cast = cast_input("x", Input(np.array([1.0]), parameters={"k": 1}), "FP32")
    assert isinstance(cast, Input)
    assert (cast.array.dtype, cast.parameters) == (np.float32, {"k": 1})


def metadata(*inputs: tuple[str, str]) -> ModelMetadata:
    return ModelMetadata("m", ("1",), "", tuple(TensorMetadata(*one, (-1,)) for one in inputs), (), {})


def test_inputs_get_names_and_datatypes() -> None:
    one = described_inputs(metadata(("x", "FP32")), [1.5], True)
    assert {name: value.dtype for name, value in one.items()} == {"x": np.float32}
    other = np.zeros(1)
    two = described_inputs(metadata(("x", "FP32"), ("y", "INT64")), {"y": [1], "other": other}, True)
    assert two["other"] is other
    with pytest.raises(InvalidArgument, match="has 2 inputs; give them by their names, in a dict: x, y"):
        described_inputs(metadata(("x", "FP32"), ("y", "INT64")), [1.5], True)


def test_an_error_about_a_datatype_names_the_way_out() -> None:
    about = InvalidArgument("inference input 'x' data-type is 'FP64', but model 'm' expects 'FP32'")
    assert with_cast_advice(about, False).text.endswith(
        "expects 'FP32'; infer(..., cast=True) converts the inputs to the model's datatypes"
    )
    assert with_cast_advice(about, True) is about
    other = InvalidArgument("unexpected shape")
    assert with_cast_advice(other, False) is other
