"""Finds ONNX operators that MIGraphX misreads, so that its answers are silently wrong.

The list comes from comparing MIGraphX 2.14 (target ref) with ONNX Runtime, which follows the ONNX specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import numpy_helper

_Attributes = Mapping[str, onnx.AttributeProto]
_NONE = onnx.AttributeProto()
_DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class _ModelFacts:
    """The facts about the model that checks of one node need."""

    opset: int
    dims: Mapping[str, Sequence[int]]
    """Tensor's name -> dimensions; 0 = open. Tensors without a shape in the file are missing."""
    datatypes: Mapping[str, int]
    constants: Mapping[str, onnx.TensorProto]
    """Weights, and values of Constant nodes; their data may be in other files."""
    operators: frozenset[str]
    """The operator types of the whole graph."""


def misread_operator(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> str:
    """Return a description of the first node that MIGraphX misreads ("Clip with only one of min and max"); "" = none is
    known. `nodes`: the model's nodes of ONNX's own operators, nested graphs included."""
    graph = model.graph
    described = (*graph.input, *graph.value_info, *graph.output)
    datatypes = {value.name: value.type.tensor_type.elem_type for value in described}
    datatypes.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    facts = _ModelFacts(
        opset=next((entry.version for entry in model.opset_import if entry.domain in _DEFAULT_DOMAINS), 1),
        dims={
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in described
            if value.type.tensor_type.HasField("shape")
        },
        datatypes=datatypes,
        constants=dict(_constants(graph, nodes)),
        operators=frozenset(node.op_type for node in nodes),
    )
    for node in nodes:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type in _CHECKS and (fault := _CHECKS[node.op_type](node, attributes, facts)):
            return f"{node.op_type} {fault}"
    return ""


def _constants(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> Iterator[tuple[str, onnx.TensorProto]]:
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in nodes:
        if node.op_type == "Constant":
            yield from ((node.output[0], value.t) for value in node.attribute if value.HasField("t") and node.output)


def _softmax(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> str:
    """Before opset 13 the operator works over the axis and all later axes together; MIGraphX takes only the axis."""
    dims = next((facts.dims[name] for name in (*node.input, *node.output) if name in facts.dims), ())
    if facts.opset >= 13 or not dims:
        return ""
    axis = attributes["axis"].i if "axis" in attributes else 1
    behind = dims[axis % len(dims) + 1 :]
    return "over several axes, as before opset 13" if any(size != 1 for size in behind) else ""


def _clip(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> str:
    return "with only one of min and max" if facts.opset < 11 and len({"min", "max"} & attributes.keys()) == 1 else ""


def _recurrent(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> str:
    if attributes.get("clip", _NONE).f:
        return "with clip"
    return "with input_forget" if attributes.get("input_forget", _NONE).i else ""


def _resize(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> str:
    """Resize of opset 10 and Upsample begin at the image's corner; MIGraphX begins at the middle of the first pixel,
    which gives the same pixels only for whole scales in mode nearest."""
    mode, transformation = attributes.get("mode", _NONE).s, attributes.get("coordinate_transformation_mode", _NONE).s
    if facts.opset <= 10:
        if mode not in (b"", b"nearest"):
            return "that interpolates, as before opset 11"
        scales = _scales(node, attributes, facts)
        if not scales or any(scale < 1 or not scale.is_integer() for scale in scales):
            return "whose scales are not constant whole numbers, as before opset 11"
    if transformation == b"tf_half_pixel_for_nn" and b"ceil" in attributes.get("nearest_mode", _NONE).s:
        return "of tf_half_pixel_for_nn that rounds up"
    return "with antialias" if attributes.get("antialias", _NONE).i else ""


def _scales(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> Sequence[float]:
    """Return the scales, which Upsample has as an attribute before opset 9; empty = they are not in the file."""
    if "scales" in attributes:
        return attributes["scales"].floats
    tensor = facts.constants.get(node.input[1]) if len(node.input) > 1 else None
    if tensor is None or tensor.data_location or tensor.data_type != onnx.TensorProto.FLOAT:
        return ()
    return [float(scale) for scale in numpy_helper.to_array(tensor).ravel()]


def _integer(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> str:
    for operand, zero_point in ((0, 2), (1, 3)):
        name = node.input[operand] if operand < len(node.input) else ""
        has_zero_point = zero_point < len(node.input) and node.input[zero_point]
        if facts.datatypes.get(name) == onnx.TensorProto.UINT8 and not has_zero_point:
            return "of uint8 without a zero point"
    if node.op_type == "MatMulInteger" and "DynamicQuantizeLinear" in facts.operators:
        return "beside a DynamicQuantizeLinear"
    return ""


def _batch_normalization(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> str:
    return "in training mode" if attributes.get("training_mode", _NONE).i else ""


def _conv_transpose(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> str:
    """Elements that `output_padding` adds take the values that `pads` cuts off, if any; MIGraphX adds zeros."""
    added, cut = attributes.get("output_padding", _NONE).ints, attributes.get("pads", _NONE).ints
    ends = cut[len(cut) // 2 :]
    return "with output_padding beside pads" if any(min(pair) > 0 for pair in zip(added, ends, strict=False)) else ""


def _space_to_depth(node: onnx.NodeProto, attributes: _Attributes, facts: _ModelFacts) -> str:
    return "of mode CRD" if attributes.get("mode", _NONE).s == b"CRD" else ""


_CHECKS: Mapping[str, Callable[[onnx.NodeProto, _Attributes, _ModelFacts], str]] = {
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Clip": _clip,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Resize": _resize,
    "Upsample": _resize,
    "ConvInteger": _integer,
    "MatMulInteger": _integer,
    "BatchNormalization": _batch_normalization,
    "ConvTranspose": _conv_transpose,
    "SpaceToDepth": _space_to_depth,
}
"""Each check's text follows the operator's name; "" = no misreading is known."""
