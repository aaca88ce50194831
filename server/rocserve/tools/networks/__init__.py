"""Builds the networks that `rocserve get` makes itself, from published weights without a model or from seeded random
ones."""

from __future__ import annotations

from pathlib import Path

UNTRAINED = "rocserve untrained"
"""Producer name in an untrained model's file."""

_HEAD_BYTES = 256
"""Bytes to search for the producer. It is near the beginning, because fields are written in the order of their numbers
and it is the second."""


def is_untrained(model_file: Path) -> bool:
    """Return whether `rocserve get --untrained` wrote the file; False if there is no file. The producer is field 2 of
    an ONNX ModelProto: tag 0x12, the length in one byte, the text."""
    try:
        with model_file.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    text = UNTRAINED.encode()
    return bytes([0x12, len(text)]) + text in head
