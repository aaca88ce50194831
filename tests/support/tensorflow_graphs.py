"""Frozen TensorFlow graphs, written without TensorFlow: GraphDef is a small protobuf message.

A node is written by its fields; names and numbers of the fields are those of tensorflow/core/framework/*.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_FLOAT, _INT32 = 1, 3
_VARINT, _LENGTH = 0, 2


def small_network(batch: int = -1) -> bytes:
    """`image` FP32 [batch, 4, 4, 3] (NHWC) -> `probabilities` [batch, 5]: a convolution, a mean, a matrix, Softmax."""
    generator = np.random.default_rng(9)

    def weights(*shape: int) -> Array:
        return generator.standard_normal(shape).astype(np.float32)

    return graph(
        placeholder("image", (batch, 4, 4, 3)),
        constant("filters", weights(3, 3, 3, 6)),
        node(
            "convolution",
            "Conv2D",
            ["image", "filters"],
            T=type_attribute(_FLOAT),
            strides=list_attribute([1, 1, 1, 1]),
            dilations=list_attribute([1, 1, 1, 1]),
            padding=text_attribute("SAME"),
            data_format=text_attribute("NHWC"),
        ),
        constant("bias", weights(6)),
        node(
            "biased",
            "BiasAdd",
            ["convolution", "bias"],
            T=type_attribute(_FLOAT),
            data_format=text_attribute("NHWC"),
        ),
        node("relu", "Relu", ["biased"], T=type_attribute(_FLOAT)),
        constant("axes", np.array([1, 2], np.int32)),
        node("pooled", "Mean", ["relu", "axes"], T=type_attribute(_FLOAT), keep_dims=bool_attribute(False)),
        constant("matrix", weights(6, 5)),
        node("logits", "MatMul", ["pooled", "matrix"], T=type_attribute(_FLOAT)),
        node("probabilities", "Softmax", ["logits"], T=type_attribute(_FLOAT)),
    )


def small_network_result(image: Array) -> Array:
    """What `small_network` gives, by numpy."""
    generator = np.random.default_rng(9)
    filters = generator.standard_normal((3, 3, 3, 6)).astype(np.float32)
    bias = generator.standard_normal(6).astype(np.float32)
    matrix = generator.standard_normal((6, 5)).astype(np.float32)
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = image.shape[1:3]
    convolved = sum(
        padded[:, row : row + height, column : column + width] @ filters[row, column]
        for row in range(3)
        for column in range(3)
    )
    logits = np.maximum(convolved + bias, 0).mean(axis=(1, 2)) @ matrix
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Array = powers / powers.sum(axis=1, keepdims=True)
    return result


def graph(*nodes: bytes) -> bytes:
    return b"".join(_message(1, node) for node in nodes)


def node(name: str, operation: str, inputs: Sequence[str] = (), **attributes: bytes) -> bytes:
    fields = _message(1, name.encode()) + _message(2, operation.encode())
    fields += b"".join(_message(3, source.encode()) for source in inputs)
    for key, value in attributes.items():
        fields += _message(5, _message(1, key.encode()) + _message(2, value))
    return fields


def placeholder(name: str, shape: Sequence[int]) -> bytes:
    """-1: a dimension that varies."""
    return node(name, "Placeholder", dtype=type_attribute(_FLOAT), shape=_message(7, _shape(shape)))


def constant(name: str, values: Array) -> bytes:
    kind = {np.dtype(np.float32): _FLOAT, np.dtype(np.int32): _INT32}[values.dtype]
    tensor = _number(1, kind) + _message(2, _shape(values.shape)) + _message(4, values.tobytes())
    return node(name, "Const", dtype=type_attribute(kind), value=_message(8, tensor))


def type_attribute(kind: int) -> bytes:
    return _number(6, kind)


def text_attribute(text: str) -> bytes:
    return _message(2, text.encode())


def bool_attribute(value: bool) -> bytes:
    return _number(5, int(value))


def list_attribute(numbers: Sequence[int]) -> bytes:
    return _message(1, b"".join(_number(3, number) for number in numbers))


def _shape(sizes: Sequence[int]) -> bytes:
    return b"".join(_message(2, _number(1, size)) for size in sizes)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value & (1 << 64) - 1)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
