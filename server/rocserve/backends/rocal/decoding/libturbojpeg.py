"""Reads JPEG headers, and decompresses JPEGs with libturbojpeg by ctypes. Damage that the library finds becomes an
error.

The header is found by walking the segments (ITU-T T.81, annex B), without the entropy-coded data. Thus a truncated
file, or a foreign piece in its middle, is found here; damage within the data is found in decompression.

libjpeg reports only the first fault. If it is harmless, the image is decompressed again without it, to find out whether
it was the only one.

A call releases the GIL while it runs. The functions are those of TurboJPEG 2.0, which later versions keep.
"""

from __future__ import annotations

import ctypes
import re
import struct
from typing import Any

import numpy as np

from rocserve.backends.rocal.decoding.image_file import NOT_TURNED, ImageError, ImageFile, read_orientation
from rocserve.backends.rocal.image import Pixels

SIGNATURE = b"\xff\xd8"

_MARKER = re.compile(rb"\xff+([^\xff])")
END = b"\xff\xd9"
_MARKER_AFTER_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""In entropy-coded data 0xFF is followed by 0x00 (a stuffed byte) or is a restart marker, 0xD0 to 0xD7."""

_MAX_SIDE = 65_500
"""Limit of libjpeg in pixels; the format's limit is 65535."""

_START_OF_IMAGE, _END_OF_IMAGE, _START_OF_SCAN, _APPLICATION_1 = 0xD8, 0xD9, 0xDA, 0xE1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""SOF markers. The three other codes define tables or are reserved."""
_DECODABLE_FRAMES = frozenset((0xC0, 0xC1, 0xC2, 0xC9, 0xCA))
"""Baseline, extended and progressive; then the last two with arithmetic coding. Neither lossless nor hierarchical."""

_MAX_SEGMENTS = 10_000
"""Far more than any image has. It limits the time for a file of empty segments."""

_EXIF = b"Exif\0\0"
"""Name at the start of EXIF's segment, because XMP also uses APP1."""

_TRUNCATED = "Premature end of JPEG file: its end-of-image marker is missing, so part of it was cut off"


def read_jpeg(data: memoryview, trusts_last_bytes: bool = True) -> ImageFile:
    """Read the header of a file that starts with SIGNATURE. With `trusts_last_bytes`, an end marker at the file's end
    is taken as the end of an image of one scan. Raises ImageError if the file is truncated, its segments do not follow
    each other, or its coding is not supported."""
    frame: tuple[int, int, int, int] | None = None
    orientation = None
    scans = 0
    is_one_scan = False
    position = 2
    for _ in range(_MAX_SEGMENTS):
        marker, position = _marker_at(data, position)
        if marker == _END_OF_IMAGE:
            if frame is None or not scans:
                raise ImageError("it is a JPEG with no image in it")
            return _file(frame, orientation, 1 if is_one_scan else scans, data[:position])
        body = _segment_at(data, position, marker)
        position += 2 + len(body)
        if marker in _FRAMES:
            if frame is not None:
                raise ImageError("it is a JPEG with two images in one (a second frame header)")
            frame = _read_frame(marker, body)
        elif marker == _APPLICATION_1 and orientation is None and bytes(body[: len(_EXIF)]) == _EXIF:
            orientation = read_orientation(body[len(_EXIF) :])
        elif marker == _START_OF_SCAN:
            scans += 1
            if scans == 1 and frame is not None:
                # If the first scan has all components, libjpeg reads no second scan.
                is_one_scan = frame[0] in (0xC0, 0xC1) and body[:1] == bytes(frame[3:])
                if is_one_scan and trusts_last_bytes and data[-2:] == END:
                    # The end marker exists. Decoding finds any wrong marker before it. A search here would take a tenth
                    # of the time that decoding takes.
                    return _file(frame, orientation, 1, data)
            found = _MARKER_AFTER_SCAN.search(data, position)
            if found is None:
                raise ImageError(_TRUNCATED)
            position = found.start()
    raise ImageError(f"it is a JPEG of more than {_MAX_SEGMENTS} segments")


def _marker_at(data: memoryview, position: int) -> tuple[int, int]:
    """Return the marker's code and the position after it."""
    found = _MARKER.match(data, position)
    if found is None:
        if len(data) - position < 2:
            raise ImageError(_TRUNCATED)
        raise ImageError(
            f"Corrupt JPEG data: expected a marker at byte {position}, found 0x{data[position]:02x}"
            f" 0x{data[position + 1]:02x}"
        )
    code = data[found.end() - 1]
    if code in (0x00, 0x01, _START_OF_IMAGE) or 0xD0 <= code <= 0xD7:
        raise ImageError(f"Corrupt JPEG data: marker 0x{code:02x} at byte {position} stands where a segment must begin")
    return code, found.end()


def _segment_at(data: memoryview, position: int, marker: int) -> memoryview:
    if len(data) - position < 2:
        raise ImageError(_TRUNCATED)
    (length,) = struct.unpack_from(">H", data, position)
    if length < 2:
        raise ImageError(f"Corrupt JPEG data: the segment of marker 0x{marker:02x} has a length of {length}")
    if position + length > len(data):
        raise ImageError(_TRUNCATED)
    return data[position + 2 : position + length]


def _read_frame(marker: int, body: memoryview) -> tuple[int, int, int, int]:
    if marker not in _DECODABLE_FRAMES:
        raise ImageError(
            f"it is a lossless or hierarchical JPEG (frame header 0x{marker:02x}); baseline and progressive ones are"
            " accepted"
        )
    if len(body) < 6:
        raise ImageError(f"Corrupt JPEG data: its frame header has {len(body)} bytes")
    precision, height, width, components = struct.unpack_from(">BHHB", body)
    if precision != 8:
        raise ImageError(f"it is a JPEG of {precision} bits a sample; 8 are accepted")
    if not height or not width:
        raise ImageError(f"Empty JPEG image: its header says {width}x{height} pixels")
    if max(height, width) > _MAX_SIDE:
        raise ImageError(f"its header says {width}x{height} pixels; libjpeg reads sides of {_MAX_SIDE} at most")
    if components not in (1, 3, 4):
        raise ImageError(f"it is a JPEG of {components} components; 1 (grey), 3 (colour) and 4 (CMYK) are accepted")
    return marker, height, width, components


def _file(frame: tuple[int, int, int, int], orientation: int | None, scans: int, picture: memoryview) -> ImageFile:
    _, height, width, components = frame
    return ImageFile(width, height, components, orientation or NOT_TURNED, scans, picture)


_ADOBE, _YCCK = "Unknown Adobe color transform code", b"\x02"
_REPAIRS = {
    # JFIF's segment, up to the first byte of its version.
    "Warning: unknown JFIF revision number": (rb"(\xff\xe0..JFIF\0).", b"\x01"),
    # Adobe's segment, up to its last byte: YCC, or YCCK for CMYK, as libjpeg assumes for an unknown value.
    _ADOBE: (rb"(\xff\xee..Adobe.{6}).", b"\x01"),
    # A start-of-scan segment for one to four components. The last three bytes, set to "all coefficients", only matter
    # for progressive images. Some cameras write them wrongly, and no decoder uses them.
    "Invalid SOS parameters for sequential JPEG": (
        rb"(\xff\xda\0(?:\x08\x01.{2}|\x0a\x02.{4}|\x0c\x03.{6}|\x0e\x04.{8}))...",
        b"\0\x3f\0",
    ),
}
"""Beginning of libjpeg's error text -> pattern of the fault with the bytes before it, and the fault's replacement."""


def repaired(encoded: memoryview, fault: str, is_cmyk: bool) -> memoryview | None:
    """Return the JPEG without the fault that libjpeg's text names; None = the fault is not harmless. Raises ImageError
    if the file turns out to be truncated."""
    if found := re.search(r"(\d+) extraneous bytes before marker 0xd9\Z", fault):
        # By then every pixel of the scan has been decoded, unless a restart marker is missing.
        end = len(read_jpeg(encoded, trusts_last_bytes=False).picture) - len(END)
        return memoryview(bytes(encoded[: max(end - int(found[1]), 0)]) + END)
    for text, (pattern, right) in _REPAIRS.items():
        if fault.startswith(text):
            template = rb"\g<1>" + (_YCCK if is_cmyk and text == _ADOBE else right)
            return memoryview(re.sub(pattern, template, bytes(encoded), flags=re.DOTALL))
    return None


RGB, BGR, GREY, CMYK = 0, 1, 6, 11

_CHANNELS = {RGB: 3, BGR: 3, GREY: 1, CMYK: 4}

_ACCURATE_DCT, _LIMIT_SCANS = 4096, 32768


_ATTEMPTS = len(_REPAIRS) + 2
"""Maximum number of decompressions of one JPEG: one to find each harmless fault, extraneous bytes included, and one
without faults."""


class TurboJpeg:
    """Decompresses JPEGs. Can be called from several threads at a time: each call has a separate decompressor."""

    def __init__(self) -> None:
        """Raises RuntimeError if libturbojpeg is not installed or older than 2.0."""
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
        """Return the pixels as UINT8, height x width x channels. The sides are the image's own, or scaled by one of
        libjpeg's factors. Uses accurate DCT and smooth ("fancy") chroma upsampling, and reads at most 500 scans. Raises
        ImageError with libjpeg's text if the image is damaged."""
        pixels = np.empty((height, width, _CHANNELS[pixel_format]), dtype=np.uint8)
        for _ in range(_ATTEMPTS):
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
                # The text of the error, or else of the first warning.
                fault = self._error_text(handle).decode(errors="replace") if status else ""
            finally:
                self._destroy(handle)
            if not fault:
                return pixels
            without = repaired(encoded, fault, is_cmyk=pixel_format == CMYK)
            if without is None:
                break
            encoded = without
        raise ImageError(fault)


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise RuntimeError(f"libturbojpeg has no {name}; version 2.0 or newer is needed") from None
    function.restype = result
    function.argtypes = arguments
    return function


def _load() -> ctypes.CDLL:
    for filename in ("libturbojpeg.so.0", "libturbojpeg.so"):
        try:
            return ctypes.CDLL(filename)
        except OSError as error:
            # The linker's text for a missing library. Otherwise a library that it needs may be missing.
            if not str(error).startswith(f"{filename}: cannot open shared object file"):
                raise RuntimeError(f"{error}; libturbojpeg decodes JPEGs") from None
    raise RuntimeError(
        "libturbojpeg was not found; it decodes JPEGs (Debian and Ubuntu: apt-get install libturbojpeg0)"
    )
