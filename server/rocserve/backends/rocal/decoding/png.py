"""PNG decoding, by libpng within OpenCV.

rocAL's external source decodes with TurboJPEG only and answers a PNG with stale memory, so what happens to one is this
server's own rule, and that of OpenCV's imread and Pillow's convert("RGB"):
- palettes are looked up, grey is replicated to the colour channels, 16 bits a sample become their upper 8;
- an alpha channel and a transparent colour are dropped, not blended: a pixel shows the colour that is stored in it;
- of an animation the default picture is taken; gamma and colour profiles mean nothing;
- for U8, colours become grey by ITU-R BT.601's weights (.299, .587, .114);
- an image larger than the decoder's limits is shrunk, by area averaging, to the largest size of the same proportions
  that fits; one that fits is never enlarged.
"""

from __future__ import annotations

from typing import cast

import cv2
import numpy as np

from rocserve.backends.rocal.decoding.faults import ImageError
from rocserve.backends.rocal.decoding.header import ColorModel
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderLimits
from rocserve.backends.rocal.decoding.png_header import SIGNATURE, PngFile
from rocserve.backends.rocal.image import Pixels


def decode_png(file: PngFile, color_format: ColorFormat, limits: DecoderLimits) -> Pixels:
    """The pixels as UINT8, height x width x channels, within the limits.

    Raises:
        ImageError: its pixel data is damaged.
    """
    as_grey = color_format is ColorFormat.U8 and file.header.color_model is ColorModel.GREY
    # Only what makes the picture reaches libpng: no text or profile that swells, no gamma, no second frame.
    encoded = np.frombuffer(b"".join((SIGNATURE, *file.picture)), dtype=np.uint8)
    try:
        pixels = cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE if as_grey else cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise ImageError(f"it is a PNG that OpenCV cannot read: {error.err}") from None
    if pixels is None:
        raise ImageError("Corrupt PNG data: its pixels are damaged or end too early")
    return in_color_format(_shrunk(cast(Pixels, pixels), limits), color_format)


def in_color_format(pixels: Pixels, color_format: ColorFormat) -> Pixels:
    """Of blue, green and red, or of one channel: height x width x channels."""
    if pixels.ndim == 3 and color_format is ColorFormat.U8:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
    elif color_format is ColorFormat.RGB24:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    return pixels.reshape(*pixels.shape[:2], color_format.channels)


def _shrunk(pixels: Pixels, limits: DecoderLimits) -> Pixels:
    height, width = pixels.shape[:2]
    if limits.fits(width, height):
        return pixels
    return cast(Pixels, cv2.resize(pixels, limits.bounded(width, height), interpolation=cv2.INTER_AREA))
