"""Responses whose outputs go out element by element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import InferResponse
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.frontends.grpc.codec import typed_answer
from rocserve.protocol.grpc_service_pb2 import ModelInferResponse


def response(*tensors: Tensor) -> InferResponse:
    return replace(InferResponse.of("m", "1", "id", tensors, {"told": 1}), is_typed=True)


@pytest.mark.parametrize(
    ("array", "field"),
    [
        (np.array([True, False]), "bool_contents"),
        (np.array([-1, 2], np.int8), "int_contents"),
        (np.array([-1, 2], np.int16), "int_contents"),
        (np.array([-1, 2], np.int32), "int_contents"),
        (np.array([-1, 2], np.int64), "int64_contents"),
        (np.array([1, 255], np.uint8), "uint_contents"),
        (np.array([1, 2], np.uint16), "uint_contents"),
        (np.array([1, 2], np.uint32), "uint_contents"),
        (np.array([1, 2**63], np.uint64), "uint64_contents"),
        (np.array([0.5, 2], np.float16), "fp32_contents"),
        (np.array([0.5, 2], np.float32), "fp32_contents"),
        (np.array([0.5, 2], np.float64), "fp64_contents"),
        (np.array([b"a", b""], np.object_), "bytes_contents"),
    ],
)
def test_each_datatype_has_its_field(array: np.ndarray, field: str) -> None:
    encoded = typed_answer(response(tensor_from_numpy("OUT", array))).SerializeToString()
    message = ModelInferResponse.FromString(encoded)
    output = message.outputs[0]
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "id")
    assert message.parameters["told"].int64_param == 1
    assert (output.name, list(output.shape), list(message.raw_output_contents)) == ("OUT", [2], [])
    assert [entry.name for entry, _ in output.contents.ListFields()] == [field]
    assert list(getattr(output.contents, field)) == array.tolist()


def test_a_datatype_without_a_field_is_refused() -> None:
    with pytest.raises(ServeError) as refused:
        typed_answer(response(Tensor("OUT", DataType.BF16, (1,), b"\0\0")))
    assert refused.value.code is StatusCode.UNIMPLEMENTED
    assert "BF16, which has no typed contents; send the inputs as raw_input_contents" in refused.value.text
