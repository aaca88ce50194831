"""Small ONNX networks that MIGraphX compiles, and its reference target runs, in milliseconds. `batch` is the first
dimension of each input and output: a name (symbolic) or a number (fixed in the file). Weights are seeded, so a network
always gives the same file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Batch = int | str
Array = np.ndarray[Any, Any]

_OPSET_VERSION = 17
_IR_VERSION = 8

LABELS = 10
"""Columns of the outputs of `mini_resnet` and `mlp`."""
IMAGE_SHAPE = (3, 8, 8)
"""Channels, height and width of `mini_resnet`'s images."""
MLP_WIDTH = 16
"""Columns of `mlp`'s input."""


def mini_resnet(batch: Batch = "batch") -> bytes:
    """`image` FP32 [batch, 3, 8, 8] -> `logits` FP32 [batch, 10]: convolutions, a shortcut, pooling, a Gemm."""
    network = _Network(seed=1)
    stem = network.relu(network.convolution("image", 3, 8))
    branch = network.convolution(network.relu(network.convolution(stem, 8, 8)), 8, 8)
    joined = network.relu(network.node("Add", branch, stem))
    halved = network.relu(network.convolution(joined, 8, 16, stride=2))
    pooled = network.node("Flatten", network.node("GlobalAveragePool", halved), axis=1)
    network.linear(pooled, 16, LABELS, output="logits")
    return network.model({"image": (batch, *IMAGE_SHAPE)}, {"logits": (batch, LABELS)})


def mlp(batch: Batch = "batch") -> bytes:
    """`x` FP32 [batch, 16] -> `scores` FP32 [batch, 10], rows that sum to 1."""
    network = _Network(seed=2)
    hidden = network.relu(network.linear("x", MLP_WIDTH, 32))
    network.node("Softmax", network.linear(hidden, 32, LABELS), output="scores", axis=-1)
    return network.model({"x": (batch, MLP_WIDTH)}, {"scores": (batch, LABELS)})


def two_in_two_out(batch: Batch = "batch") -> bytes:
    """`left` and `right` FP32 [batch, 4] -> `difference` FP32 [batch, 4], `product` FP32 [batch, 6].

    Neither the inputs nor the outputs are in the alphabetical order of their operators.
    """
    network = _Network(seed=3)
    network.node("Sub", "left", "right", output="difference")
    network.linear(network.node("Mul", "right", "left"), 4, 6, output="product")
    return network.model({"left": (batch, 4), "right": (batch, 4)}, {"difference": (batch, 4), "product": (batch, 6)})


def reshaped_to_constant(batch: int = 1) -> bytes:
    """`x` FP32 [batch, 2, 3] -> `y` FP32 [batch, 6] by a Reshape that names the batch: the network is wrong at any
    other size."""
    return _reshaping(batch, (batch, 6))


def reshaped_to_free(batch: int = 1) -> bytes:
    """`reshaped_to_constant` with a Reshape that leaves the batch open (-1): the network works at any size."""
    return _reshaping(batch, (-1, 6))


def mixing_rows(batch: int = 1) -> bytes:
    """`x` FP32 [batch, 4] -> `y` FP32 [batch, 4], less the largest value of the whole batch: each row depends on the
    others."""
    network = _Network(seed=4)
    network.node("Sub", "x", network.node("ReduceMax", "x", axes=[0], keepdims=1), output="y")
    return network.model({"x": (batch, 4)}, {"y": (batch, 4)})


def identity(element_type: int = TensorProto.FLOAT, shape: Sequence[Batch] = ("batch", 4)) -> bytes:
    """`y` is `x`: MIGraphX's output lies in the memory of its input."""
    network = _Network(seed=5)
    network.node("Identity", "x", output="y")
    return network.model({"x": tuple(shape)}, {"y": tuple(shape)}, element_type)


def any_length(batch: Batch = "batch") -> bytes:
    """`x` FP32 [batch, length] -> `y` FP32 [batch, length], twice x: a second symbolic dimension."""
    network = _Network(seed=6)
    network.node("Add", "x", "x", output="y")
    return network.model({"x": (batch, "length")}, {"y": (batch, "length")})


def mean_of_any_length() -> bytes:
    """`x` FP32 [batch, length] -> `y` FP32 [batch, 1], the mean, which changes when x is padded."""
    network = _Network(seed=6)
    network.node("ReduceMean", "x", output="y", axes=[1])
    return network.model({"x": ("batch", "length")}, {"y": ("batch", 1)})


def without_batch() -> bytes:
    """`x` FP32 [2, 3] -> `y` FP32 [3, 2], transposed: there is no batch dimension."""
    network = _Network(seed=7)
    network.node("Transpose", "x", output="y", perm=[1, 0])
    return network.model({"x": (2, 3)}, {"y": (3, 2)})


def picking() -> bytes:
    """`index` INT64 [batch, 1] -> `y` FP32 [batch, 2], the row with that number: row 0 is 1, 2 and row 1 is 3, 4."""
    network = _Network(seed=10)
    table = network.weights("table", np.array([[1, 2], [3, 4]], np.float32))
    row = network.node("Gather", table, "index", axis=0)
    network.node("Reshape", row, network.integers(-1, 2), output="y")
    inputs, outputs = {"index": ("batch", 1)}, {"y": ("batch", 2)}
    specs = _specs(inputs, TensorProto.INT64), _specs(outputs, TensorProto.FLOAT)
    return _serialised(network.nodes, *specs, network.initializers)


def cutting() -> bytes:
    """`x` [4, 3], `ends` [2], `axes` [1] -> `part`, x cut at the ends, and `sums` along the axes; all INT64. Values
    decide the outputs' shapes."""
    network = _Network(seed=11)
    network.node("Slice", "x", network.integers(0, 0), "ends", output="part")
    network.node("ReduceSum", "x", "axes", output="sums")
    inputs: dict[str, tuple[Batch, ...]] = {"x": (4, 3), "ends": (2,), "axes": (1,)}
    return network.model(inputs, {"part": ("m", "n"), "sums": ("rows", "columns")}, TensorProto.INT64)


def cutting_rows() -> bytes:
    """`x` INT64 [batch, 4] -> `y` INT64 [batch, n] with n the largest value of x."""
    network = _Network(seed=12)
    largest = network.node("Reshape", network.node("ReduceMax", "x", axes=[0, 1]), network.integers(1))
    network.node("Slice", "x", network.integers(0), largest, network.integers(1), output="y")
    return network.model({"x": ("batch", 4)}, {"y": ("batch", "columns")}, TensorProto.INT64)


def slow_to_compile(from_batch: int = 1) -> bytes:
    """`x` FP32 [batch, 4] -> `y`, the same. At a batch of `from_batch` or more it takes minutes to compile, below it
    does not: the number of times that x is repeated (once) is a product of matrices, which MIGraphX has to compute
    before there is a program, and their size depends on the batch. It wants to be loaded without a check, whose runs on
    ONNX Runtime take seconds each."""
    network = _Network(seed=9)
    batch = network.node("Slice", network.node("Shape", "x"), *(network.integers(value) for value in (0, 1)))
    larger = network.node("Mul", network.node("Sub", batch, network.integers(from_batch - 1)), network.integers(1000))
    size = network.node("Add", larger, network.integers(2))
    one = numpy_helper.from_array(np.array([1], np.float32))
    product = matrix = network.node("ConstantOfShape", network.node("Concat", size, size, axis=0), value=one)
    for _ in range(50):
        product = network.node("MatMul", product, matrix)
    largest = network.node("ReduceMax", product, axes=[0, 1], keepdims=1)
    count = network.node("Cast", network.node("Reshape", largest, network.integers(1)), to=TensorProto.INT64)
    once = network.node("Min", count, network.integers(1))
    network.node("Tile", "x", network.node("Concat", once, once, axis=0), output="y")
    return network.model({"x": ("batch", 4)}, {"y": ("batch", 4)})


def unknown_operator(name: str = "MyFancyOp") -> bytes:
    """`x` FP32 [batch, 4] -> `y` by an operator that neither MIGraphX nor ONNX Runtime has."""
    node = helper.make_node(name, ["x"], ["y"], domain="com.example")
    spec = (TensorProto.FLOAT, ["batch", 4])
    return _serialised([node], {"x": spec}, {"y": spec}, [], "com.example")


def shapes_at(model: bytes, batch: int) -> dict[str, tuple[int, ...]]:
    """Return the inputs' shapes with this number for each symbolic dimension; empty for 1, which MIGraphX takes."""
    if batch == 1:
        return {}
    inputs = onnx.load_from_string(model).graph.input
    return {one.name: tuple(dim.dim_value or batch for dim in one.type.tensor_type.shape.dim) for one in inputs}


def random_inputs(model: bytes, rows: int, seed: int = 0) -> dict[str, Array]:
    """Random FP32 inputs for a network of this file, between -1 and 1. `rows` takes the place of the batch."""
    generator = np.random.default_rng(seed)
    return {
        entry.name: generator.uniform(
            -1, 1, (rows, *(dim.dim_value for dim in entry.type.tensor_type.shape.dim[1:]))
        ).astype(np.float32)
        for entry in onnx.load_from_string(model).graph.input
    }


def _reshaping(batch: int, shape: Sequence[int]) -> bytes:
    network = _Network(seed=8)
    network.node("Reshape", network.node("Mul", "x", "x"), network.integers(*shape), output="y")
    return network.model({"x": (batch, 2, 3)}, {"y": (batch, 6)})


@dataclass(slots=True)
class _Network:
    """A graph under construction. Each method returns the name of the tensor that it adds."""

    seed: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def weights(self, name: str, values: Array) -> str:
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def integers(self, *values: int) -> str:
        return self.weights(f"integers_{len(self.initializers)}", np.array(values, np.int64))

    def relu(self, source: str) -> str:
        return self.node("Relu", source)

    def convolution(self, source: str, channels: int, filters: int, stride: int = 1) -> str:
        weights = self._random("weights", (filters, channels, 3, 3), channels * 9)
        bias = self._random("bias", (filters,), filters)
        return self.node("Conv", source, weights, bias, pads=[1, 1, 1, 1], strides=[stride, stride])

    def linear(self, source: str, columns: int, outputs: int, output: str = "") -> str:
        weights = self._random("weights", (columns, outputs), columns)
        return self.node("Gemm", source, weights, self._random("bias", (outputs,), outputs), output=output)

    def model(
        self, inputs: dict[str, tuple[Batch, ...]], outputs: dict[str, tuple[Batch, ...]], element_type: int = 1
    ) -> bytes:
        return _serialised(self.nodes, _specs(inputs, element_type), _specs(outputs, element_type), self.initializers)

    def _random(self, name: str, shape: tuple[int, ...], fan_in: int) -> str:
        generator = np.random.default_rng((self.seed, len(self.initializers)))
        values = generator.standard_normal(shape) / np.sqrt(fan_in)
        return self.weights(f"{name}_{len(self.initializers)}", values.astype(np.float32))


def quantised() -> bytes:
    """`x` FP32 [batch, 3] -> `y` FP32 [batch, 2]: a product with integer weights, with their scales (QDQ)."""
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [0.02]),
        helper.make_tensor("zero", TensorProto.INT8, [], [0]),
        helper.make_tensor("w", TensorProto.INT8, [3, 2], [10, -20, 30, 40, -50, 60]),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["dw"]),
        helper.make_node("MatMul", ["d", "dw"], ["y"]),
    ]
    inputs, outputs = (_specs({name: ("batch", width)}, TensorProto.FLOAT) for name, width in (("x", 3), ("y", 2)))
    return _serialised(nodes, inputs, outputs, constants)


_Specs = dict[str, tuple[int, Sequence[Batch]]]


def _specs(shapes: dict[str, tuple[Batch, ...]], element_type: int) -> _Specs:
    return {name: (element_type, shape) for name, shape in shapes.items()}


def _serialised(
    nodes: list[onnx.NodeProto], inputs: _Specs, outputs: _Specs, initializers: list[onnx.TensorProto], *domains: str
) -> bytes:
    model = helper.make_model(
        helper.make_graph(nodes, "network", _value_infos(inputs), _value_infos(outputs), initializers),
        opset_imports=[helper.make_opsetid("", _OPSET_VERSION), *(helper.make_opsetid(name, 1) for name in domains)],
        ir_version=_IR_VERSION,
    )
    if not domains:
        onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def _value_infos(specs: _Specs) -> Iterable[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, kind, list(shape)) for name, (kind, shape) in specs.items()]
