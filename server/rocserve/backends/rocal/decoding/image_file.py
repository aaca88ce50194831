"""Describes a client's image before it is decoded: its header, its orientation and what a library gets of it.

EXIF's orientation is in the first directory of a TIFF structure (TIFF 6.0, section 2; EXIF 2.3, section 4.6.4). If the
structure cannot be read, the image is shown as stored, as in every viewer.
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
    """Reports an image that cannot be decoded; the text has the reason."""


NOT_TURNED = 1
"""The EXIF orientation of an image that is stored upright."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """What the head of an image file tells."""

    width: int
    """Width of the stored image in pixels, before the image is turned or scaled."""
    height: int
    components: int
    """Channels without alpha: 1 = grey; 3 = colour, also by a palette; 4 = inks, which libjpeg, and with it rocAL's
    decoder, does not convert to RGB."""
    orientation: int
    scans: int
    """How often decoding goes over all pixels."""
    picture: memoryview
    """The bytes that are decoded: of a JPEG up to its end, of a PNG without the chunks that no pixel depends on."""


SourceImage = Buffer | np.ndarray[Any, Any]
"""View of one image: its file's bytes (1-D UINT8, perhaps followed by zeros). With the decoder option "input": "raw",
its pixels as UINT8 height x width x channels (height x width for one channel)."""


def read_orientation(data: memoryview) -> int:
    """Return the orientation from 1 to 8; 1 = upright."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(data[:4]))
    if order is None:
        return NOT_TURNED
    try:
        (start,) = struct.unpack_from(order + "I", data, 4)
        (count,) = struct.unpack_from(order + "H", data, start)
        for index in range(count):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", data, start + 2 + 12 * index)
            # The orientation's tag; its type, an integer of two bytes, is number 3.
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else NOT_TURNED
    except struct.error:
        pass  # The structure ends too early.
    return NOT_TURNED


def swaps_sides(orientation: int) -> bool:
    return orientation >= 5


def upright(pixels: np.ndarray[Any, Any], orientation: int) -> np.ndarray[Any, Any]:
    """Return the upright image, height x width x channels."""
    pixels = cv2.transpose(pixels) if swaps_sides(orientation) else pixels
    # EXIF orientation -> OpenCV's code of the flip that follows the swap of the sides, if any: 0 = about the horizontal
    # axis, 1 = about the vertical one, -1 = about both.
    flips = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
    if orientation in flips:
        pixels = cv2.flip(pixels, flips[orientation])
    return with_channels(pixels)
