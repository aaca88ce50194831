"""A model of two operators, written byte by byte: a doctor must not need what it looks for.

relu(x + w) on [2, 4] floats, as ONNX's protobuf messages (onnx/onnx.proto of the ONNX project has the numbers).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from rocserve.core.wire_format import VARINT, length_prefix, varint

SHAPE = (2, 4)
WEIGHTS = (-1.0, -0.5, 0.5, 1.0)

_FLOAT = 1
_IR_VERSION, _OPSET = 8, 13


def tiny_onnx() -> bytes:
    """The file's bytes: input "x", output "y"."""
    nodes = _node("Add", ("x", "w"), "s") + _node("Relu", ("s",), "y")
    weights = b"".join(
        (
            _number(1, len(WEIGHTS)),
            _number(2, _FLOAT),
            _text(8, "w"),
            _message(9, struct.pack(f"<{len(WEIGHTS)}f", *WEIGHTS)),
        )
    )
    graph = nodes + _text(2, "tiny") + _message(5, weights) + _message(11, _tensor("x")) + _message(12, _tensor("y"))
    return _number(1, _IR_VERSION) + _message(7, graph) + _message(8, _number(2, _OPSET))


def expected(values: Sequence[float]) -> list[float]:
    """What the model makes of the eight values."""
    return [max(0.0, value + WEIGHTS[place % len(WEIGHTS)]) for place, value in enumerate(values)]


def _node(operator: str, inputs: Sequence[str], output: str) -> bytes:
    return _message(1, b"".join(_text(1, name) for name in inputs) + _text(2, output) + _text(4, operator))


def _tensor(name: str) -> bytes:
    dimensions = b"".join(_message(1, _number(1, size)) for size in SHAPE)
    return _text(1, name) + _message(2, _message(1, _number(1, _FLOAT) + _message(2, dimensions)))


def _number(field: int, value: int) -> bytes:
    return varint(field << 3 | VARINT) + varint(value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, content: bytes) -> bytes:
    return length_prefix(field, len(content)) + content
