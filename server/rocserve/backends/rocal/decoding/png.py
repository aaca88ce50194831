"""Decodes PNGs with OpenCV's libpng.

rocAL's external source decodes only JPEGs and returns stale memory for a PNG. Therefore the rules for PNGs are not
rocAL's, but the rules of OpenCV's imread and Pillow's convert("RGB"):
- Palettes are looked up, grey is replicated to the colour channels, and 16 bits per sample become their upper 8.
- An alpha channel and a transparent colour are dropped, not blended: a pixel has its stored colour.
- Of an animation the default image is used. Gamma and colour profiles are ignored.
- For U8, colours become grey by ITU-R BT.601's weights (.299, .587, .114).
- An image above the decoder's limits is shrunk by area averaging to the largest size of the same proportions that fits.
  No image is enlarged.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import cast

import cv2
import numpy as np

from rocserve.backends.rocal.decoding.image_file import NOT_TURNED, ImageError, ImageFile, read_orientation
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions
from rocserve.backends.rocal.image import Pixels

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_CHUNK = struct.Struct(">I4s")
_CHECKSUM = struct.Struct(">I")
_IMAGE_HEADER = struct.Struct(">IIBBBBB")
_MAX_SIDE = 2**31 - 1

_LONGEST_SIDE = 1_000_000
"""Limit of libpng in pixels."""

_MAX_CHUNKS = 200_000
"""More than the largest images have in the usual chunks of 8 KiB; limits the time for walking them."""

_GREY, _RGB, _PALETTE, _GREY_ALPHA, _RGB_ALPHA = 0, 2, 3, 4, 6
_BIT_DEPTHS = {
    _GREY: (1, 2, 4, 8, 16),
    _RGB: (8, 16),
    _PALETTE: (1, 2, 4, 8),
    _GREY_ALPHA: (8, 16),
    _RGB_ALPHA: (8, 16),
}
_PICTURE = (b"IHDR", b"PLTE", b"IDAT", b"IEND")


_Chunk = tuple[bytes, int, memoryview, memoryview]
"""Name, position, content, and the whole chunk."""


def read_png(data: memoryview) -> ImageFile:
    """Read a file that starts with SIGNATURE. Checks the checksums of the image's chunks. Raises ImageError if the file
    is truncated or damaged, or its header has values that no PNG may have."""
    chunks = list(_chunks(data))
    for name, position, _, whole in chunks:
        if name in _PICTURE:
            (expected,) = _CHECKSUM.unpack_from(whole, len(whole) - _CHECKSUM.size)
            if zlib.crc32(whole[4 : -_CHECKSUM.size]) != expected:
                place = f"its {_shown(name)} chunk at byte {position}"
                raise ImageError(f"Corrupt PNG data: the checksum of {place} is wrong")
        elif not name[0] & 0x20:  # The chunk is critical.
            raise ImageError(
                f"it is a PNG that cannot be shown without its chunk {_shown(name)}, which no standard knows"
            )
    names = {name for name, *_ in chunks}
    width, height, color_type = _read_image_header(chunks[0])
    if color_type == _PALETTE and b"PLTE" not in names:
        raise ImageError("Corrupt PNG data: its palette is missing")
    if b"IDAT" not in names:
        raise ImageError("it is a PNG with no image in it")
    components = 1 if color_type in (_GREY, _GREY_ALPHA) else 3
    turn = next((read_orientation(body) for name, _, body, _ in chunks if name == b"eXIf"), NOT_TURNED)
    # Only the image's chunks reach libpng: no text or profile that may expand, no gamma, no second frame.
    picture = b"".join((SIGNATURE, *(whole for name, _, _, whole in chunks if name in _PICTURE)))
    return ImageFile(width, height, components, turn, 1, memoryview(picture))


def _shown(name: bytes) -> str:
    return name.decode("ascii") if name.isalpha() else name.hex(" ")


def _chunks(data: memoryview) -> Iterator[_Chunk]:
    position = len(SIGNATURE)
    for _ in range(_MAX_CHUNKS):
        if position + _CHUNK.size > len(data):
            raise ImageError("Premature end of PNG file: its IEND chunk is missing, so part of it was cut off")
        length, name = _CHUNK.unpack_from(data, position)
        start = position + _CHUNK.size
        end = start + length + _CHECKSUM.size
        if end > len(data):
            raise ImageError(
                f"Premature end of PNG file: it has {len(data)} bytes, but its chunk at byte {position} ends at {end}"
            )
        yield name, position, data[start : start + length], data[position:end]
        if name == b"IEND":
            return
        position = end
    raise ImageError(f"it is a PNG of more than {_MAX_CHUNKS} chunks")


def _read_image_header(chunk: _Chunk) -> tuple[int, int, int]:
    name, _, body, _ = chunk
    if name != b"IHDR" or len(body) != _IMAGE_HEADER.size:
        raise ImageError(
            f"Corrupt PNG data: it must begin with an IHDR chunk of {_IMAGE_HEADER.size} bytes, not with"
            f" {_shown(name)} of {len(body)}"
        )
    width, height, depth, color_type, compression, filtering, interlacing = _IMAGE_HEADER.unpack(body)
    if not 0 < width <= _MAX_SIDE or not 0 < height <= _MAX_SIDE:
        raise ImageError(f"Corrupt PNG data: its header says {width}x{height} pixels")
    if max(width, height) > _LONGEST_SIDE:
        raise ImageError(f"it has {width}x{height} pixels; libpng reads sides of {_LONGEST_SIDE} at most")
    if depth not in _BIT_DEPTHS.get(color_type, ()):
        raise ImageError(f"Corrupt PNG data: its header says colour type {color_type} with {depth} bits a sample")
    if compression or filtering or interlacing > 1:
        raise ImageError(
            f"Corrupt PNG data: its header says compression {compression}, filter {filtering}, interlacing"
            f" {interlacing}, where 0, 0 and 0 or 1 exist"
        )
    return width, height, color_type


def decode_png(file: ImageFile, color_format: ColorFormat, options: DecoderOptions) -> Pixels:
    """Return UINT8, height x width x channels, within the limits. Raises ImageError if the data are damaged."""
    as_grey = color_format is ColorFormat.U8 and file.components == 1
    encoded = np.frombuffer(file.picture, dtype=np.uint8)
    try:
        pixels = cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE if as_grey else cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise ImageError(f"it is a PNG that OpenCV cannot read: {error.err}") from None
    if pixels is None:
        raise ImageError("Corrupt PNG data: its pixels are damaged or end too early")
    size = (pixels.shape[1], pixels.shape[0])
    if (bounded := options.bounded(*size)) != size:
        pixels = cv2.resize(pixels, bounded, interpolation=cv2.INTER_AREA)
    return in_color_format(cast(Pixels, pixels), color_format)


def in_color_format(pixels: Pixels, color_format: ColorFormat) -> Pixels:
    """Convert an image of blue, green and red, or of one channel, to height x width x channels."""
    if pixels.ndim == 3 and color_format is ColorFormat.U8:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
    elif color_format is ColorFormat.RGB24:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    return pixels.reshape(*pixels.shape[:2], color_format.channels)
