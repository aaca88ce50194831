"""EXIF's orientation: how a picture is to be turned to be seen upright.

The tag is in the first directory of a TIFF structure (TIFF 6.0, section 2; EXIF 2.3, section 4.6.4). A structure
that cannot be read says nothing, as in every viewer: its picture is shown as it is.
"""

from __future__ import annotations

import struct
from typing import Any

import cv2
import numpy as np

from rocserve.backends.rocal.decoding.header import NOT_TURNED
from rocserve.backends.rocal.image import with_channels

_SEGMENT_NAME = b"Exif\0\0"
_ORIENTATION_TAG = 0x0112
_SHORT = 3
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}

_FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
"""OpenCV's codes of the flips, once the sides are exchanged where they must be: 0 = about the horizontal axis,
1 = about the vertical one, -1 = about both."""


def orientation_in_segment(body: memoryview) -> int | None:
    """Of a JPEG's APP1 segment; None where it is not EXIF's (XMP uses APP1 as well)."""
    if bytes(body[: len(_SEGMENT_NAME)]) != _SEGMENT_NAME:
        return None
    return orientation_in_structure(body[len(_SEGMENT_NAME) :])


def orientation_in_structure(data: memoryview) -> int:
    """From 1 to 8; 1 = as it is stored."""
    order = _BYTE_ORDERS.get(bytes(data[:4]))
    if order is None:
        return NOT_TURNED
    try:
        (start,) = struct.unpack_from(order + "I", data, 4)
        (count,) = struct.unpack_from(order + "H", data, start)
        for index in range(count):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", data, start + 2 + 12 * index)
            if tag == _ORIENTATION_TAG:
                return value if kind == _SHORT and 1 <= value <= 8 else NOT_TURNED
    except struct.error:
        pass  # It ends too early.
    return NOT_TURNED


def swaps_sides(orientation: int) -> bool:
    """Whether the upright picture's width is the stored one's height."""
    return orientation >= 5


def turned(pixels: np.ndarray[Any, Any], orientation: int) -> np.ndarray[Any, Any]:
    """The upright picture, height x width x channels."""
    upright = cv2.transpose(pixels) if swaps_sides(orientation) else pixels
    if orientation in _FLIPS:
        upright = cv2.flip(upright, _FLIPS[orientation])
    return with_channels(upright)
