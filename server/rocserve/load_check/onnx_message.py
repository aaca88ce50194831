"""The parts of an ONNX file's messages that the load check reads. Package onnx is not used, because importing it
takes longer than loading a small model. Weights are not copied: those of a mapped file, which may be
gigabytes, stay on the disk. The field numbers are those of onnx.proto."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rocserve.core.wire_format import Buffer, WireMessage, field_spans
from rocserve.load_check.tensors import Array

_MODEL_GRAPH, _MODEL_FUNCTION, _FUNCTION_NODE = 7, 25, 7
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_VALUE = 1, 5, 11, 12, 13
_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 2, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_TYPE = 1, 20
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_INTEGERS, _TENSOR_TEXTS, _TENSOR_NAME, _TENSOR_BYTES = 1, 2, 5, 6, 8, 9
_TENSOR_LOCATION = 14
_VALUE_NAME, _VALUE_TYPE, _TYPE_TENSOR, _TENSOR_ELEMENT, _TENSOR_SHAPE = 1, 2, 1, 1, 2
_SHAPE_DIM, _DIM_SIZE = 1, 1


class ElementType(enum.IntEnum):
    """TensorProto.DataType: the types that the load check distinguishes."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    BFLOAT16 = 16


class _Content(enum.IntEnum):
    """The fields with an attribute's value. The number of its type is one less."""

    FLOAT = 2
    INTEGER = 3
    TEXT = 4
    TENSOR = 5
    GRAPH = 6
    FLOATS = 7
    INTEGERS = 8
    TEXTS = 9
    TENSORS = 10
    GRAPHS = 11


_STORED: Mapping[int, tuple[str, int]] = {
    1: ("<f4", 4),
    2: ("u1", _TENSOR_INTEGERS),
    3: ("i1", _TENSOR_INTEGERS),
    4: ("<u2", _TENSOR_INTEGERS),
    5: ("<i2", _TENSOR_INTEGERS),
    6: ("<i4", _TENSOR_INTEGERS),
    7: ("<i8", 7),
    9: ("?", _TENSOR_INTEGERS),
    10: ("<f2", _TENSOR_INTEGERS),
    11: ("<f8", 10),
    12: ("<u4", 11),
    13: ("<u8", 11),
}
"""Element type -> numpy's type, and the field for values that are not stored as bytes."""


class Tensor:
    def __init__(self, message: Buffer) -> None:
        self._fields = WireMessage(message)
        self.name = _text(self._fields.message(_TENSOR_NAME))
        self.element_type = self._fields.number(_TENSOR_TYPE)
        self.dims = self._fields.signed(_TENSOR_DIMS)

    @property
    def texts(self) -> Sequence[str]:
        """The values of a tensor of texts."""
        return [_text(part) for part in self._fields.parts(_TENSOR_TEXTS)]

    def values(self, most: int) -> Array | None:
        """Return the values; None if they are more than `most`, in another file, texts, or of a type that numpy
        lacks."""
        # 1 is EXTERNAL in onnx.proto.
        is_external = self._fields.number(_TENSOR_LOCATION) == 1
        if is_external or self.element_type not in _STORED or math.prod(self.dims) > most:
            return None
        dtype, place = _STORED[self.element_type]
        if self._fields.values[_TENSOR_BYTES]:
            values = np.frombuffer(self._fields.parts(_TENSOR_BYTES)[-1], dtype)
        elif np.dtype(dtype).kind == "f" and place != _TENSOR_INTEGERS:
            values = np.frombuffer(b"".join(self._fields.parts(place)), dtype)
        else:
            numbers = np.array(self._fields.signed(place), np.int64)
            # Half precision is stored as its bits.
            values = numbers.astype(np.uint16).view(dtype) if dtype == "<f2" else numbers.astype(dtype)
        return values.reshape(self.dims)


class Node:
    def __init__(self, message: Buffer) -> None:
        fields = WireMessage(message)
        self.op_type = _text(fields.message(_NODE_OPERATOR))
        self.domain = _text(fields.message(_NODE_DOMAIN))
        self.input = [_text(part) for part in fields.parts(_NODE_INPUT)]
        self.output = [_text(part) for part in fields.parts(_NODE_OUTPUT)]
        self._attributes: dict[str, Buffer] = {}
        self.graphs: list[Graph] = []
        """The subgraphs."""
        for part in fields.parts(_NODE_ATTRIBUTE):
            name, content = _name_and_content(part)
            self._attributes[name] = part
            if content in (_Content.GRAPH, _Content.GRAPHS):
                self.graphs += map(Graph, WireMessage(part).parts(content))

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute's value: a number, the bytes of a text, a Tensor, or several numbers or texts."""
        part = self._attributes.get(name)
        # A forest has millions of values, and reading them from bytes is several times faster than from a view.
        return default if part is None else _value(WireMessage(bytes(part)), default)


class ValueInfo:
    """An input, an output, or an inner tensor whose type is declared."""

    def __init__(self, message: Buffer) -> None:
        self._fields = WireMessage(message)
        self.name = _text(self._fields.message(_VALUE_NAME))

    @property
    def element_type(self) -> int:
        """0 if it is not a tensor."""
        return self._tensor.number(_TENSOR_ELEMENT)

    @property
    def shape(self) -> Sequence[int | None]:
        shape = WireMessage(self._tensor.message(_TENSOR_SHAPE))
        sizes = [WireMessage(dim).signed(_DIM_SIZE) for dim in shape.parts(_SHAPE_DIM)]
        return [(size[-1] or None) if size else None for size in sizes]

    @cached_property
    def _tensor(self) -> WireMessage:
        return WireMessage(WireMessage(self._fields.message(_VALUE_TYPE)).message(_TYPE_TENSOR))


class Graph:
    def __init__(self, message: Buffer) -> None:
        self._fields = WireMessage(message)
        self.nodes = [Node(part) for part in self._fields.parts(_GRAPH_NODE)]
        self.initializers = [Tensor(part) for part in self._fields.parts(_GRAPH_INITIALIZER)]
        self.inputs = [ValueInfo(part) for part in self._fields.parts(_GRAPH_INPUT)]
        self.outputs = [ValueInfo(part) for part in self._fields.parts(_GRAPH_OUTPUT)]

    @cached_property
    def values(self) -> Sequence[ValueInfo]:
        """The inner tensors whose types are declared."""
        return [ValueInfo(part) for part in self._fields.parts(_GRAPH_VALUE)]


def graph_of(model: Buffer) -> Graph:
    """Read the graph of a model. Raises WireError if it is damaged."""
    return Graph(WireMessage(model).message(_MODEL_GRAPH))


def function_nodes_of(model: Buffer) -> Sequence[Node]:
    """Return the nodes of the functions that a model defines for its own operators."""
    functions = WireMessage(model).parts(_MODEL_FUNCTION)
    return [Node(part) for function in functions for part in WireMessage(function).parts(_FUNCTION_NODE)]


def _name_and_content(attribute: Buffer) -> tuple[str, int]:
    """Return an attribute's name and the field of its value, without reading the value: it may be a forest."""
    name, content = "", 0
    for tag, _, begin, end, _ in field_spans(attribute):
        number = tag >> 3
        if number == _ATTRIBUTE_NAME:
            name = _text(attribute[begin:end])
        elif number <= _Content.GRAPHS:
            content = number
        if name and content:
            break
    return name, content


def _value(attribute: WireMessage, default: Any) -> Any:
    content = attribute.number(_ATTRIBUTE_TYPE) + 1
    if content == _Content.INTEGER:
        return (attribute.signed(content) or [0])[-1]
    if content == _Content.INTEGERS:
        return attribute.signed(content)
    if content in (_Content.FLOAT, _Content.FLOATS):
        floats = np.frombuffer(b"".join(attribute.parts(content)), "<f4")
        return floats if content == _Content.FLOATS else float(floats[-1]) if floats.size else 0.0
    if content in (_Content.TEXT, _Content.TEXTS):
        texts = [bytes(part) for part in attribute.parts(content)]
        return texts if content == _Content.TEXTS else b"".join(texts[-1:])
    return Tensor(attribute.message(content)) if content == _Content.TENSOR else default


def _text(name: Buffer) -> str:
    """Return a name; protobuf does not require UTF-8."""
    return str(name, "utf-8", "surrogateescape")
