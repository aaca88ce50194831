"""The networks that `rocserve get` makes itself: of published weights that are no model, or of seeded ones."""

from __future__ import annotations

from pathlib import Path

UNTRAINED = "rocserve untrained"
"""What an untrained model's file names as its producer."""

_HEAD_BYTES = 256
"""The producer is at the beginning: fields are written in the order of their numbers, and it is the second."""


def is_untrained(model_file: Path) -> bool:
    """Whether `rocserve get --untrained` wrote the file; False where there is none. The producer is field 2 of an ONNX
    ModelProto: tag 0x12, its length in a byte, its text."""
    try:
        with model_file.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    text = UNTRAINED.encode()
    return bytes([0x12, len(text)]) + text in head
