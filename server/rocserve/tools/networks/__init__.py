"""Builds networks for `rocserve get`, from published weights without a model or from seeded random ones."""

from __future__ import annotations

from pathlib import Path

UNTRAINED = "rocserve untrained"

_HEAD_BYTES = 256
"""Bytes read from a file's beginning: fields are written in the order of their numbers, and the producer is field 2."""


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
