"""Strings of ONNX Runtime, which from Python are text: bytes that are no UTF-8 go in and come back as stand-ins.

Each such byte is a character of the last plane for private use, where a model sees it; so that what comes back is what
went in, those characters themselves stand for their bytes. The way of PEP 383, whose surrogates ONNX Runtime refuses.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_FIRST_STAND_IN = 0x10F780
"""For the byte 0x80."""
_FIRST_SURROGATE = 0xDC80
_STAND_INS = re.compile(f"[{chr(_FIRST_STAND_IN)}-{chr(_FIRST_STAND_IN + 0x7F)}]")
_TO_STAND_INS = {_FIRST_SURROGATE + byte: _FIRST_STAND_IN + byte for byte in range(0x80)}
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
    """What ONNX Runtime takes for an array of bytes objects."""
    texts = np.empty(array.shape, np.object_)
    texts.flat[:] = [text_of_bytes(element) for element in array.flat]
    return texts


def bytes_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What ONNX Runtime has made, as an array of bytes objects."""
    elements = np.empty(array.shape, np.object_)
    elements.flat[:] = [bytes_of_text(text) for text in array.flat]
    return elements
