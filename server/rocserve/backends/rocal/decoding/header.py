"""An image as a client sent it: its header, read before any pixel, and the error for a bad one."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.core.tensors import Buffer


class ImageError(ValueError):
    """An image that cannot be decoded; the text names its fault."""


NOT_TURNED = 1
"""The EXIF orientation of an image whose rows and columns are as they are to be seen."""


class ColorModel(enum.Enum):
    """What a pixel is made of; an alpha channel does not count."""

    GREY = "grey"
    COLOUR = "colour"
    """RGB, YCbCr or a palette."""
    CMYK = "CMYK"
    """Four inks, also as YCCK. libjpeg, and with it rocAL's decoder, makes no RGB of it."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    width: int
    """Pixels of the image as it is stored, before it is turned or scaled."""
    height: int
    color_model: ColorModel
    orientation: int = NOT_TURNED
    """EXIF's, from 1 to 8."""
    length: int = 0
    """Of a JPEG, how many of the bytes are the file's; those behind them are no part of the picture."""
    scans: int = 1
    """How often decoding it goes through all of its pixels."""


SourceImage = Buffer | np.ndarray[Any, Any]
"""One image, as a view: the bytes of its file (1-D UINT8, perhaps with zeros behind them), or, where the pipeline's
decoder has "input": "raw", its pixels as UINT8 height x width x channels (height x width for one channel)."""


def bytes_of(image: SourceImage) -> memoryview:
    """A view on an encoded image's bytes."""
    return memoryview(image) if isinstance(image, Buffer) else np.ascontiguousarray(image).data
