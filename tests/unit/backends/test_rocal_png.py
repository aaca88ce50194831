"""Decoding PNGs: every kind of pixel as OpenCV and Pillow show it, sizes, and refused files."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from support import pictures
from support.pictures import PNG_SIGNATURE, png, png_chunk

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.image_file import ImageError
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions
from rocserve.backends.rocal.decoding.png import read_png

HEIGHT, WIDTH = 40, 60
COLOURS = pictures.colours(WIDTH, HEIGHT)
GREY = COLOURS[:, :, 0]
ALPHA = COLOURS[:, :, 1]
GREY_TYPE, RGB_TYPE, PALETTE_TYPE, GREY_ALPHA_TYPE, RGB_ALPHA_TYPE = 0, 2, 3, 4, 6


def rows_of(pixels: np.ndarray[Any, Any]) -> list[bytes]:
    return [row.tobytes() for row in pixels]


def sixteen_bits(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Big-endian, with low bytes that must not matter."""
    return (pixels.astype(np.uint16) * 256 + 255).astype(">u2")


def decode(encoded: bytes, color_format: ColorFormat = ColorFormat.RGB24, **options: Any) -> np.ndarray[Any, Any]:
    return Decoder(color_format, DecoderOptions(**options)).decode(encoded).pixels


PALETTE = bytes(range(48))
INDICES = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 16).astype(np.uint8)
SHADES = np.frombuffer(PALETTE, np.uint8).reshape(16, 3)[INDICES]
KINDS = {
    "rgb": (png(WIDTH, HEIGHT, 8, RGB_TYPE, rows_of(COLOURS)), COLOURS),
    "rgb 16": (png(WIDTH, HEIGHT, 16, RGB_TYPE, rows_of(sixteen_bits(COLOURS))), COLOURS),
    "rgba": (png(WIDTH, HEIGHT, 8, RGB_ALPHA_TYPE, rows_of(np.dstack([COLOURS, ALPHA]))), COLOURS),
    "rgba 16": (png(WIDTH, HEIGHT, 16, RGB_ALPHA_TYPE, rows_of(sixteen_bits(np.dstack([COLOURS, ALPHA])))), COLOURS),
    "grey": (png(WIDTH, HEIGHT, 8, GREY_TYPE, rows_of(GREY)), np.dstack([GREY] * 3)),
    "grey 16": (png(WIDTH, HEIGHT, 16, GREY_TYPE, rows_of(sixteen_bits(GREY))), np.dstack([GREY] * 3)),
    "grey alpha": (png(WIDTH, HEIGHT, 8, GREY_ALPHA_TYPE, rows_of(np.dstack([GREY, ALPHA]))), np.dstack([GREY] * 3)),
    "grey 1": (
        png(WIDTH, HEIGHT, 1, GREY_TYPE, rows_of(np.packbits(INDICES > 7, axis=1))),
        np.dstack([(INDICES > 7).astype(np.uint8) * 255] * 3),
    ),
    "palette": (png(WIDTH, HEIGHT, 8, PALETTE_TYPE, rows_of(INDICES), before=[(b"PLTE", PALETTE)]), SHADES),
    "palette 4": (
        png(
            WIDTH,
            HEIGHT,
            4,
            PALETTE_TYPE,
            rows_of(INDICES[:, ::2] * 16 + INDICES[:, 1::2]),
            before=[(b"PLTE", PALETTE), (b"tRNS", b"\0\x80")],
        ),
        SHADES,
    ),
    "transparent colour": (
        png(WIDTH, HEIGHT, 8, RGB_TYPE, rows_of(COLOURS), before=[(b"tRNS", struct.pack(">3H", *COLOURS[0, 0]))]),
        COLOURS,
    ),
    "interlaced": (pictures.interlaced_png(COLOURS), COLOURS),
    "filtered": (pictures.saved(COLOURS, "PNG", optimize=True), COLOURS),
    "gamma": (png(WIDTH, HEIGHT, 8, RGB_TYPE, rows_of(COLOURS), before=[(b"gAMA", struct.pack(">I", 9999))]), COLOURS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_that_others_show(kind: str) -> None:
    encoded, expected = KINDS[kind]
    rgb = decode(encoded)
    np.testing.assert_array_equal(rgb, expected)
    np.testing.assert_array_equal(decode(encoded, ColorFormat.BGR24), expected[:, :, ::-1])
    grey = decode(encoded, ColorFormat.U8)
    assert grey.shape == (HEIGHT, WIDTH, 1)
    assert np.abs(grey[:, :, 0] - expected @ np.array([0.299, 0.587, 0.114])).max() <= 1
    if kind != "gamma":
        opencv = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
        np.testing.assert_array_equal(rgb, opencv[:, :, ::-1])
    if kind != "grey 16":  # Pillow's conversion clamps all levels above 255.
        np.testing.assert_array_equal(rgb, np.asarray(Image.open(io.BytesIO(encoded)).convert("RGBA").convert("RGB")))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((0, 0), (60, 40)),
        ((1000, 1000), (60, 40)),
        ((60, 40), (60, 40)),
        ((30, 1000), (30, 20)),
        ((1000, 13), (19, 13)),
        ((0, 20), (30, 20)),
        ((1, 1), (1, 1)),
    ],
)
def test_limits_only_bound(limits: tuple[int, int], expected: tuple[int, int]) -> None:
    decoded = Decoder(ColorFormat.RGB24, DecoderOptions(*limits)).decode(KINDS["rgb"][0])
    width, height = expected
    assert decoded.pixels.shape == (height, width, 3)
    assert (decoded.original_height, decoded.original_width) == (HEIGHT, WIDTH)
    if expected == (30, 20):
        blocks = COLOURS.reshape(20, 2, 30, 2, 3).mean(axis=(1, 3))
        assert np.abs(decoded.pixels - blocks).max() <= 1


def test_what_stands_behind_the_end_is_harmless() -> None:
    encoded, expected = KINDS["rgb"]
    for ending in (bytes(1000), b"stray", encoded):
        np.testing.assert_array_equal(decode(encoded + ending), expected)


def test_header() -> None:
    encoded, _ = KINDS["grey alpha"]
    file = read_png(memoryview(encoded + b"\0"))
    assert (file.width, file.height, file.components) == (WIDTH, HEIGHT, 1)
    assert read_png(memoryview(KINDS["palette"][0])).components == 3


def test_texts_and_profiles_that_swell_never_reach_the_library() -> None:
    # 64 MiB of zeros in 64 KiB.
    compressor = zlib.compressobj(9)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(64)) + compressor.flush()
    chunks = [(b"iCCP", b"name\0\0" + bomb), (b"zTXt", b"name\0\0" + bomb), (b"iTXt", b"n\0\1\0\0\0" + bomb)]
    encoded = png(WIDTH, HEIGHT, 8, RGB_TYPE, rows_of(COLOURS), before=chunks, after=chunks[1:])
    assert read_png(memoryview(encoded)).picture == png(WIDTH, HEIGHT, 8, RGB_TYPE, rows_of(COLOURS))
    np.testing.assert_array_equal(decode(encoded), COLOURS)


def test_of_an_animation_the_default_picture_is_shown() -> None:
    file = io.BytesIO()
    frames = [Image.fromarray(COLOURS), Image.fromarray(255 - COLOURS)]
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    assert b"acTL" in file.getvalue()
    np.testing.assert_array_equal(decode(file.getvalue()), COLOURS)


def header(width: int = 60, height: int = 40, *rest: int) -> bytes:
    return struct.pack(">IIBBBBB", width, height, *(rest or (8, 2, 0, 0, 0)))


def file_of(*chunks: tuple[bytes, bytes]) -> bytes:
    return PNG_SIGNATURE + b"".join(png_chunk(*chunk) for chunk in chunks)


GOOD = KINDS["rgb"][0]
DATA = (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows_of(COLOURS))))
END = (b"IEND", b"")


@pytest.mark.parametrize(
    ("encoded", "fault"),
    [
        (GOOD[:8], "Premature end of PNG file: its IEND chunk is missing"),
        (GOOD[:-12], "Premature end of PNG file: its IEND chunk is missing"),
        (GOOD[:100], "Premature end of PNG file: it has 100 bytes, but its chunk at byte 33"),
        (GOOD[:100] + bytes(5), "Premature end of PNG file"),
        (GOOD[:80] + b"?" + GOOD[81:], "the checksum of its IDAT chunk at byte 33 is wrong"),
        (file_of(DATA, END), "must begin with an IHDR chunk of 13 bytes, not with IDAT"),
        (file_of((b"IHDR", b"short"), DATA, END), "must begin with an IHDR chunk of 13 bytes, not with IHDR of 5"),
        (file_of((b"IHDR", header(0, 40)), DATA, END), "its header says 0x40 pixels"),
        (file_of((b"IHDR", header(2**31, 1)), DATA, END), "its header says 2147483648x1 pixels"),
        (file_of((b"IHDR", header(60, 40, 4, 2, 0, 0, 0)), DATA, END), "colour type 2 with 4 bits a sample"),
        (file_of((b"IHDR", header(60, 40, 8, 7, 0, 0, 0)), DATA, END), "colour type 7 with 8 bits a sample"),
        (file_of((b"IHDR", header(60, 40, 8, 2, 1, 0, 0)), DATA, END), "compression 1, filter 0, interlacing 0"),
        (file_of((b"IHDR", header(60, 40, 8, 3, 0, 0, 0)), DATA, END), "its palette is missing"),
        (file_of((b"IHDR", header()), END), "no image in it"),
        (file_of((b"CgBI", b"1234"), (b"IHDR", header()), DATA, END), "cannot be shown without its chunk CgBI"),
        (file_of((b"IHDR", header()), (b"IDAT", DATA[1][:99]), END), "its pixels are damaged or end too early"),
        (file_of((b"IHDR", header()), (b"IDAT", zlib.compress(b"\7" * 7240)), END), "its pixels are damaged"),
        (file_of((b"IHDR", header(60, 41)), DATA, END), "its pixels are damaged or end too early"),
        (file_of((b"IHDR", header(50_000, 50_000)), DATA, END), "50000x50000 pixels are more than the 100000000"),
        (
            file_of((b"IHDR", header(100_000_000, 1)), DATA, END),
            "100000000x1 pixels; libpng reads sides of 1000000 at most",
        ),
        (PNG_SIGNATURE + png_chunk(b"IHDR", header()) + png_chunk(b"tEXt", b"") * 200_000, "more than 200000 chunks"),
    ],
)
def test_a_bad_file_is_refused_with_its_fault(encoded: bytes, fault: str) -> None:
    with pytest.raises(ImageError, match=fault):
        decode(encoded)


def test_orientation_of_a_png() -> None:
    exif = Image.Exif()
    exif[pictures.ORIENTATION] = 6
    encoded = pictures.saved(COLOURS, "PNG", exif=exif)
    np.testing.assert_array_equal(decode(encoded), COLOURS)
    np.testing.assert_array_equal(decode(encoded, exif=True), np.rot90(COLOURS, -1))
