"""libturbojpeg's decompressor, by ctypes: what damage it finds is an error here.

libjpeg reports the first fault that it meets and none that follow. Where the first one is harmless, the
image is decoded again without it: only so does it show whether it was the only one.

A call gives the GIL back for as long as it runs. The functions are those of TurboJPEG 2.0, which later ones keep.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from typing import Any

import numpy as np

from rocserve.backends.rocal.decoding.header import ImageError
from rocserve.backends.rocal.decoding.jpeg_header import END, read_jpeg_header
from rocserve.backends.rocal.image import Pixels

_EXTRANEOUS = re.compile(r"(\d+) extraneous bytes before marker 0xd9\Z")

_ADOBE, _YCCK = "Unknown Adobe color transform code", b"\x02"
_REPAIRS = {
    # JFIF's segment, up to the first byte of its version.
    "Warning: unknown JFIF revision number": (rb"(\xff\xe0..JFIF\0).", b"\x01"),
    # Adobe's segment, up to its last byte, becomes YCC, or YCCK below, for which libjpeg takes an unknown one.
    _ADOBE: (rb"(\xff\xee..Adobe.{6}).", b"\x01"),
    # A start-of-scan segment for one to four components; its last three bytes, all coefficients then, are for
    # progressive images only. Some cameras write them wrongly, and no decoder uses them.
    "Invalid SOS parameters for sequential JPEG": (
        rb"(\xff\xda\0(?:\x08\x01.{2}|\x0a\x02.{4}|\x0c\x03.{6}|\x0e\x04.{8}))...",
        b"\0\x3f\0",
    ),
}
"""By the beginning of libjpeg's text: what comes before the fault and it, and the bytes in its place."""


def repaired(encoded: memoryview, fault: str, is_cmyk: bool) -> memoryview | None:
    """The JPEG without the fault that libjpeg's text names; None where that is not harmless.

    Raises:
        ImageError: it is truncated, which had not shown before.
    """
    if found := _EXTRANEOUS.search(fault):
        # Every pixel of the scan has been decoded by then, unless a restart marker is missing.
        end = read_jpeg_header(encoded, trusts_last_bytes=False).length - len(END)
        return memoryview(bytes(encoded[: max(end - int(found[1]), 0)]) + END)
    for text, (pattern, right) in _REPAIRS.items():
        if fault.startswith(text):
            template = rb"\g<1>" + (_YCCK if is_cmyk and text == _ADOBE else right)
            return memoryview(re.sub(pattern, template, bytes(encoded), flags=re.DOTALL))
    return None


RGB, BGR, GREY, CMYK = 0, 1, 6, 11
"""TurboJPEG's pixel formats."""

_CHANNELS = {RGB: 3, BGR: 3, GREY: 1, CMYK: 4}

_ACCURATE_DCT, _LIMIT_SCANS = 4096, 32768

_FILENAMES = ("libturbojpeg.so.0", "libturbojpeg.so", "libturbojpeg.dylib")

_ATTEMPTS = 4
"""How often a JPEG is decoded at most: as many times as there are harmless faults, and once without."""


class TurboJpeg:
    """Safe to use on several threads at once: each call has its own decompressor."""

    def __init__(self) -> None:
        """
        Raises:
            RuntimeError: libturbojpeg is not installed, or older than 2.0.
        """
        library = _load()
        self._make = _function(library, "tjInitDecompress", ctypes.c_void_p)
        self._destroy = _function(library, "tjDestroy", ctypes.c_int, ctypes.c_void_p)
        self._error_text = _function(library, "tjGetErrorStr2", ctypes.c_char_p, ctypes.c_void_p)
        self._decompress = _function(
            library,
            "tjDecompress2",
            ctypes.c_int,
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        )

    def decompress(self, encoded: memoryview, width: int, height: int, pixel_format: int) -> Pixels:
        """The pixels of a JPEG as UINT8, height x width x channels.

        `width` and `height` are the image's own, or these scaled by one of libjpeg's factors. Accurate DCT, smooth
        ("fancy") upsampling of chroma; no more than 500 scans are read.

        Raises:
            ImageError: the image is damaged; the text is libjpeg's.
        """
        pixels = np.empty((height, width, _CHANNELS[pixel_format]), dtype=np.uint8)
        for _ in range(_ATTEMPTS):
            fault = self._decompress_into(pixels, encoded, pixel_format)
            if not fault:
                return pixels
            without = repaired(encoded, fault, is_cmyk=pixel_format == CMYK)
            if without is None:
                break
            encoded = without
        raise ImageError(fault)

    def _decompress_into(self, pixels: Pixels, encoded: memoryview, pixel_format: int) -> str:
        """The error, or else the first warning; empty where there is none."""
        height, width = pixels.shape[:2]
        handle = self._make()
        if not handle:
            raise MemoryError("libturbojpeg has no memory for a decompressor")
        try:
            status = self._decompress(
                handle,
                np.frombuffer(encoded, dtype=np.uint8).ctypes.data,
                len(encoded),
                pixels.ctypes.data,
                width,
                0,  # Rows without gaps.
                height,
                pixel_format,
                _ACCURATE_DCT | _LIMIT_SCANS,
            )
            return self._error_text(handle).decode(errors="replace") if status else ""
        finally:
            self._destroy(handle)


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise RuntimeError(f"libturbojpeg has no {name}; version 2.0 or newer is needed") from None
    function.restype = result
    function.argtypes = arguments
    return function


def _load() -> ctypes.CDLL:
    for filename in _FILENAMES:
        try:
            return ctypes.CDLL(filename)
        except OSError:
            continue
    # Not where the dynamic linker looks: search for it (that starts processes, hence last).
    found = ctypes.util.find_library("turbojpeg")
    if found is None:
        raise RuntimeError(
            "libturbojpeg was not found; it decodes JPEGs (Debian and Ubuntu: apt-get install libturbojpeg0)"
        )
    return ctypes.CDLL(found)
