"""An ONNX graph with its subgraphs, as one list of nodes that can be followed from a tensor to what made it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

_MOST_VALUES = 1 << 16
"""Values of the largest constant that is read: thresholds, offsets, the numbers that a vocabulary is compared with."""
_PASSING = frozenset(
    ("Cast", "DequantizeLinear", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape")
) | {"Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
"""Operators whose output has values of their first input, perhaps in another shape or type."""
_SHAPED = frozenset(("Cast", "Constant", "DequantizeLinear", "Identity", "Transpose"))
_MOST_STEPS = 64
"""Nodes between a tensor and what is looked for; a file with a cycle is not followed forever."""


class OnnxGraph:
    """Reads a model. Names are unique in a graph and its subgraphs, as ONNX requires."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.nodes: Sequence[onnx.NodeProto] = list(_nodes(model.graph))
        self.initializers = {tensor.name: tensor for graph in _graphs(model.graph) for tensor in graph.initializer}
        self.makers: Mapping[str, onnx.NodeProto] = {name: node for node in self.nodes for name in node.output if name}
        self.inputs = [value.name for value in model.graph.input if value.name not in self.initializers]

    @cached_property
    def fed(self) -> frozenset[str]:
        """The tensors that depend on the model's inputs; all of a subgraph count as such."""
        found = set(self.inputs)
        for node in self.graph.node:
            if any(name in found for name in node.input) or any(True for _ in _subgraphs(node)):
                found.update(node.output)
        inner = {name for node in self.nodes for graph in _subgraphs(node) for one in graph.node for name in one.output}
        return frozenset(found | inner)

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return a small constant; None if it is none, large, or in another file."""
        from onnx import TensorProto, numpy_helper

        tensor = self.initializers.get(name)
        node = self.makers.get(name)
        if tensor is None and node is not None and node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    tensor = attribute.t
                elif attribute.name in ("value_float", "value_floats"):
                    return np.array(attribute.floats or attribute.f)
                elif attribute.name in ("value_int", "value_ints"):
                    return np.array(attribute.ints or attribute.i)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL or int(np.prod(tensor.dims)) > _MOST_VALUES:
            return None
        return numpy_helper.to_array(tensor)

    def number(self, name: str) -> float | None:
        """Return the largest value of a small numeric constant; None if it is none."""
        value = self.constant(name)
        if value is None or value.dtype.kind not in "fiu" or not value.size:
            return None
        return float(value.max())

    def shape(self, name: str) -> Sequence[int | None]:
        """Return the shape of a tensor as far as the file tells it: of weights, also of quantised ones."""
        orders: list[Sequence[int] | None] = []
        shape: Sequence[int | None] = []
        for _ in range(_MOST_STEPS):
            node = self.makers.get(name)
            if name in self.initializers:
                shape = list(self.initializers[name].dims)
            elif node is None or node.op_type not in _SHAPED:
                shape = self._declared_shapes.get(name, [])
            elif node.op_type == "Constant":
                shape = next((list(one.t.dims) for one in node.attribute if one.name == "value"), [])
            else:
                if node.op_type == "Transpose":
                    orders.append(attribute_of(node, "perm", None))
                name = node.input[0]
                continue
            break
        for order in reversed(orders):
            order = list(reversed(range(len(shape)))) if order is None else order
            shape = [shape[axis] for axis in order] if len(order) == len(shape) else []
        return shape

    def sources(self, name: str, passing: Container[str] = _PASSING, through_all: bool = False) -> Iterator[str]:
        """Yield the tensors that a tensor's values come from, through the operators of `passing`: itself first.
        `through_all`: through all inputs of an operator, not only the one whose values it keeps."""
        waiting, seen = [name], set[str]()
        while waiting and len(seen) < _MOST_STEPS:
            current = waiting.pop(0)
            if not current or current in seen:
                continue
            seen.add(current)
            yield current
            node = self.makers.get(current)
            if node is None:
                continue
            if node.op_type in ("Concat", "Where") and not through_all:
                waiting += node.input[node.op_type == "Where" :]
            elif node.op_type in passing:
                waiting += node.input if through_all else node.input[:1]

    @cached_property
    def _declared_shapes(self) -> Mapping[str, Sequence[int | None]]:
        return {
            value.name: [size.dim_value or None for size in value.type.tensor_type.shape.dim]
            for value in (*self.graph.input, *self.graph.value_info)
        }


def attribute_of(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Return the value of a node's attribute."""
    from onnx import helper

    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), default)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for inner in _subgraphs(node):
            yield from _graphs(inner)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for one in _graphs(graph):
        yield from one.node
