"""Walks the segments of a JPEG file: its size and colours, and whether its end is there.

The entropy-coded data is skipped, so damage within it shows only in decoding; a file that was cut off, or that has
something else in its middle, shows here. Segments: ITU-T T.81, annex B.
"""

from __future__ import annotations

import re
import struct

from rocserve.backends.rocal.decoding import exif
from rocserve.backends.rocal.decoding.header import NOT_TURNED, ColorModel, ImageError, ImageHeader

SIGNATURE = b"\xff\xd8"
"""The start-of-image marker."""

_MARKER = re.compile(rb"\xff+([^\xff])")
END = b"\xff\xd9"
_MARKER_AFTER_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""In entropy-coded data 0xFF is followed by 0x00 (a stuffed byte) or is a restart marker, 0xD0 to 0xD7."""

_MAX_SIDE = 65_500
"""Pixels that libjpeg reads; the format goes up to 65535."""

_START_OF_IMAGE, _END_OF_IMAGE, _START_OF_SCAN, _APPLICATION_1 = 0xD8, 0xD9, 0xDA, 0xE1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""SOF markers; the three others define tables or are reserved."""
_SEQUENTIAL_FRAMES = frozenset((0xC0, 0xC1))
_DECODABLE_FRAMES = frozenset((0xC0, 0xC1, 0xC2, 0xC9, 0xCA))
"""Baseline, extended, progressive, and the latter two with arithmetic coding; not lossless, not hierarchical."""

_MAX_SEGMENTS = 10_000
"""Far more than any picture has; a file made of empty segments only is not worth the time that it takes to walk."""

_COLOR_MODELS = {1: ColorModel.GREY, 3: ColorModel.COLOUR, 4: ColorModel.CMYK}

_TRUNCATED = "Premature end of JPEG file: its end-of-image marker is missing, so part of it was cut off"


def read_jpeg_header(data: memoryview, trusts_last_bytes: bool = True) -> ImageHeader:
    """The header of a file that starts with SIGNATURE.

    Where the last bytes may be trusted, a sequential image ends with the file if an end marker is there.

    Raises:
        ImageError: it is truncated, its segments do not follow each other, or its coding is not supported.
    """
    frame: tuple[int, int, int, int] | None = None
    orientation = None
    scans = 0
    position = 2
    for _ in range(_MAX_SEGMENTS):
        marker, position = _marker_at(data, position)
        if marker == _END_OF_IMAGE:
            if frame is None or not scans:
                raise ImageError("it is a JPEG with no image in it")
            return _header(frame, orientation or NOT_TURNED, position, scans)
        body = _segment_at(data, position, marker)
        position += 2 + len(body)
        if marker in _FRAMES:
            if frame is not None:
                raise ImageError("it is a JPEG with two images in one (a second frame header)")
            frame = _read_frame(marker, body)
        elif marker == _APPLICATION_1 and orientation is None:
            orientation = exif.orientation_in_segment(body)
        elif marker == _START_OF_SCAN:
            scans += 1
            if trusts_last_bytes and frame is not None and frame[0] in _SEQUENTIAL_FRAMES and data[-2:] == END:
                # The end is there. A marker before it that does not belong there is found in decoding: a sequential
                # image's data is read in one go. Looking for one here would take as long as a tenth of the decoding.
                return _header(frame, orientation or NOT_TURNED, len(data), scans)
            found = _MARKER_AFTER_SCAN.search(data, position)
            if found is None:
                raise ImageError(_TRUNCATED)
            position = found.start()
    raise ImageError(f"it is a JPEG of more than {_MAX_SEGMENTS} segments")


def _marker_at(data: memoryview, position: int) -> tuple[int, int]:
    """The marker's code and the position behind it."""
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
    """The marker, height, width and number of components."""
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
    if components not in _COLOR_MODELS:
        raise ImageError(f"it is a JPEG of {components} components; 1 (grey), 3 (colour) and 4 (CMYK) are accepted")
    return marker, height, width, components


def _header(frame: tuple[int, int, int, int], orientation: int, length: int, scans: int) -> ImageHeader:
    marker, height, width, components = frame
    scans = 1 if marker in _SEQUENTIAL_FRAMES else scans
    return ImageHeader(width, height, _COLOR_MODELS[components], orientation, length, scans)
