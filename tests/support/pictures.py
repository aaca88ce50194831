"""Makes picture files of every kind: JPEGs with Pillow and libturbojpeg, PNGs chunk by chunk."""

from __future__ import annotations

import io
import struct
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import turbojpeg
from PIL import Image

Pixels = np.ndarray[Any, Any]

PHOTOGRAPHS = Path(sysconfig.get_path("platlib"), "sklearn/datasets/images")
"""china.jpg and flower.jpg from scikit-learn. The path is found without importing scikit-learn, which takes a
second."""
ORIENTATION = 0x0112

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def colours(width: int = 60, height: int = 40) -> Pixels:
    """A smooth picture, different in each channel, row and column: height x width x 3, UINT8."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = (columns * 255 / width, rows * 255 / height, 255 - (columns + rows) * 255 / (width + height))
    return np.stack(channels, -1).astype(np.uint8)


def saved(pixels: Pixels, kind: str, mode: str | None = None, **options: Any) -> bytes:
    """Encode a picture with Pillow."""
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image if mode is None else image.convert(mode)).save(file, kind, **options)
    return file.getvalue()


def jpeg(width: int = 60, height: int = 40, mode: str = "RGB", **options: Any) -> bytes:
    return saved(colours(width, height), "JPEG", mode, **{"quality": 95, **options})


def turned_jpeg(orientation: int, width: int = 60, height: int = 40, **options: Any) -> bytes:
    """A JPEG with an EXIF orientation."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return jpeg(width, height, exif=exif, **options)


def ycck_jpeg(width: int = 60, height: int = 40) -> bytes:
    """A JPEG of four inks, inverted and in YCCK, as Adobe's programs write it."""
    inks = np.asarray(Image.fromarray(colours(width, height)).convert("CMYK"))
    return turbojpeg.TurboJPEG().encode(
        255 - inks, quality=95, pixel_format=turbojpeg.TJPF_CMYK, jpeg_subsample=turbojpeg.TJSAMP_444
    )


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(
    width: int,
    height: int,
    depth: int,
    color_type: int,
    rows: Sequence[bytes],
    before: Sequence[tuple[bytes, bytes]] = (),
    after: Sequence[tuple[bytes, bytes]] = (),
) -> bytes:
    """A PNG of unfiltered rows, with further chunks before and after its data."""
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = ((b"IHDR", header), *before, (b"IDAT", data), *after, (b"IEND", b""))
    return PNG_SIGNATURE + b"".join(png_chunk(name, body) for name, body in chunks)


def interlaced_png(pixels: Pixels) -> bytes:
    """A UINT8 RGB picture as an interlaced PNG: Adam7's seven passes."""
    height, width = pixels.shape[:2]
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = [
        b"\0" + row.tobytes()
        for first_row, first_column, row_step, column_step in passes
        for row in pixels[first_row::row_step, first_column::column_step]
        if row.size
    ]
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return PNG_SIGNATURE + b"".join(png_chunk(name, body) for name, body in chunks)
