"""JPEG decoding with rocAL's rules, on libturbojpeg.

The image is scaled while it is decoded, also up, to the largest of libjpeg's sizes that the decoder's limits allow.
Grey is replicated to the colour channels; for U8 the luma is taken. Four inks, which rocAL cannot decode, become RGB as
in OpenCV, Pillow and browsers: each file is taken as Adobe's programs write it, with 255 for no ink.
"""

from __future__ import annotations

import cv2

from rocserve.backends.rocal.decoding import libturbojpeg
from rocserve.backends.rocal.decoding.header import ColorModel, ImageHeader
from rocserve.backends.rocal.decoding.libturbojpeg import TurboJpeg
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderLimits
from rocserve.backends.rocal.decoding.png import in_color_format
from rocserve.backends.rocal.image import Pixels

_PIXEL_FORMATS = {
    ColorFormat.RGB24: libturbojpeg.RGB,
    ColorFormat.BGR24: libturbojpeg.BGR,
    ColorFormat.U8: libturbojpeg.GREY,
}


class JpegDecoder:
    """Safe to use on several threads at once."""

    def __init__(self, color_format: ColorFormat, limits: DecoderLimits) -> None:
        """
        Raises:
            RuntimeError: libturbojpeg is not installed.
        """
        self._color_format = color_format
        self._limits = limits
        self._library = TurboJpeg()

    def decode(self, encoded: memoryview, header: ImageHeader) -> Pixels:
        """The pixels as UINT8, height x width x channels.

        Raises:
            ImageError: the image is damaged, or not even an eighth of it fits the limits.
        """
        numerator, denominator = self._limits.scaling_factor(header.width, header.height)
        width, height = (-(-side * numerator // denominator) for side in (header.width, header.height))
        # What stands behind the end of the image, zeros or another file, is not shown to the library.
        encoded = encoded[: header.length]
        if header.color_model is ColorModel.CMYK:
            inks = self._library.decompress(encoded, width, height, libturbojpeg.CMYK)
            return in_color_format(_blue_green_red(inks), self._color_format)
        return self._library.decompress(encoded, width, height, _PIXEL_FORMATS[self._color_format])


def _blue_green_red(inks: Pixels) -> Pixels:
    """Of cyan, magenta, yellow and black, 255 = no ink: what each ink leaves of the light that black leaves."""
    cyan, magenta, yellow, black = cv2.split(inks)
    # Yellow ink takes away blue, magenta green, cyan red.
    return cv2.multiply(cv2.merge((yellow, magenta, cyan)), cv2.merge((black, black, black)), scale=1 / 255)
