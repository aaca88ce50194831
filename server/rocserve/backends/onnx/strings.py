"""Converts BYTES elements to text and back, because ONNX Runtime takes strings from Python only as text.

A byte that is not UTF-8 becomes a stand-in: a character of the last private-use plane, which the model sees. The
stand-ins' own UTF-8 bytes are converted the same way, so the round trip is exact. PEP 383 does the same with
surrogates, which ONNX Runtime refuses.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_FIRST_STAND_IN = 0x10F780
_STAND_INS = re.compile(f"[{chr(_FIRST_STAND_IN)}-{chr(_FIRST_STAND_IN + 0x7F)}]")
_TO_STAND_INS = {0xDC80 + byte: _FIRST_STAND_IN + byte for byte in range(0x80)}
_TO_SURROGATES = {stand_in: surrogate for surrogate, stand_in in _TO_STAND_INS.items()}


def text_of_bytes(element: bytes) -> str:
    if element.isascii():
        return element.decode()
    text = element.decode(errors="surrogateescape")
    text = _STAND_INS.sub(lambda found: found[0].encode().decode("ascii", "surrogateescape"), text)
    return text.translate(_TO_STAND_INS)


def bytes_of_text(text: str) -> bytes:
    return text.encode() if text.isascii() else text.translate(_TO_SURROGATES).encode(errors="surrogateescape")


def text_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert an array of bytes objects for ONNX Runtime."""
    texts = np.empty(array.shape, np.object_)
    texts.flat[:] = [text_of_bytes(element) for element in array.flat]
    return texts


def bytes_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert ONNX Runtime's text output to an array of bytes objects."""
    elements = np.empty(array.shape, np.object_)
    elements.flat[:] = [bytes_of_text(text) for text in array.flat]
    return elements
