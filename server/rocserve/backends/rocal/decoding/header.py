"""An image as a client sent it: its header, read before any pixel, how it is turned, and the error for a bad one.

EXIF's orientation is in the first directory of a TIFF structure (TIFF 6.0, section 2; EXIF 2.3, section 4.6.4). A
structure that cannot be read says nothing, as in every viewer: its picture is shown as it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from rocserve.backends.rocal.image import with_channels
from rocserve.core.tensors import Buffer


class ImageError(ValueError):
    """An image that cannot be decoded; the text names its fault."""


NOT_TURNED = 1
"""The EXIF orientation of an image whose rows and columns are as they are to be seen."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    width: int
    """Pixels of the image as it is stored, before it is turned or scaled."""
    height: int
    components: int
    """Of a pixel, without an alpha channel: 1 = grey; 3 = colour, also by a palette; 4 = inks, of which libjpeg, and
    with it rocAL's decoder, makes no RGB."""
    orientation: int = NOT_TURNED
    """EXIF's, from 1 to 8."""
    length: int = 0
    """Of a JPEG, how many of the bytes are the file's; those behind them are no part of the picture."""
    scans: int = 1
    """How often decoding it goes through all of its pixels."""


SourceImage = Buffer | np.ndarray[Any, Any]
"""One image, as a view: the bytes of its file (1-D UINT8, perhaps with zeros behind them), or, where the pipeline's
decoder has "input": "raw", its pixels as UINT8 height x width x channels (height x width for one channel)."""


_ORIENTATION_TAG = 0x0112
_SHORT = 3
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}

_FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
"""OpenCV's codes of the flips, once the sides are exchanged where they must be: 0 = about the horizontal axis,
1 = about the vertical one, -1 = about both."""


def read_orientation(data: memoryview) -> int:
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
