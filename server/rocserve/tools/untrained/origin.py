"""Tells a model file with untrained weights from others, without reading its weights."""

from __future__ import annotations

from pathlib import Path

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
