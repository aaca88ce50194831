"""Writes frozen TensorFlow graphs (GraphDef) without TensorFlow, and a few small networks with the values that they
compute. The field numbers are those of TensorFlow's graph.proto, node_def.proto, attr_value.proto, tensor.proto and
tensor_shape.proto."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Attribute = bool | int | float | str | Sequence[int] | np.dtype[Any] | type[np.generic]

_TYPES = {
    "float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "int64": 9, "bool": 10, "uint16": 17,
    "float16": 19, "uint32": 22, "uint64": 23,
}  # fmt: skip
STRING = 7
"""TensorFlow's number of the string type, which numpy cannot name."""


class GraphDef:
    """Builds a graph node by node. Each method returns the name of the node that it adds."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []

    def placeholder(self, name: str, shape: Sequence[int] | None, dtype: Any = np.float32) -> str:
        """Add a placeholder. `shape` may hold -1; None = unknown rank."""
        attributes = {"dtype": _type_attribute(dtype), "shape": _length(7, _shape(shape))}
        return self._add(name, "Placeholder", (), attributes)

    def constant(self, name: str, array: Any) -> str:
        array = np.asarray(array)
        number = _TYPES[array.dtype.name]
        tensor = _number(1, number) + _length(2, _shape(array.shape)) + _length(4, array.tobytes())
        return self._add(name, "Const", (), {"dtype": _number(6, number), "value": _length(8, tensor)})

    def node(self, operator: str, name: str, *inputs: str, **attributes: Attribute) -> str:
        """Add a node with the type attribute `T`, by default FP32."""
        given: dict[str, Attribute] = {"T": np.float32, **attributes}
        return self._add(name, operator, inputs, {key: _attribute(value) for key, value in given.items()})

    def serialized(self) -> bytes:
        versions = _length(4, _number(1, 1087))
        return b"".join(_length(1, node) for node in self._nodes) + versions

    def _add(self, name: str, operator: str, inputs: Sequence[str], attributes: dict[str, bytes]) -> str:
        node = _length(1, name.encode()) + _length(2, operator.encode())
        node += b"".join(_length(3, one.encode()) for one in inputs)
        for key, value in attributes.items():
            node += _length(5, _length(1, key.encode()) + _length(2, value))
        self._nodes.append(node)
        return name


def classifier(batch: int = -1) -> bytes:
    """`image` FP32 [batch, 8, 8, 3] -> `scores` FP32 [batch, 5]: convolution, pooling, a dense layer, softmax."""
    kernel, kernel_bias, dense, dense_bias = _classifier_weights()
    graph = GraphDef()
    image = graph.placeholder("image", [batch, 8, 8, 3])
    weights = graph.constant("kernel", kernel)
    strides = [1, 1, 1, 1]
    found = graph.node("Conv2D", "convolution", image, weights, strides=strides, padding="SAME", data_format="NHWC")
    biased = graph.node("BiasAdd", "biased", found, graph.constant("kernel_bias", kernel_bias), data_format="NHWC")
    halving = [1, 2, 2, 1]
    pooled = graph.node(
        "MaxPool", "pooled", graph.node("Relu", "relu", biased), ksize=halving, strides=halving, padding="VALID",
        data_format="NHWC",
    )  # fmt: skip
    flat = graph.node("Reshape", "flat", pooled, graph.constant("flat_shape", np.array([-1, 64], np.int32)))
    product = graph.node(
        "MatMul", "product", flat, graph.constant("dense", dense), transpose_a=False, transpose_b=False
    )
    graph.node("Softmax", "scores", graph.node("BiasAdd", "logits", product, graph.constant("dense_bias", dense_bias)))
    return graph.serialized()


def classified(images: Array) -> Array:
    """Compute what `classifier` computes."""
    kernel, kernel_bias, dense, dense_bias = _classifier_weights()
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    found = np.maximum(np.einsum("nhwcij,ijco->nhwo", windows, kernel) + kernel_bias, 0)
    pooled = found.reshape(len(images), 4, 2, 4, 2, 4).max((2, 4))
    logits = pooled.reshape(len(images), 64) @ dense + dense_bias
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True), np.float32)


def brightening(batch: int = -1) -> bytes:
    """`picture` FP32 [batch, 4, 6, 2] and `bias` FP32 [batch, 2] -> `brighter`, in the picture's shape, and `doubled`
    FP32 [batch, 2]: one output is an image, one input is not."""
    graph = GraphDef()
    picture = graph.placeholder("picture", [batch, 4, 6, 2])
    bias = graph.placeholder("bias", [batch, 2])
    graph.node("BiasAdd", "brighter", picture, graph.constant("by", np.array([1, 10], np.float32)), data_format="NHWC")
    graph.node("Add", "doubled", bias, bias)
    return graph.serialized()


def brightened(picture: Array, bias: Array) -> tuple[Array, Array]:
    """Compute what `brightening` computes."""
    return picture + np.array([1, 10], np.float32), bias + bias


def _classifier_weights() -> tuple[Array, Array, Array, Array]:
    """The weights: kernel [height, width, in, out] in TensorFlow's layout, its bias, dense [in, out], its bias."""
    generator = np.random.default_rng(5)
    shapes = ((3, 3, 3, 4), (4,), (64, 5), (5,))
    kernel, kernel_bias, dense, dense_bias = (generator.normal(0, 0.5, shape).astype(np.float32) for shape in shapes)
    return kernel, kernel_bias, dense, dense_bias


def _attribute(value: Attribute) -> bytes:
    if isinstance(value, bool):
        return _number(5, int(value))
    if isinstance(value, int):
        return _number(3, value)
    if isinstance(value, float):
        return _key(4, 5) + struct.pack("<f", value)
    if isinstance(value, str):
        return _length(2, value.encode())
    if isinstance(value, Sequence):
        return _length(1, _length(3, b"".join(_varint(one) for one in value)))
    return _type_attribute(value)


def _type_attribute(dtype: Any) -> bytes:
    return _number(6, dtype if isinstance(dtype, int) else _TYPES[np.dtype(dtype).name])


def _shape(shape: Sequence[int] | None) -> bytes:
    if shape is None:
        return _number(3, 1)
    return b"".join(_length(2, _number(1, size)) for size in shape)


def _number(field: int, value: int) -> bytes:
    return _key(field, 0) + _varint(value)


def _length(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
