"""ONNX models with external weights: where the files may be, and the errors when they are missing or elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.full_disk import full_disk

from rocserve.backends.base import Batch, ModelSource
from rocserve.backends.onnx.backend import load
from rocserve.backends.onnx.external_weights import NO_WEIGHTS, find_external_weights
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import tensor_from_numpy

SourceMaker = Callable[..., ModelSource]

FLOAT = TensorProto.FLOAT
WEIGHTS = np.arange(1000, dtype=np.float32)


def tensor_in(location: str, name: str = "weights") -> TensorProto:
    tensor = TensorProto(name=name, data_type=FLOAT, dims=[1000], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", str(WEIGHTS.nbytes))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def adding(location: str) -> bytes:
    """Y = X + weights, FP32 [batch, 1000]."""
    return _model([helper.make_node("Add", ["X", "weights"], ["Y"])], [tensor_in(location)])


def adding_within_a_branch(location: str) -> bytes:
    """The same, with the weights in the subgraph of a node."""
    inner = helper.make_graph(
        [helper.make_node("Add", ["X", "weights"], ["sum"])],
        "then",
        [],
        [helper.make_tensor_value_info("sum", FLOAT, ["batch", 1000])],
        [tensor_in(location)],
    )
    same = helper.make_graph(
        [helper.make_node("Identity", ["X"], ["same"])],
        "else",
        [],
        [helper.make_tensor_value_info("same", FLOAT, ["batch", 1000])],
    )
    condition = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    nodes = [
        helper.make_node("Constant", [], ["condition"], value=condition),
        helper.make_node("If", ["condition"], ["Y"], then_branch=inner, else_branch=same),
    ]
    return _model(nodes, [])


def _model(nodes: list[onnx.NodeProto], initializers: list[TensorProto]) -> bytes:
    values = [helper.make_tensor_value_info(name, FLOAT, ["batch", 1000]) for name in ("X", "Y")]
    model = helper.make_model(
        helper.make_graph(nodes, "graph", values[:1], values[1:], initializers),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    return bytes(model.SerializeToString())


def write_weights(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(WEIGHTS.tobytes())


@pytest.mark.parametrize("model", [adding, adding_within_a_branch])
@pytest.mark.parametrize("location", ["weights.bin", "data/weights.bin", "./weights.bin"])
def test_weights_that_are_written_to_while_the_model_runs(
    model_source: SourceMaker, model: Callable[[str], bytes], location: str
) -> None:
    source = model_source("model.onnx", model(location))
    write_weights(source.version_folder / location)
    loaded = load(source)
    # Truncating a mapped file would kill the process.
    os.truncate(source.version_folder / location, 0)
    ones = tensor_from_numpy("X", np.ones((1, 1000), np.float32))
    outputs = loaded.execute(Batch({"X": ones}, ("Y",), (1,))).outputs
    np.testing.assert_array_equal(outputs["Y"], WEIGHTS[None] + 1)


@pytest.mark.parametrize("model", [adding, adding_within_a_branch])
@pytest.mark.parametrize(
    ("location", "text"),
    [
        (
            "gone",
            "ONNX file model.onnx needs external data file 'gone', which is missing; copy it into the same folder",
        ),
        ("../../weights.bin", "'../../weights.bin' must be a path within its folder, without '..' and not absolute"),
    ],
)
def test_weights_that_are_not_as_they_must_be(
    model_source: SourceMaker, tmp_path: Path, model: Callable[[str], bytes], location: str, text: str
) -> None:
    """test_onnx_graph.py has all faults."""
    write_weights(tmp_path / "weights.bin")
    with pytest.raises(ServeError) as caught:
        load(model_source("model.onnx", model(location)))
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert text in caught.value.text


def test_weights_that_cannot_be_copied_are_no_fault_of_the_model_s(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", adding_within_a_branch("weights"))
    write_weights(source.version_folder / "weights")
    with full_disk(), pytest.raises(ServeError) as refused:
        load(source)
    assert refused.value.code is StatusCode.UNAVAILABLE
    assert "cannot copy the external data of model.onnx to a temporary file for ONNX Runtime: " in refused.value.text
    assert "File too large" in refused.value.text
    assert refused.value.text.endswith("free space in the temporary folder, or set another one with $TMPDIR")
    assert load(source).signature.inputs


def test_a_link_within_the_model(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", adding("weights.bin"))
    write_weights(source.version_folder / "..data" / "weights.bin")
    (source.version_folder / "weights.bin").symlink_to("..data/weights.bin")
    load(source)


def test_a_name_that_only_looks_like_external_data(model_source: SourceMaker) -> None:
    values = [helper.make_tensor_value_info(name, FLOAT, ["batch", 1]) for name in ("location", "Y")]
    graph = helper.make_graph([helper.make_node("Neg", ["location"], ["Y"])], "graph", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert load(model_source("model.onnx", model.SerializeToString())).signature.inputs[0].name == "location"


def test_a_damaged_file_that_seems_to_have_external_data(model_source: SourceMaker) -> None:
    with pytest.raises(ServeError, match=r"ONNX Runtime cannot load model.onnx: "):
        load(model_source("model.onnx", b"\xff\xfflocation" + adding("weights.bin")[:50]))


def test_a_file_that_has_been_emptied_or_cannot_be_read_is_for_the_engine_to_tell_of(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", b"")
    assert find_external_weights(source) is NO_WEIGHTS
    source.model_file.unlink()
    assert find_external_weights(source) is NO_WEIGHTS


def test_a_name_that_is_no_text(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", adding("weights.bin").replace(b"weights.bin", b"weights\xffbin"))
    with pytest.raises(ServeError, match=r"model.onnx is damaged: its external data entries are not text") as caught:
        load(source)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
