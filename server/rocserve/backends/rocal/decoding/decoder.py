"""Decodes clients' images: JPEG, PNG and raw pixels. Other formats and damaged images are refused with the reason."""

from __future__ import annotations

import re

import cv2
import numpy as np

from rocserve.backends.rocal.decoding import libturbojpeg, png
from rocserve.backends.rocal.decoding.image_file import ImageError, ImageFile, SourceImage, swaps_sides, upright
from rocserve.backends.rocal.decoding.libturbojpeg import TurboJpeg
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions
from rocserve.backends.rocal.image import DecodedImage, Pixels, with_channels
from rocserve.core.tensors import Buffer

_SCANS_OF_LARGEST = 20
"""Limit for an image of the largest size; smaller ones may have more. Common progressive JPEGs have about ten."""


class Decoder:
    """Decodes JPEG and PNG, or accepts raw pixels, as the options say. Can be called from several threads at a time.
    rocAL returns another image's pixels for a bad image. This decoder raises an error with the reason."""

    def __init__(self, color_format: ColorFormat, options: DecoderOptions) -> None:
        """Raises RuntimeError if libturbojpeg is not installed."""
        self._color_format = color_format
        self._options = options
        self._library = None if options.is_raw else TurboJpeg()

    def decode(self, image: SourceImage) -> DecodedImage:
        """Return the image as UINT8, height x width x channels, and its size before scaling. Raises ImageError if it is
        neither JPEG nor PNG, damaged, truncated or above the limits."""
        if self._library is None:
            array = np.asarray(image)
            height, width = array.shape[:2]
            if not array.size:
                raise ImageError(f"it has no pixels: its shape is {list(array.shape)}")
            self._check_pixels(width, height)
            return DecodedImage(np.ascontiguousarray(with_channels(array)), height, width)
        encoded = memoryview(image) if isinstance(image, Buffer) else np.ascontiguousarray(image).data
        if encoded[:2] == libturbojpeg.SIGNATURE:
            file = libturbojpeg.read_jpeg(encoded)
            self._check_pixels(file.width, file.height)
            if file.width * file.height * file.scans > self._options.max_pixels * _SCANS_OF_LARGEST:
                # Hundreds of scans fit into some kilobytes, and each takes time in proportion to the image.
                raise ImageError(
                    f"it is a JPEG that goes {file.scans} times over {file.width}x{file.height} pixels;"
                    f" {_SCANS_OF_LARGEST} times over the {self._options.max_pixels} that 'max_pixels' allows is the"
                    " most"
                )
            pixels = self._decode_jpeg(self._library, file)
        elif encoded[: len(png.SIGNATURE)] == png.SIGNATURE:
            file = png.read_png(encoded)
            self._check_pixels(file.width, file.height)
            pixels = png.decode_png(file, self._color_format, self._options)
        else:
            raise ImageError(_without_signature(encoded))
        width, height = file.width, file.height
        if self._options.exif:
            pixels = upright(pixels, file.orientation)
            if swaps_sides(file.orientation):
                width, height = height, width
        return DecodedImage(pixels, height, width)

    def _decode_jpeg(self, library: TurboJpeg, file: ImageFile) -> Pixels:
        """Decode a JPEG by rocAL's rules: libjpeg scales it, up or down, to its largest size within the limits. Grey
        is replicated to the colour channels; U8 gets the luma. CMYK, which rocAL cannot decode, becomes RGB as in
        OpenCV, Pillow and browsers: the file is read as Adobe's programs write it, with 255 for no ink."""
        numerator, denominator = self._options.scaling_factor(file.width, file.height)
        width, height = (-(-side * numerator // denominator) for side in (file.width, file.height))
        if file.components == 4:
            inks = library.decompress(file.picture, width, height, libturbojpeg.CMYK)
            # 255 = no ink. Yellow absorbs the blue of the light that black leaves, magenta the green, cyan the red.
            cyan, magenta, yellow, black = cv2.split(inks)
            light = cv2.multiply(cv2.merge((yellow, magenta, cyan)), cv2.merge((black, black, black)), scale=1 / 255)
            return png.in_color_format(light, self._color_format)
        formats = {
            ColorFormat.RGB24: libturbojpeg.RGB,
            ColorFormat.BGR24: libturbojpeg.BGR,
            ColorFormat.U8: libturbojpeg.GREY,
        }
        return library.decompress(file.picture, width, height, formats[self._color_format])

    def _check_pixels(self, width: int, height: int) -> None:
        if width * height > self._options.max_pixels:
            raise ImageError(
                f"its {width}x{height} pixels are more than the {self._options.max_pixels} that 'max_pixels' allows"
            )


_SIGNATURES: tuple[tuple[re.Pattern[bytes], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE if b"<" in pattern else re.DOTALL), name)
    for pattern, name in (
        (rb"GIF8[79]a", "a GIF image"),
        (rb"RIFF....WEBP", "a WebP image"),
        (rb"RIFF....AVI ", "an AVI video"),
        (rb"II[*+]\0|MM\0[*+]", "a TIFF image, or a camera's raw file"),
        (rb"BM.{4}\0\0\0\0", "a BMP image"),
        (rb"....ftyp(avif|avis)", "an AVIF image"),
        (rb"....ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", "a HEIF image"),
        (rb"....ftyp", "an MP4 or QuickTime video"),
        (rb"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL image"),
        (rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 image"),
        (rb"\0\0[\x01\x02]\0[^\0]", "a Windows icon"),
        (rb"8BPS", "a Photoshop document"),
        (rb"P[1-7]\s", "a PNM image"),
        (rb"\x93NUMPY", "a NumPy array file"),
        (rb"%PDF", "a PDF document"),
        (rb"\x1f\x8b", "data compressed by gzip"),
        (rb"PK\x03\x04", "a ZIP archive"),
        (rb"data:image/", "a data: URL; send the bytes that it holds"),
        (rb"/9j/", "a JPEG as base64 text; send its bytes"),
        (rb"iVBORw0KGgo", "a PNG as base64 text; send its bytes"),
        (rb"\s*(<!doctype html|<html|<head|<body)", "an HTML page"),
        # The atomic group ends a comment at its first end mark, so that not all combinations of end marks are tried.
        (rb"\s*(<\?xml[^>]*>\s*)?(?><!--.*?-->\s*|<!doctype svg[^>]*>\s*)*<svg", "an SVG image"),
        (rb"\s*<\?xml", "XML text"),
        (rb"\s*[{\[]\s*[\"{\[\]}\d-]", "JSON text"),
        (rb".{4}\xff\xd8\xff", "a JPEG after four other bytes, perhaps its length; send only the file"),
        (rb".{4}\x89PNG", "a PNG after four other bytes, perhaps its length; send only the file"),
        (rb"\0+\Z", "nothing but zeros"),
        (rb"[\t\n\r\x20-\x7e]+\Z", "text, perhaps a path or an address; send the bytes of the file"),
    )
)


def _without_signature(encoded: memoryview) -> str:
    """Return what is wrong with data that begin like neither a JPEG nor a PNG."""
    expected = "a JPEG or a PNG is expected"
    if not len(encoded):
        return f"it is empty; {expected}"
    # A longer text is recognised by its beginning.
    beginning = bytes(encoded[:512])
    kind = next((name for pattern, name in _SIGNATURES if pattern.match(beginning)), None)
    if kind is not None:
        return f"it seems to be {kind}; {expected}"
    first = " ".join(f"0x{byte:02x}" for byte in encoded[:4])
    return f"its format is unknown (it starts with {first}); {expected}"
