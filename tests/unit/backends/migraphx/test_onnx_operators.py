"""Operators that MIGraphX misreads are refused before it answers wrongly; similar ones that it reads rightly are
not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rocserve.backends.migraphx.model_files.onnx_graph import read_onnx_graph
from rocserve.core.errors import ServeError

_SHAPE = [2, 3, 4, 4]


def _model(
    opset: int,
    *nodes: onnx.NodeProto,
    shape: Sequence[int | str] = _SHAPE,
    datatype: int = TensorProto.FLOAT,
    output: Sequence[int] | None = None,
    **weights: Any,
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", datatype, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, output)
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def _node(operator: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs or ["x"], ["y"], **attributes)


def _f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def _constant(*values: float) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(_f32(*values)))


def _refusal(folder: Path, model: onnx.ModelProto) -> str:
    """The refusal; "" = none."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    try:
        read_onnx_graph(path)
    except ServeError as error:
        return error.text
    return ""


_DYNAMIC = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
_U8, _I8 = np.ones((4, 4), np.uint8), np.ones((4, 4), np.int8)
_SCALES = "whose scales are not constant whole numbers, as before opset 11"
_RELU = helper.make_node("Relu", ["x"], ["r"])


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (_model(12, _node("Softmax")), "Softmax over several axes, as before opset 13"),
        (_model(11, _node("LogSoftmax", axis=-2)), "LogSoftmax over several axes, as before opset 13"),
        (_model(7, _RELU, _node("Softmax", "r"), output=_SHAPE), "Softmax over several axes, as before opset 13"),
        (_model(10, _node("Clip", min=0.0)), "Clip with only one of min and max"),
        (_model(7, _node("Clip", max=6.0)), "Clip with only one of min and max"),
        (_model(14, _node("LSTM", "x", "x", "x", hidden_size=4, clip=3.0)), "LSTM with clip"),
        (_model(14, _node("LSTM", "x", "x", "x", hidden_size=4, input_forget=1)), "LSTM with input_forget"),
        (_model(9, _node("Upsample", "x", "s", mode="linear"), s=[1.0]), "Upsample that interpolates, as before opset"),
        (_model(8, _node("Upsample", scales=[1.0, 1.0, 1.3, 2.0])), f"Upsample {_SCALES}"),
        (_model(9, _node("Upsample", "x", "s"), s=_f32(1, 1, 2.4, 1.3)), f"Upsample {_SCALES}"),
        (_model(10, _node("Resize", "x", "s", mode="nearest"), s=_f32(1, 1, 0.5, 1)), f"Resize {_SCALES}"),
        (_model(10, _constant(1, 1, 3, 0.43), _node("Resize", "x", "c", mode="nearest")), f"Resize {_SCALES}"),
        (_model(10, _node("Resize", "x", "computed", mode="nearest")), f"Resize {_SCALES}"),
        (_model(10, _node("Resize", "x", "s", mode="linear"), s=[1.0]), "Resize that interpolates, as before opset 11"),
        (_model(18, _node("Resize", "x", "", "s", mode="linear", antialias=1), s=[1.0]), "Resize with antialias"),
        (_model(13, _node("ConvInteger", "x", "w"), w=_U8), "ConvInteger of uint8 without a zero point"),
        (
            _model(13, _node("MatMulInteger", "x", "w"), datatype=TensorProto.UINT8, w=_I8),
            "MatMulInteger of uint8 without a zero point",
        ),
        (
            _model(13, _DYNAMIC, _node("MatMulInteger", "q", "w", "z", "u"), w=_I8, u=np.int8(0)),
            "MatMulInteger beside a DynamicQuantizeLinear",
        ),
        (
            _model(15, _node("BatchNormalization", "x", "x", "x", "x", "x", training_mode=1)),
            "BatchNormalization in training mode",
        ),
        (
            _model(11, _node("ConvTranspose", "x", "w", strides=[2, 2], pads=[1] * 4, output_padding=[1, 1]), w=[1.0]),
            "ConvTranspose with output_padding beside pads",
        ),
        (
            _model(
                13,
                _node(
                    "Resize", "x", "", "s", coordinate_transformation_mode="tf_half_pixel_for_nn", nearest_mode="ceil"
                ),
                s=[1.0],
            ),
            "Resize of tf_half_pixel_for_nn that rounds up",
        ),
        (_model(13, _node("SpaceToDepth", blocksize=2, mode="CRD")), "SpaceToDepth of mode CRD"),
    ],
)
def test_what_migraphx_takes_for_something_else(tmp_path: Path, model: onnx.ModelProto, what: str) -> None:
    refused = _refusal(tmp_path, model)
    assert refused.startswith(f"ONNX file model.onnx has operator {what}")
    assert refused.endswith(
        ", which MIGraphX takes for something else; let ONNX Runtime run the model: parameter 'engine' \"onnxruntime\""
    )
    within = helper.make_graph(model.graph.node, "within", [], [helper.make_tensor_value_info("y", 1, None)])
    model.graph.ClearField("node")
    model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=within, else_branch=within))
    assert what in _refusal(tmp_path, model)


@pytest.mark.parametrize(
    "model",
    [
        _model(13, _node("Softmax", axis=1)),
        _model(12, _node("Softmax", axis=-1)),
        _model(12, _node("Softmax", axis=3)),
        _model(7, _node("Softmax"), shape=["N", 1000]),
        _model(7, _node("Softmax"), shape=["N", 1000, 1, 1]),
        _model(7, _RELU, _node("Softmax", "r")),
        _model(10, _node("Clip", min=0.0, max=6.0)),
        _model(10, _node("Clip")),
        _model(11, _node("Clip", "x", "m"), m=np.float32(0)),
        _model(14, _node("LSTM", "x", "x", "x", hidden_size=4, clip=0.0, input_forget=0)),
        _model(8, _node("Upsample", scales=[1.0, 1.0, 2.0, 3.0])),
        _model(9, _node("Upsample", "x", "s"), s=_f32(1, 1, 2, 2)),
        _model(10, _node("Resize", "x", "s", mode="nearest"), s=_f32(1, 1, 3, 2)),
        _model(10, _constant(1, 1, 2, 2), _node("Resize", "x", "c", mode="nearest")),
        _model(11, _node("Resize", "x", "", "s", mode="nearest"), s=_f32(1, 1, 2.4, 1.3)),
        _model(13, _node("Resize", "x", "", "s", mode="linear"), s=[1.0]),
        _model(13, _node("ConvInteger", "x", "w", "", "z"), w=_U8, z=np.uint8(1)),
        _model(13, _node("MatMulInteger", "x", "w"), datatype=TensorProto.INT8, w=_I8),
        _model(13, _DYNAMIC, _node("ConvInteger", "q", "w", "z", "u"), w=_I8, u=np.int8(0)),
        _model(15, _node("BatchNormalization", "x", "x", "x", "x", "x", training_mode=0)),
        _model(11, _node("ConvTranspose", "x", "w", strides=[2, 2], output_padding=[1, 1]), w=[1.0]),
        _model(11, _node("ConvTranspose", "x", "w", pads=[1, 1, 0, 1], output_padding=[1, 0]), w=[1.0]),
        _model(11, _node("ConvTranspose", "x", "w", pads=[1, 1, 1, 1]), w=[1.0]),
        _model(13, _node("SpaceToDepth", blocksize=2)),
        _model(12, helper.make_node("Softmax", ["x"], ["y"], domain="com.example")),
    ],
)
def test_what_it_takes_rightly(tmp_path: Path, model: onnx.ModelProto) -> None:
    assert _refusal(tmp_path, model) == ""


@pytest.mark.parametrize("attributes", [{"axis": 9}, {"axis": -(1 << 62)}, {"axis": "text"}, {"axis": [1.5]}], ids=str)
def test_attributes_that_cannot_be(tmp_path: Path, attributes: Mapping[str, Any]) -> None:
    """Invalid attributes, which MIGraphX itself refuses."""
    assert "damaged" not in _refusal(tmp_path, _model(12, _node("Softmax", **attributes)))
