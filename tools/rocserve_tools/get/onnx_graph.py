"""Builds ONNX graphs node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

Floats = NDArray[np.float32]

IR_VERSION = 7
"""Version of ONNX 1.7, with which the published files were made. Every later runtime reads it."""


@dataclass(slots=True)
class Graph:
    """Collects nodes in execution order, and weights, for a model file. Tensors are identified by name."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def add_input(self, name: str, shape: Sequence[int | str]) -> str:
        """Add an FP32 input. A str in the shape names a size that each request chooses."""
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))
        return name

    def add_output(self, name: str, shape: Sequence[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def add_constant(self, name: str, values: Floats | NDArray[np.int64]) -> str:
        datatype = helper.np_dtype_to_tensor_dtype(values.dtype)
        self.initializers.append(helper.make_tensor(name, datatype, values.shape, values.tobytes(), raw=True))
        return name

    def add_node(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output

    def add_split(self, tensor: str, axis: int, sizes: Sequence[int], output: str) -> list[str]:
        """Add a node that splits a tensor along an axis, in the form of opsets up to 12."""
        outputs = [f"{output}_{place}" for place in range(len(sizes))]
        self.nodes.append(helper.make_node("Split", [tensor], outputs, name=output, axis=axis, split=list(sizes)))
        return outputs

    def model(self, name: str, opset: int, producer: str, note: str) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", opset)]
        return helper.make_model(
            graph, ir_version=IR_VERSION, opset_imports=opsets, producer_name=producer, doc_string=note
        )
