"""The facts of an ONNX file with large weights, and of files that are not models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.onnx_facts import onnx_facts

LARGE = np.ones((400, 400), np.float32)
SMALL = np.arange(8, dtype=np.float32)


def model() -> onnx.ModelProto:
    weights = [
        numpy_helper.from_array(LARGE, "large"),
        numpy_helper.from_array(SMALL, "small"),
        helper.make_tensor("packed", TensorProto.FLOAT, LARGE.shape, LARGE.ravel()),
        numpy_helper.from_array(np.ones((1000, 400), np.float32), "table"),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "large"], ["states"]),
        helper.make_node("MatMul", ["states", "packed"], ["y"], name="a name of some length " * 40_000),
    ]
    takes = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])]
    gives = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "sequence", 400])]
    graph = helper.make_graph(nodes, "graph", takes, gives, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_the_facts_are_those_of_the_whole_model(tmp_path: Path) -> None:
    path, whole = tmp_path / "model.onnx", model()
    onnx.save(whole, path)
    assert onnx_facts(path) == onnx_facts(whole) != NO_FACTS
    assert onnx_facts(path).ends == {"ids": 1000}


@pytest.mark.parametrize("content", [b"", b"no model", b"\x3a\xff\xff\xff\x7f"], ids=["empty", "text", "cut off"])
def test_a_file_that_is_no_model_has_no_facts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert onnx_facts(path) == NO_FACTS
