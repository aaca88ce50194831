"""An ONNX graph with its subgraphs, as one list of nodes that can be followed from a tensor to its origin."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rocserve.core.wire_format import Buffer
from rocserve.load_check.onnx_message import Graph, Node, Tensor, ValueInfo, function_nodes_of, graph_of

_PASSING = frozenset(
    ("Cast", "DequantizeLinear", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape")
) | {"Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
"""Operators whose output has values of their first input, perhaps in another shape or type."""
_MOST_STEPS = 64
"""Limit of nodes on a path; a file with a cycle is not followed forever."""


class OnnxGraph:
    """Reads a model. Names are unique in a graph and its subgraphs, as ONNX requires."""

    def __init__(self, model: Buffer) -> None:
        """Raises ValueError if the model is damaged."""
        self.graph = graph_of(model)
        self.nodes = [node for graph in _graphs(self.graph) for node in graph.nodes]
        self.function_nodes = function_nodes_of(model)
        """Not in `nodes`: a function's names are its own."""
        self.initializers = {tensor.name: tensor for graph in _graphs(self.graph) for tensor in graph.initializers}
        self.makers: Mapping[str, Node] = {name: node for node in self.nodes for name in node.output if name}
        self.inputs = [value.name for value in self.graph.inputs if value.name not in self.initializers]

    @cached_property
    def fed(self) -> frozenset[str]:
        """The tensors that depend on the model's inputs; all of a subgraph count as such."""
        found = set(self.inputs)
        for node in self.graph.nodes:
            if node.graphs or any(name in found for name in node.input):
                found.update(node.output)
        inner = {name for node in self.nodes for graph in node.graphs for one in graph.nodes for name in one.output}
        return frozenset(found | inner)

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return a small constant; None if it is not a constant, large, or in another file."""
        tensor = self.initializers.get(name)
        node = self.makers.get(name)
        if tensor is None and node is not None and node.op_type == "Constant":
            for attribute in ("value_float", "value_floats", "value_int", "value_ints"):
                if (value := node.attribute(attribute)) is not None:
                    return np.array(value)
            tensor = node.attribute("value")
        # Thresholds, offsets and numbers that a vocabulary is compared with are smaller.
        return tensor.values(1 << 16) if isinstance(tensor, Tensor) else None

    def texts(self, name: str) -> Sequence[str]:
        """Return the texts of a small constant; none if it is something else."""
        tensor = self.initializers.get(name)
        node = self.makers.get(name)
        if node is not None and node.op_type == "Constant":
            given = node.attribute("value_strings") or [node.attribute("value_string")]
            if texts := [text.decode(errors="replace") for text in given if isinstance(text, bytes)]:
                return texts
            tensor = node.attribute("value")
        return tensor.texts if isinstance(tensor, Tensor) and math.prod(tensor.dims) <= 64 else ()

    def number(self, name: str) -> float | None:
        """Return the largest value of a small numeric constant; None if it is not one."""
        value = self.constant(name)
        if value is None or value.dtype.kind not in "fiu" or not value.size:
            return None
        return float(value.max())

    def shape(self, name: str) -> Sequence[int | None]:
        """Return the known part of a tensor's shape: of weights, including quantised ones."""
        orders: list[Sequence[int] | None] = []
        shape: Sequence[int | None] = []
        for _ in range(_MOST_STEPS):
            node = self.makers.get(name)
            if name in self.initializers:
                shape = self.initializers[name].dims
            elif node is None or node.op_type not in {"Cast", "Constant", "DequantizeLinear", "Identity", "Transpose"}:
                shape = self._declared[name].shape if name in self._declared else []
            elif node.op_type == "Constant":
                value = node.attribute("value")
                shape = value.dims if isinstance(value, Tensor) else []
            else:
                if node.op_type == "Transpose":
                    orders.append(node.attribute("perm"))
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
    def _declared(self) -> Mapping[str, ValueInfo]:
        return {value.name: value for value in (*self.graph.inputs, *self.graph.values)}


def _graphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.nodes:
        for inner in node.graphs:
            yield from _graphs(inner)
