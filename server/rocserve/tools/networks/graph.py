"""An ONNX graph under construction: nodes in the order of their work, tensors known by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from rocserve.tools.networks import UNTRAINED

IR_VERSION = 7
"""Of ONNX 1.7, in whose time the published files were made; every later runtime reads it."""

Dimension = int | str
"""A number, or the name of a size that each request chooses."""


@dataclass(slots=True)
class Graph:
    """Collects nodes and weights; `model` makes the file's contents of them."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def add_input(self, name: str, shape: Sequence[Dimension]) -> str:
        """An FP32 input."""
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))
        return name

    def add_output(self, name: str, shape: Sequence[Dimension] | None = None) -> None:
        """Hand out an FP32 tensor; without a shape, whatever it has."""
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None if shape is None else shape))

    def add_constant(self, name: str, values: NDArray[np.float32] | NDArray[np.int64]) -> str:
        """Weights, or a tensor that steers a node."""
        datatype = helper.np_dtype_to_tensor_dtype(values.dtype)
        self.initializers.append(helper.make_tensor(name, datatype, values.shape, values.tobytes(), raw=True))
        return name

    def add_node(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """A node with one output, whose name is returned."""
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output

    def add_split(self, tensor: str, axis: int, sizes: Sequence[int], output: str) -> list[str]:
        """Cut a tensor along an axis, as operator sets up to 12 write it."""
        outputs = [f"{output}_{place}" for place in range(len(sizes))]
        self.nodes.append(helper.make_node("Split", [tensor], outputs, name=output, axis=axis, split=list(sizes)))
        return outputs

    def model(self, name: str, opset: int, producer: str, note: str) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", opset)]
        return helper.make_model(
            graph, ir_version=IR_VERSION, opset_imports=opsets, producer_name=producer, doc_string=note
        )

    def untrained_model(self, name: str, opset: int) -> onnx.ModelProto:
        """The model, which says of itself that it is untrained."""
        note = f"{name} with seeded random weights: its speed and shapes are real, its answers mean nothing"
        return self.model(name, opset, UNTRAINED, note)
