"""libturbojpeg's decompressor, by ctypes: what damage it finds is an error here.

A call gives the GIL back for as long as it runs. The functions are those of TurboJPEG 2.0, which later ones keep.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import numpy as np

from rocserve.backends.rocal.decoding.faults import ImageError
from rocserve.backends.rocal.decoding.jpeg_repair import repaired
from rocserve.backends.rocal.image import Pixels

RGB, BGR, GREY, CMYK = 0, 1, 6, 11
"""TurboJPEG's pixel formats."""

_CHANNELS = {RGB: 3, BGR: 3, GREY: 1, CMYK: 4}

_ACCURATE_DCT, _LIMIT_SCANS = 4096, 32768

_FILENAMES = ("libturbojpeg.so.0", "libturbojpeg.so", "libturbojpeg.dylib")

_ATTEMPTS = 4
"""How often a JPEG is decoded at most: as many times as there are harmless faults, and once without."""


class TurboJpeg:
    """Safe to use on several threads at once: each call has a decompressor of its own."""

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
