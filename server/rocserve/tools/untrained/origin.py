"""Marks model files with untrained weights, and tells them from others without reading the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto

    from rocserve.tools.onnx_graph import Graph

PRODUCER = "rocserve untrained"
"""What an untrained model's file names as its producer."""

_HEAD_BYTES = 256
"""The producer stands at the beginning: fields are written in the order of their numbers, and it is the second."""


def is_untrained(model_file: Path) -> bool:
    """Whether `rocserve get --untrained` wrote the file. A file that is not there, or is something else, is not one.

    The producer is field 2 of an ONNX ModelProto: tag 0x12, its length in a byte, its text.
    """
    try:
        with model_file.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    text = PRODUCER.encode()
    return bytes([0x12, len(text)]) + text in head


def untrained_model(graph: Graph, name: str, opset: int) -> ModelProto:
    """The model, which says of itself that it is untrained."""
    note = f"{name} with seeded random weights: its speed and shapes are real, its answers mean nothing"
    return graph.model(name, opset, PRODUCER, note)
